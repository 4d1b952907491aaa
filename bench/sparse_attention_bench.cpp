// sparse_attention_bench: attention of one decoded token, or of the last --rows tokens of a prompt, over a
// long context of random keys, one layer of the cpu executor: full, and sparse with budgets. Prints
// microseconds, the median of the runs, as JSON. Blocks lie scattered in the pool, as those of a server that
// has run for a while.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/cpu_backend.h"
#include "base/error.h"
#include "base/paging.h"

namespace millrace {
namespace {

struct Options {
  int32_t context = 32768, heads = 32, kv_heads = 8, head_dim = 128;
  std::vector<int32_t> budgets{1024, 2048, 4096, 8192};
  int32_t rows = 1;
  int threads = 0, runs = 9;
};

class Bench {
 public:
  explicit Bench(const Options& options) : o_(options), backend_(make_cpu_backend({o_.threads})) {
    spec_.max_tokens = spec_.max_logit_rows = kStep;
    spec_.max_context = o_.context + kBlockTokens;
    spec_.hidden = spec_.vocab = 32;
    spec_.heads = o_.heads;
    spec_.kv_heads = o_.kv_heads;
    spec_.head_dim = o_.head_dim;
    spec_.kv_type = DType::kBF16;
    spec_.kv_groups = {{0, 1, blocks_for(spec_.max_context)}};
    spec_.layers = {{0, 0}};
    spec_.page_summaries = true;
    executor_ = backend_->make_executor(spec_);
    for (int32_t i = 0; i < spec_.kv_groups[0].num_blocks; ++i) table_.push_back(i);
    std::shuffle(table_.begin(), table_.end(), random_);
  }

  void fill() {
    for (int32_t at = 0; at < o_.context; at += kStep) {
      begin(at, std::min(kStep, o_.context - at), kLeastPages);  // any: pages are summarized
      write(Slot::kKey, o_.kv_heads);
      write(Slot::kValue, o_.kv_heads);
      executor_->rope_append_kv({0, {}, 1.0f, false});
    }
  }

  // Microseconds of the last tokens' attention; pages 0: full.
  double time(int32_t pages) {
    std::vector<double> took;
    for (int i = 0; i < o_.runs; ++i) {
      begin(o_.context - o_.rows, o_.rows, pages);
      write(Slot::kQuery, o_.heads);
      const auto start = std::chrono::steady_clock::now();
      executor_->attend({0, 0, 1.0f / std::sqrt(static_cast<float>(o_.head_dim)), nullptr});
      took.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(took.begin(), took.end());
    return took[took.size() / 2];
  }

  const Backend& backend() const { return *backend_; }

 private:
  static constexpr int32_t kStep = 512, kLeastPages = 4;

  void begin(int32_t context, int32_t tokens, int32_t pages) {
    ids_.assign(static_cast<size_t>(tokens), 0);
    slice_ = {0, tokens, context, {}};
    slice_.tables[0] = table_.data();
    slice_.sparse_pages = pages;
    executor_->begin({ids_, {&slice_, 1}, {}});
  }
  void write(Slot slot, int32_t heads) {
    std::normal_distribution<float> normal;
    values_.resize(ids_.size() * static_cast<size_t>(heads * o_.head_dim));
    for (float& value : values_) value = normal(random_);
    executor_->write_slot(slot, values_);
  }

  Options o_;
  std::unique_ptr<Backend> backend_;
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  std::mt19937 random_{1};
  std::vector<int32_t> table_, ids_;
  std::vector<float> values_;
  SequenceSlice slice_;
};

int run(const Options& options) {
  Bench bench(options);
  bench.fill();
  nlohmann::ordered_json out = {{"context", options.context},   {"heads", options.heads},
                                {"kv_heads", options.kv_heads}, {"head_dim", options.head_dim},
                                {"isa", bench.backend().isa()}, {"threads", bench.backend().threads()},
                                {"runs", options.runs},         {"rows", options.rows}};
  out["full_us"] = bench.time(0);
  for (const int32_t budget : options.budgets) {
    out["sparse_us"][std::to_string(budget)] = bench.time(budget / kBlockTokens);
  }
  out["full_again_us"] = bench.time(0);
  std::printf("%s\n", out.dump(1).c_str());
  return 0;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  millrace::Options options;
  CLI::App app("attention of one decoded token, or of some of a prompt, full and sparse");
  app.add_option("--context", options.context)->check(CLI::Range(1024, 1 << 22));
  app.add_option("--heads", options.heads);
  app.add_option("--kv-heads", options.kv_heads);
  app.add_option("--head-dim", options.head_dim);
  app.add_option("--budgets", options.budgets)->delimiter(',');
  app.add_option("--rows", options.rows)->check(CLI::Range(1, 512));
  app.add_option("--threads", options.threads);
  app.add_option("--runs", options.runs)->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  try {
    return millrace::run(options);
  } catch (const millrace::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
