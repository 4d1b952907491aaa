// What the KV cache costs and what its tiers are worth.
//   kv_bench                                         bookkeeping: processor time per call, no model, no bytes
//   kv_bench MODEL TEXT_FILE [TOKENS] [DIRECTORY]    computes a prompt, writes its blocks to disk, opens a
//   new
//       cache over the same directory and reads them back, with and without compression; checks that the
//       logits after the restart have the same bits.
#include <fmt/core.h>

#include <time.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/mapped_file.h"
#include "engine/executor_store.h"
#include "engine/load_tokenizer.h"
#include "kv/cache.h"
#include "model/model.h"

namespace millrace {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Bench {
  io::Checkpoint checkpoint;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Model> model;
  ExecutorSpec spec;
  std::unique_ptr<Executor> executor;
  std::optional<ExecutorStore> store;
  std::vector<int32_t> tokens;
  std::string directory;

  kv::CacheOptions options(kv::Compression compression) const {
    kv::CacheOptions o;
    for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
      const KvGroupSpec& group = spec.kv_groups[g];
      o.groups.push_back({group.window, group.num_blocks, spec.kv_block_bytes(static_cast<int>(g))});
    }
    o.identity = checkpoint.path();
    o.ram_bytes = size_t{1} << 30;
    o.disk_directory = directory;
    o.disk_bytes = uint64_t{64} << 30;
    o.compression = compression;
    return o;
  }

  // Computes what a sequence lacks of the prompt; the last token's logits.
  std::vector<float> compute(kv::Cache& cache, kv::Sequence& s) {
    while (s.length() < static_cast<int32_t>(tokens.size())) {
      const auto left = std::span(tokens).subspan(static_cast<size_t>(s.length()));
      const auto chunk = left.first(std::min<size_t>(left.size(), static_cast<size_t>(spec.max_tokens)));
      const auto count = static_cast<int32_t>(chunk.size());
      if (!cache.reserve(s, count)) throw_error(ErrorCode::kNoMemory, "kv_bench: the pool is too small");
      SequenceSlice slice{.first_row = 0, .num_tokens = count, .context_len = s.length(), .tables = {}};
      for (size_t g = 0; g < spec.kv_groups.size(); ++g) slice.tables[g] = s.table(static_cast<int>(g));
      const int32_t row = count - 1;
      model->forward(*executor, {.tokens = chunk, .sequences = {&slice, 1}, .logit_rows = {&row, 1}});
      cache.advance(s, chunk);
      cache.poll();
    }
    const auto logits = executor->logits();
    return {logits.begin(), logits.end()};
  }

  void run(kv::Compression compression, const char* name) {
    std::filesystem::remove_all(directory);
    std::vector<float> cold;
    double computed = 0;
    {
      kv::Cache cache(options(compression), *store);
      const auto prompt = cache.make_prompt(tokens);
      kv::Sequence s = cache.attach(prompt);
      auto start = Clock::now();
      cold = compute(cache, s);
      computed = seconds_since(start);
      s.reset();
      start = Clock::now();
      cache.flush();
      const kv::CacheStats stats = cache.stats();
      fmt::print("{}: {} tokens computed in {:.3f} s, flushed in {:.3f} s after that\n", name, tokens.size(),
                 computed, seconds_since(start));
      fmt::print("  {} blocks, {:.1f} MB written, stored/raw {:.3f}, writer {:.2f} GB/s of raw bytes\n",
                 stats.disk.blocks, static_cast<double>(stats.disk.bytes_written) / 1e6,
                 stats.compression_ratio, stats.disk_write_rate / 1e9);
    }
    kv::Cache cache(options(compression), *store);
    const auto start = Clock::now();
    const auto prompt = cache.make_prompt(tokens);
    kv::Sequence s = cache.attach(prompt);
    while (!cache.ready(s)) cache.wait(std::chrono::milliseconds(10));
    const double loaded = seconds_since(start);
    const int32_t cached = s.length();
    const std::vector<float> warm = compute(cache, s);
    const double first_token = seconds_since(start);
    const kv::CacheStats stats = cache.stats();
    fmt::print(
        "  restart: {} tokens from disk in {:.3f} s, reader {:.2f} GB/s of raw bytes; first token after "
        "{:.3f} s, "
        "{:.1f}x as fast; {}\n",
        cached, loaded, stats.disk_read_rate / 1e9, first_token, computed / first_token,
        std::memcmp(cold.data(), warm.data(), cold.size() * sizeof(float)) == 0 ? "same bits"
                                                                                : "DIFFERENT BITS");
    start_swap(cache, s);
  }

  void start_swap(kv::Cache& cache, kv::Sequence& s) {
    for (int i = 0; i < 3; ++i) {
      const kv::SwapCost cost = cache.swap_cost(s);
      const auto start = Clock::now();
      const bool out = cache.swap_out(s);
      const double out_time = seconds_since(start);
      cache.evict(0, 1 << 30);
      const auto back = Clock::now();
      const bool in = out && cache.swap_in(s);
      if (i == 2) continue;
      fmt::print("  swap of {:.1f} MB: out {:.1f} ms, back {:.1f} ms ({})\n",
                 static_cast<double>(cost.bytes) / 1e6, out_time * 1e3, seconds_since(back) * 1e3,
                 in ? "ok" : "did not fit");
    }
  }
};

// ---------------------------------------------------------------- bookkeeping

class NoBytes final : public kv::BlockStore {
 public:
  void read(int, int32_t, std::span<std::byte>) override {}
  void write(int, int32_t, std::span<const std::byte>) override {}
  void copy(int, int32_t, int32_t) override {}
};

double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void bookkeeping() {
  constexpr int32_t kSequences = 1000, kSteps = 160;
  NoBytes bytes;
  kv::CacheOptions options;
  options.groups = {{128, 20000, 64}, {0, 60000, 64}};
  options.table_tokens = 4096;
  kv::Cache cache(options, bytes);
  std::vector<int32_t> tokens(4096);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 7919 % 50000);

  double start = thread_seconds();
  for (int i = 0; i < 200; ++i) cache.make_prompt(tokens);
  fmt::print("hash a prompt of 4096 tokens: {:.0f} us\n", (thread_seconds() - start) / 200 * 1e6);
  {
    kv::Sequence s = cache.make_sequence();
    if (!cache.reserve(s, 4096)) throw_error(ErrorCode::kNoMemory, "kv_bench: the pool is too small");
    cache.advance(s, tokens);
  }
  const auto prompt = cache.make_prompt(tokens);
  start = thread_seconds();
  int32_t hit = 0;
  for (int i = 0; i < 200; ++i) hit = cache.match(*prompt).tokens;
  const double match = thread_seconds() - start;
  start = thread_seconds();
  for (int i = 0; i < 200; ++i) kv::Sequence s = cache.attach(prompt);
  fmt::print("hit of {} tokens: match {:.0f} us, attach and release {:.0f} us\n", hit, match / 200 * 1e6,
             (thread_seconds() - start) / 200 * 1e6);

  // Every sequence its own tokens: a block is named for each 16th of them, window blocks leave.
  std::vector<kv::Sequence> sequences;
  for (int32_t i = 0; i < kSequences; ++i) sequences.push_back(cache.make_sequence());
  start = thread_seconds();
  for (int32_t step = 0; step < kSteps; ++step) {
    for (int32_t i = 0; i < kSequences; ++i) {
      const int32_t token = i + step;
      if (!cache.reserve(sequences[i], 1))
        throw_error(ErrorCode::kNoMemory, "kv_bench: the pool is too small");
      cache.advance(sequences[i], {&token, 1});
    }
    cache.poll();
  }
  fmt::print("reserve and advance {} sequences by a token: {:.0f} us a step\n", kSequences,
             (thread_seconds() - start) / kSteps * 1e6);
}

int run(int argc, char** argv) {
  if (argc == 1) {
    bookkeeping();
    return 0;
  }
  if (argc < 3)
    throw_error(ErrorCode::kBadInput, "usage: kv_bench [MODEL TEXT_FILE [TOKENS] [DIRECTORY] [plain]]");
  Bench b;
  b.checkpoint = io::Checkpoint::open(argv[1]);
  b.backend = make_backend("cpu", {});
  const ModelConfig config = read_config(b.checkpoint);
  const auto count = static_cast<size_t>(argc > 3 ? std::atoi(argv[3]) : 2048);
  b.directory = argc > 4 ? argv[4] : (std::filesystem::temp_directory_path() / "millrace-kv-bench").string();
  b.tokens = load_tokenizer(b.checkpoint)->encode(read_text_file(argv[2]));
  while (b.tokens.size() < count) b.tokens.insert(b.tokens.end(), b.tokens.begin(), b.tokens.end());
  b.tokens.resize(count);
  ExecutorLimits limits;
  limits.max_context = static_cast<int32_t>(count) + 16;
  limits.kv_type = b.backend->default_kv_type();
  b.spec = make_executor_spec(config, limits);
  b.model = Model::load(b.checkpoint, *b.backend);
  b.executor = b.backend->make_executor(b.spec);
  b.store.emplace(*b.executor);
  b.run(kv::Compression::kOff, "plain");
  if (argc <= 5 || std::string(argv[5]) != "plain") {
    b.run(kv::Compression::kOn, "compressed");
    b.run(kv::Compression::kAutomatic, "automatic");
  }
  std::filesystem::remove_all(b.directory);
  return 0;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  try {
    return millrace::run(argc, argv);
  } catch (const millrace::Error& error) {
    fmt::print(stderr, "kv_bench: {}\n", error.what());
    return 2;
  }
}
