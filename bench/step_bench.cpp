// Steps of a model on the GPU without a file: the operations of a Llama or a Qwen3 with experts, on random
// weights of exact shape. First the logits of a short prompt in one step and token by token are compared to
// the bit; then decode, a prompt of 2,048 tokens and, by operation, where a decoded token's time goes.
//   step_bench [--shape 1b|8b|14b|30b-a3b] [--type q4_k|q4_k_m|q6_k|q8_0|..] [--layers N] [--compute
//   full|fp8]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "backend/cuda_backend.h"
#include "base/error.h"
#include "kernels/cuda/quant/random_rows.h"

namespace millrace {
namespace {

struct Shape {
  const char* name;
  int32_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab, experts, chosen;
};
constexpr Shape kShapes[] = {{"1b", 16, 2048, 32, 8, 64, 8192, 128256, 0, 0},
                             {"8b", 32, 4096, 32, 8, 128, 14336, 128256, 0, 0},
                             {"14b", 40, 5120, 40, 8, 128, 17408, 151936, 0, 0},
                             {"30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, 128, 8}};
constexpr int32_t kPrompt = 2048, kContext = 4096;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Model {
 public:
  Model(Backend& backend, const Shape& shape, DType type, DType other)
      : backend_(backend), shape_(shape), type_(type), other_(other) {
    for (int i = 0; i < shape.head_dim / 2; ++i)
      inv_freq_.push_back(static_cast<float>(std::pow(5e5, -2.0 * i / shape.head_dim)));
    const int64_t hidden = shape.hidden, query = int64_t{shape.heads} * shape.head_dim,
                  kv = int64_t{shape.kv_heads} * shape.head_dim;
    embedding_ = matrix(type, shape.vocab, hidden, 0, WeightUse::kLookup);
    output_ = matrix(other, shape.vocab, hidden, 0, WeightUse::kMatrix);
    norm_ = vector(hidden);
    layers_.resize(static_cast<size_t>(shape.layers));
    for (size_t l = 0; l < layers_.size(); ++l) {
      Layer& w = layers_[l];
      const DType third = l % 2 == 0 ? other : type;  // as Q4_K_M has every second v and down
      w.norm1 = vector(hidden), w.norm2 = vector(hidden);
      w.q = matrix(type, query, hidden), w.k = matrix(type, kv, hidden), w.v = matrix(third, kv, hidden);
      w.o = matrix(type, hidden, query);
      w.gate = matrix(type, shape.ffn, hidden, shape.experts);
      w.up = matrix(type, shape.ffn, hidden, shape.experts);
      w.down = matrix(third, hidden, shape.ffn, shape.experts);
      if (shape.experts > 0) w.router = matrix(DType::kF32, shape.experts, hidden);
    }
    ExecutorSpec spec;
    spec.max_tokens = kPrompt;
    spec.max_logit_rows = 64;
    spec.max_context = kContext;
    spec.hidden = shape.hidden, spec.heads = shape.heads, spec.kv_heads = shape.kv_heads;
    spec.head_dim = shape.head_dim, spec.vocab = shape.vocab;
    if (shape.experts == 0) spec.ffn = shape.ffn;
    spec.experts = shape.experts, spec.experts_per_token = shape.chosen;
    if (shape.experts > 0) spec.expert_ffn = shape.ffn;
    spec.kv_type = DType::kBF16;
    spec.kv_groups = {{0, shape.layers, blocks_for(kContext)}};
    for (int32_t l = 0; l < shape.layers; ++l) spec.layers.push_back({0, l});
    executor_ = backend.make_executor(spec);
    for (int32_t i = 0; i < blocks_for(kContext); ++i) table_.push_back(i);
    raw_.clear();
  }

  // Logits of the last `read` of these tokens behind `context` others.
  std::span<const float> logits(std::span<const int32_t> tokens, int32_t context, int32_t read) {
    step(tokens, context, read, true);
    return executor_->logits();
  }
  int32_t next(std::span<const int32_t> tokens, int32_t context) {
    step(tokens, context, 1, tokens.size() > 1);
    return executor_->greedy_tokens()[0];
  }
  Executor& executor() { return *executor_; }
  double bytes_per_token() const { return bytes_per_token_; }

 private:
  struct Layer {
    WeightPtr norm1, norm2, q, k, v, o, router, gate, up, down;
  };
  WeightPtr matrix(DType type, int64_t rows, int64_t cols, int64_t experts = 0,
                   WeightUse use = WeightUse::kDequantized) {
    const int64_t all = rows * std::max<int64_t>(experts, 1);
    std::vector<uint8_t>& raw = raw_[{static_cast<int64_t>(type), all, cols}];
    if (raw.empty()) {
      raw = type == DType::kF32 ? floats(all * cols) : random(type, all, cols);
    }
    TensorView view;
    view.name = "random";
    view.type = type;
    view.rank = experts > 0 ? 3 : 2;
    view.shape = experts > 0 ? std::array<int64_t, 4>{experts, rows, cols, 1}
                             : std::array<int64_t, 4>{rows, cols, 1, 1};
    view.data = reinterpret_cast<const std::byte*>(raw.data());
    view.row_stride_bytes = static_cast<int64_t>(bytes_of(type, cols));
    if (use == WeightUse::kDequantized && backend_.multiplies_fp8(view)) use = WeightUse::kFp8;
    if (use == WeightUse::kDequantized && backend_.dequantized_bytes(view) == 0) use = WeightUse::kMatrix;
    if (use != WeightUse::kLookup) {
      bytes_per_token_ +=
          static_cast<double>(view.bytes()) *
          (experts > 0 ? static_cast<double>(shape_.chosen) / static_cast<double>(experts) : 1.0);
    }
    return backend_.load_weight(view, use);
  }
  // Few different rows: a generator would take longer than everything else.
  std::vector<uint8_t> random(DType type, int64_t rows, int64_t cols) {
    const int64_t some = std::min<int64_t>(rows, 509);
    std::vector<uint8_t> few = cuda::random_rows(type, some, cols, random_), all;
    all.reserve(static_cast<size_t>(rows) * bytes_of(type, cols));
    for (int64_t r = 0; r < rows; r += some) {
      all.insert(all.end(), few.begin(),
                 few.begin() + static_cast<int64_t>(bytes_of(type, cols)) * std::min(some, rows - r));
    }
    return all;
  }
  std::vector<uint8_t> floats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    std::normal_distribution<float> normal(0.0f, 0.02f);
    for (float& v : values) v = normal(random_);
    std::vector<uint8_t> bytes(values.size() * sizeof(float));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  WeightPtr vector(int64_t size) {
    const std::vector<float> ones(static_cast<size_t>(size), 0.02f);
    TensorView view;
    view.name = "norm";
    view.rank = 2;
    view.shape = {1, size, 1, 1};
    view.data = reinterpret_cast<const std::byte*>(ones.data());
    view.row_stride_bytes = size * static_cast<int64_t>(sizeof(float));
    return backend_.load_weight(view, WeightUse::kVector);
  }
  void step(std::span<const int32_t> tokens, int32_t context, int32_t read, bool prompt) {
    const auto count = static_cast<int32_t>(tokens.size());
    SequenceSlice slice{0, count, context, {}};
    if (prompt) slice.fp8_until = context + count;
    slice.tables[0] = table_.data();
    std::vector<int32_t> rows;
    for (int32_t r = count - read; r < count; ++r) rows.push_back(r);
    executor_->begin({tokens, {&slice, 1}, rows, {}, false});
    Executor& e = *executor_;
    e.embed({embedding_.get()});
    for (int32_t l = 0; l < shape_.layers; ++l) {
      const Layer& w = layers_[static_cast<size_t>(l)];
      e.norm_qkv({{w.norm1.get()}, {w.q.get()}, {w.k.get()}, {w.v.get()}, {}, {}});
      e.rope_append_kv({l, inv_freq_});
      e.attend({l, 0, 1.0f / std::sqrt(static_cast<float>(shape_.head_dim))});
      e.project_add({{w.o.get()}});
      if (shape_.experts > 0) {
        Route route;
        route.norm = {w.norm2.get()}, route.router = {w.router.get()};
        route.experts_per_token = shape_.chosen;
        e.route(route);
        Experts experts;
        experts.gate = {w.gate.get()}, experts.up = {w.up.get()}, experts.down = {w.down.get()};
        experts.activation = Activation::kSilu;
        e.experts_add(experts);
      } else {
        e.ffn_add({{w.norm2.get()}, {w.gate.get()}, {w.up.get()}, {w.down.get()}});
      }
    }
    e.norm_logits({{norm_.get()}, {output_.get()}});
  }

  Backend& backend_;
  Shape shape_;
  DType type_, other_;
  std::mt19937 random_{7};
  std::map<std::array<int64_t, 3>, std::vector<uint8_t>> raw_;
  std::vector<float> inv_freq_;
  std::vector<int32_t> table_;
  WeightPtr embedding_, output_, norm_;
  std::vector<Layer> layers_;
  std::unique_ptr<Executor> executor_;
  double bytes_per_token_ = 0;
};

std::vector<int32_t> some_tokens(int32_t count, int32_t vocab) {
  std::mt19937 random(1);
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
  return tokens;
}

// The prompt in one step, in chunks of 3 and 7, and token by token.
void check_bits(Model& model, const Shape& shape) {
  constexpr int32_t kTokens = 40;
  const std::vector<int32_t> tokens = some_tokens(kTokens, shape.vocab);
  const std::span<const float> whole = model.logits(tokens, 0, kTokens);
  const std::vector<float> want(whole.begin(), whole.end());
  for (const int32_t chunk : {1, 3, 7}) {
    size_t other = 0, not_finite = 0, first = want.size();
    for (int32_t at = 0; at < kTokens; at += chunk) {
      const int32_t count = std::min(chunk, kTokens - at);
      const std::span<const float> got = model.logits(
          std::span(tokens).subspan(static_cast<size_t>(at), static_cast<size_t>(count)), at, count);
      for (size_t i = 0; i < got.size(); ++i) {
        const size_t place = static_cast<size_t>(at) * static_cast<size_t>(shape.vocab) + i;
        not_finite += std::isfinite(got[i]) ? 0 : 1;
        if (std::memcmp(&got[i], &want[place], sizeof(float)) == 0) continue;
        other += 1, first = std::min(first, place);
      }
    }
    std::printf("  in chunks of %d: %zu of %zu logits differ", chunk, other, want.size());
    if (other > 0) std::printf(", the first of position %zu", first / static_cast<size_t>(shape.vocab));
    std::printf(", %zu are not finite\n", not_finite);
  }
}

void print_operations(const char* what, const std::vector<TimedOperation>& operations) {
  std::map<Operation, std::pair<int, double>> times;
  for (const TimedOperation& t : operations)
    times[t.operation].first += 1, times[t.operation].second += t.seconds;
  const char* names[] = {"embed", "norm_qkv", "rope",    "attend", "project",
                         "ffn",   "route",    "experts", "logits", "pick"};
  std::printf("  %s, us each:", what);
  for (const auto& [op, time] : times)
    std::printf(" %s %.1f;", names[static_cast<int>(op)], 1e6 * time.second / time.first);
  std::printf("\n");
}

void time_steps(Model& model, const Shape& shape, double bandwidth) {
  const std::vector<int32_t> prompt = some_tokens(kPrompt, shape.vocab);
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const Clock::time_point start = Clock::now();
    model.next(prompt, 0);
    best = std::min(best, seconds_since(start));
  }
  std::printf("  prompt of %d: %.1f ms, %.0f tok/s\n", kPrompt, 1e3 * best, kPrompt / best);
  constexpr int kSteps = 128;
  best = 1e9;
  for (int i = 0; i < 3; ++i) {
    int32_t token = prompt[0];
    const Clock::time_point start = Clock::now();
    for (int32_t s = 0; s < kSteps; ++s) token = model.next({&token, 1}, s);
    best = std::min(best, seconds_since(start) / kSteps);
  }
  const double limit = model.bytes_per_token() / bandwidth;
  std::printf("  decode: %.0f us, %.0f tok/s; the file's %.2f GB a token at %.0f GB/s: %.0f us, %.0f%%\n",
              1e6 * best, 1 / best, 1e-9 * model.bytes_per_token(), 1e-9 * bandwidth, 1e6 * limit,
              100 * limit / best);
  model.executor().time_operations();
  int32_t token = prompt[0];
  for (int32_t s = 0; s < 4; ++s) token = model.next({&token, 1}, s);
  model.executor().operation_times();
  for (int32_t s = 0; s < 16; ++s) token = model.next({&token, 1}, s);
  print_operations("alone", model.executor().operation_times());
  model.next(prompt, 0);
  print_operations("of the prompt", model.executor().operation_times());
}

DType type_named(const std::string& name) {
  for (int i = 0; i < static_cast<int>(DType::kQ4_Z) + 1; ++i) {
    std::string lower;
    for (const char c : std::string(info(static_cast<DType>(i)).name))
      lower += static_cast<char>(std::tolower(c));
    if (lower == name) return static_cast<DType>(i);
  }
  throw_error(ErrorCode::kBadInput, "--type: found {}, expected a weight type such as q4_k, or q4_k_m", name);
}

int run(int argc, char** argv) {
  Shape shape = kShapes[1];
  std::string type = "q4_k", compute = "full";
  int32_t layers = 0;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (key == "--type") {
      type = value;
    } else if (key == "--compute" && (value == "full" || value == "fp8")) {
      compute = value;
    } else if (key == "--layers") {
      layers = std::atoi(value.c_str());
    } else if (key == "--shape") {
      const Shape* found = nullptr;
      for (const Shape& s : kShapes) found = value == s.name ? &s : found;
      if (found == nullptr)
        throw_error(ErrorCode::kBadInput, "--shape: found {}, expected 1b, 8b, 14b or 30b-a3b", value);
      shape = *found;
    } else {
      throw_error(ErrorCode::kBadInput,
                  "found {}, expected --shape, --type, --layers or --compute full or fp8", key);
    }
  }
  if (layers > 0) shape.layers = layers;
  const bool mixed = type == "q4_k_m";
  BackendOptions options;
  options.fp8_prompts = compute == "fp8";
  const std::unique_ptr<Backend> backend = make_cuda_backend(options, 0);
  const double bandwidth = backend->measure_read_bandwidth().value();
  const DType main_type = type_named(mixed ? "q4_k" : type);
  std::printf("%s %s, %d layers, compute %s\n", shape.name, type.c_str(), shape.layers, compute.c_str());
  std::fflush(stdout);
  Model model(*backend, shape, main_type, mixed ? DType::kQ6_K : main_type);
  check_bits(model, shape);
  std::fflush(stdout);
  time_steps(model, shape, bandwidth);
  return 0;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  try {
    return millrace::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "step_bench: %s\n", e.what());
    return 1;
  }
}
