// "Same bits": the logits of the cpu backend do not depend on how a prompt was cut, what else was in the
// batch or the number of threads; nor on the instruction set, but for MXFP4 in `amx`, whose activations have
// scales of their own there, and attention by tiles (heads of 32 dimensions and more, which this model lacks
// and that of same_bits_decode_test.cpp has). A small model with every operation, a windowed and a full
// layer, dense and expert blocks and mixed weight types is run each way and its logits compared bit by bit;
// and with `reference`, coarsely, so that equal nonsense does not pass.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "backend/reference/reference_backend.h"
#include "backend/step_runner.h"

namespace millrace {
namespace {

using namespace testing_support;

constexpr int32_t kHidden = 256, kHeads = 6, kKvHeads = 2, kHeadDim = 24, kVocab = 61, kFfn = 288,
                  kExperts = 5, kChosen = 2, kExpertFfn = 256, kWindow = 40, kMaxContext = 1200,
                  kMaxTokens = 200;

ExecutorSpec model_spec(DType kv_type) {
  ExecutorSpec spec;
  spec.max_tokens = kMaxTokens;
  spec.max_logit_rows = kMaxTokens;
  spec.max_context = kMaxContext;
  spec.hidden = kHidden;
  spec.heads = kHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  spec.vocab = kVocab;
  spec.ffn = kFfn;
  spec.experts = kExperts;
  spec.experts_per_token = kChosen;
  spec.expert_ffn = kExpertFfn;
  spec.kv_type = kv_type;
  spec.kv_groups = {{kWindow, 1, 300}, {0, 1, 300}};
  spec.layers = {{0, 0}, {1, 0}};
  return spec;
}

struct TinyModel : RandomModel {
  // mxfp4: the type that takes the place of MXFP4.
  explicit TinyModel(DType mxfp4 = DType::kMXFP4) : RandomModel(21, 0.06f, kHeadDim) {
    constexpr int64_t kQuery = kHeads * kHeadDim, kKv = kKvHeads * kHeadDim;
    matrix("embedding", DType::kQ8_0, kVocab, kHidden);
    const DType types[2][7] = {
        {DType::kQ4_1, DType::kQ8_0, DType::kQ5_0, DType::kBF16, DType::kQ4_0, mxfp4, DType::kQ5_1},
        {DType::kQ8_0, DType::kF16, DType::kQ8_0, DType::kF32, mxfp4, DType::kQ4_1, DType::kQ8_0}};
    for (int l = 0; l < 2; ++l) {
      const std::string p = std::to_string(l) + ".";
      vector(p + "norm1", kHidden, 1.0f);
      vector(p + "norm2", kHidden, 1.0f);
      vector(p + "q_norm", kHeadDim, 1.0f);
      vector(p + "sinks", kHeads, 0.5f);
      vector(p + "q_bias", kQuery, 0.0f);
      matrix(p + "q", types[l][0], kQuery, kHidden);
      matrix(p + "k", types[l][1], kKv, kHidden);
      matrix(p + "v", types[l][2], kKv, kHidden);
      matrix(p + "o", types[l][3], kHidden, kQuery);
      const int64_t inner = l == 0 ? kFfn : kExpertFfn, experts = l == 0 ? 0 : kExperts;
      matrix(p + "gate", types[l][4], inner, kHidden, experts);
      matrix(p + "up", types[l][5], inner, kHidden, experts);
      matrix(p + "down", types[l][6], kHidden, inner, experts);
    }
    matrix("router", DType::kF32, kExperts, kHidden);
    vector("router_bias", kExperts, 0.0f);
    vector("down_bias", kExperts * kHidden, 0.0f);
    vector("norm", kHidden, 1.0f);
    matrix("output", DType::kQ8_0, kVocab, kHidden);
  }
};

class Runner final : public StepRunner {
 public:
  Runner(Backend& backend, const TinyModel& model, DType kv_type)
      : StepRunner(backend, model, model_spec(kv_type)) {}

 private:
  void forward(Executor& e) override {
    e.embed({w("embedding"), 2.0f});
    for (int l = 0; l < 2; ++l) {
      const std::string p = std::to_string(l) + ".";
      const Norm head = l == 0 ? Norm{} : Norm{w(p + "q_norm"), 1e-6f};
      e.norm_qkv(
          {{w(p + "norm1"), 1e-5f}, {w(p + "q"), w(p + "q_bias")}, {w(p + "k")}, {w(p + "v")}, head, head});
      e.rope_append_kv({l, model_.inv_freq, 1.1f, l == 1});
      e.attend({l, l == 0 ? kWindow : 0, 0.2f, l == 0 ? w(p + "sinks") : nullptr});
      e.project_add({{w(p + "o")}});
      if (l == 0) {
        e.ffn_add({{w(p + "norm2"), 1e-5f}, {w(p + "gate")}, {w(p + "up")}, {w(p + "down")}});
      } else {
        e.route({{w(p + "norm2"), 1e-5f}, {w("router"), w("router_bias")}, kChosen});
        e.experts_add(
            {{w(p + "gate")}, {w(p + "up")}, {w(p + "down"), w("down_bias")}, Activation::kClampedSwiglu});
      }
    }
    e.norm_logits({{w("norm"), 1e-5f}, {w("output")}});
  }
};

std::vector<int32_t> prompt(int seed, int32_t length) { return random_prompt(seed, length, kVocab); }

std::vector<float> alone(Backend& backend, const TinyModel& model, DType kv_type,
                         const std::vector<int32_t>& tokens, size_t chunk) {
  return run_alone(Runner(backend, model, kv_type), tokens, chunk);
}

void expect_same_bits(const std::vector<float>& got, const std::vector<float>& want,
                      const std::string& what) {
  testing_support::expect_same_bits(got, want, kVocab, what);
}

TEST(SameBits, HoweverThePromptIsCut) {
  const TinyModel model;
  const std::vector<int32_t> tokens = prompt(1, 130);
  for (Device& device : all_devices(2)) {
    const std::vector<float> whole = alone(*device.backend, model, DType::kBF16, tokens, 200);
    for (size_t chunk : {1, 7, 16, 33}) {
      expect_same_bits(alone(*device.backend, model, DType::kBF16, tokens, chunk), whole,
                       device.label + " chunks of " + std::to_string(chunk));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SameBits, WhateverElseIsInTheBatch) {
  const TinyModel model;
  const std::vector<int32_t> tokens[3] = {prompt(1, 130), prompt(2, 61), prompt(3, 5)};
  for (Device& device : all_devices(2)) {
    Runner runner(*device.backend, model, DType::kF16);
    runner.step({{1, part(tokens[1], 0, 50)}, {0, part(tokens[0], 0, 33)}});
    runner.step({{0, part(tokens[0], 33, 90)}, {2, tokens[2]}, {1, part(tokens[1], 50, 1)}});
    runner.step({{1, part(tokens[1], 51, 10)}, {0, part(tokens[0], 123, 7)}});
    for (int s = 0; s < 3; ++s) {
      expect_same_bits(runner.logits(s), alone(*device.backend, model, DType::kF16, tokens[s], 200),
                       device.label + " sequence " + std::to_string(s));
      if (HasFatalFailure()) return;
    }
  }
}

// Rows that nobody reads are left out of the last layer: all of a step, or some, or many but one.
TEST(SameBits, WhicheverRowsAreRead) {
  const TinyModel model;
  const std::vector<int32_t> tokens[2] = {prompt(1, 130), prompt(2, 61)};
  for (Device& device : all_devices(2)) {
    Runner runner(*device.backend, model, DType::kBF16);
    runner.step({{0, part(tokens[0], 0, 40), 40}});
    runner.step({{1, part(tokens[1], 0, 33), 32}, {0, part(tokens[0], 40, 80), 60}});
    runner.step({{0, part(tokens[0], 120, 10)}, {1, part(tokens[1], 33, 28), 28}});
    for (int s = 0; s < 2; ++s) {
      const std::vector<float> all = alone(*device.backend, model, DType::kBF16, tokens[s], 200);
      const auto [first, last] = s == 0 ? std::pair{100, 130} : std::pair{32, 33};
      expect_same_bits(runner.logits(s), {all.begin() + first * kVocab, all.begin() + last * kVocab},
                       device.label + " sequence " + std::to_string(s));
      if (HasFatalFailure()) return;
    }
  }
}

// Past the span of 512 and with fewer tasks than threads, so that attention is split over the context.
TEST(SameBits, HoweverManyThreads) {
  const TinyModel model;
  const std::vector<int32_t> tokens = prompt(4, 1100);
  const auto one = make_cpu_backend({1});
  const auto run = [&](Backend& backend) {
    Runner runner(backend, model, DType::kBF16);
    size_t at = 0;
    for (; at + 200 <= 1080; at += 200) runner.step({{0, part(tokens, at, 200)}});
    runner.step({{0, part(tokens, at, 70)}});
    for (at += 70; at < 1100; ++at) runner.step({{0, part(tokens, at, 1)}});
    return runner.logits(0);
  };
  const std::vector<float> want = run(*one);
  for (int threads : {2, 3, 7}) {
    const auto backend = make_cpu_backend({threads});
    ASSERT_EQ(backend->threads(), threads);
    expect_same_bits(run(*backend), want, std::to_string(threads) + " threads");
    if (HasFatalFailure()) return;
  }
  // Made-up memory nodes, of which this machine has perhaps one.
  const auto nodes = make_cpu_backend({5, {{0, {0}}, {1, {1000, 1001, 1002, 1003}}}});
  EXPECT_NE(nodes->description().find("5 threads on 2 memory nodes"), std::string::npos)
      << nodes->description();
  expect_same_bits(run(*nodes), want, "two memory nodes");
}

// `amx` gives the activations of MXFP4 scales that are powers of two: its own bits.
bool has_bits_of_its_own(const Device& device, DType type) {
  return device.label == "cpu/amx" && (type == DType::kMXFP4 || type == DType::kMXFP4Split);
}

TEST(SameBits, OnEveryInstructionSet) {
  const std::vector<int32_t> tokens = prompt(5, 600);
  for (const auto& [mxfp4, kv_type] : {std::pair{DType::kMXFP4, DType::kBF16},
                                       {DType::kMXFP4, DType::kF8E4M3},
                                       {DType::kQ4_0, DType::kBF16}}) {
    const TinyModel model(mxfp4);
    std::vector<float> want;
    for (Device& device : cpu_devices(2)) {
      if (has_bits_of_its_own(device, mxfp4)) continue;
      const std::vector<float> got = alone(*device.backend, model, kv_type, tokens, 150);
      if (want.empty()) want = got;
      expect_same_bits(got, want, device.label + " cache " + std::string(info(kv_type).name));
      if (HasFatalFailure()) return;
    }
  }
}

// One product [kRows, cols] of m rows.
constexpr int32_t kRows = 78;  // 64 and a short 16 are the widest tiles; tasks of 32, 32 and 8 + 4 + 2
std::vector<float> product(Backend& backend, const OwnedTensor& weight, const std::vector<float>& x) {
  const int64_t cols = weight.view.cols();
  const auto m = static_cast<int32_t>(static_cast<int64_t>(x.size()) / cols);
  ExecutorSpec spec = model_spec(DType::kF32);
  spec.hidden = kRows;
  spec.heads = spec.kv_heads = 1;
  spec.head_dim = static_cast<int32_t>(cols);
  spec.max_tokens = spec.max_logit_rows = 400;
  const auto executor = backend.make_executor(spec);
  const WeightPtr loaded =
      backend.load_weight(weight.view, dequantized_where(backend, weight.view, WeightUse::kMatrix));
  const std::vector<int32_t> tokens(static_cast<size_t>(m), 0);
  const SequenceSlice slice{0, m, 0, {}};
  executor->begin({tokens, {&slice, 1}, {}});
  executor->write_slot(Slot::kAttention, x);
  executor->write_slot(Slot::kResidual, std::vector<float>(static_cast<size_t>(m * kRows), 0.0f));
  executor->project_add({{loaded.get()}});
  return executor->read_slot(Slot::kResidual);
}

// Every weight type alone, odd shapes, tiles full and short: the tables' products agree to the bit.
TEST(SameBits, EveryTypeOnEveryInstructionSet) {
  std::mt19937 random(6);
  for (DType type : types_with_kernels()) {
    // 72 blocks: more than one panel of a kernel that dequantizes weights. Floats: a piece of a row, or
    // three.
    for (const int64_t cols :
         info(type).block_elements == 1 ? std::vector<int64_t>{117, 1363} : std::vector<int64_t>{2304}) {
      const OwnedTensor weight = random_tensor(random, type, kRows, cols);
      for (int32_t m : {1, 3, 7, 19, 53, 110}) {
        if (m == 110 && cols != 1363) continue;  // more rows than one widening of floats is for
        const std::vector<float> x = random_floats(random, static_cast<size_t>(m * cols));
        std::vector<float> want;
        for (Device& device : cpu_devices(1)) {
          if (has_bits_of_its_own(device, type)) continue;
          const std::vector<float> got = product(*device.backend, weight, x);
          if (want.empty()) want = got;
          expect_same_bits(got, want,
                           fmt::format("{} {} of {} columns, m {}", device.label, info(type).name, cols, m));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// A row's product is the same alone and among others, for every type and table, at every height of a tile,
// past the rows that share a pass over the weights, and whichever kernel the number of rows asks for.
TEST(SameBits, EveryTypeForAnyNumberOfRows) {
  std::mt19937 random(8);
  for (DType type : types_with_kernels()) {
    const int64_t cols = info(type).block_elements == 1 ? 117 : 768;
    const OwnedTensor weight = random_tensor(random, type, kRows, cols);
    const std::vector<float> x = random_floats(random, static_cast<size_t>(300 * cols));
    for (Device& device : cpu_devices(2)) {
      const std::vector<float> want = product(*device.backend, weight, x);
      for (int32_t m : {1, 2, 5, 16, 17, 32, 33, 48, 64, 100, 257}) {
        const int32_t at = 300 - m;
        const std::vector<float> got = product(*device.backend, weight, {x.begin() + at * cols, x.end()});
        expect_same_bits(got, {want.begin() + at * kRows, want.end()},
                         fmt::format("{} {} the last {} of 300 rows", device.label, info(type).name, m));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The tiny model is not nonsense: close to the reference, by the norm of the logits.
TEST(SameBits, AndTheyAreTheRightOnes) {
  const TinyModel model;
  const std::vector<int32_t> tokens = prompt(7, 90);
  const auto reference = make_reference_backend();
  const std::vector<float> want = alone(*reference, model, DType::kF32, tokens, 200);
  const auto backend = make_cpu_backend({2});
  const std::vector<float> got = alone(*backend, model, DType::kBF16, tokens, 40);
  const std::vector<double> errors = sorted_row_errors(got, want, kVocab);
  EXPECT_LT(errors[errors.size() / 2],
            0.03);  // some ten products, each about half a percent off by int8 activations
  EXPECT_LT(errors[errors.size() * 9 / 10], 0.06);
  RecordProperty("median_error", std::to_string(errors[errors.size() / 2]));
}

}  // namespace
}  // namespace millrace
