// What the KV cache's tiers are worth on a real model: computes a prompt, writes its blocks to disk, opens a
// new cache over the same directory and reads them back; with and without compression. Also checks that the
// logits after the restart have the same bits.
//   kv_bench MODEL TEXT_FILE [TOKENS] [DIRECTORY]
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/mapped_file.h"
#include "engine/runtime.h"

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
        "{:.1f}x sooner; {}\n",
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

int run(int argc, char** argv) {
  if (argc < 3) throw_error(ErrorCode::kBadInput, "usage: kv_bench MODEL TEXT_FILE [TOKENS] [DIRECTORY]");
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
  b.run(kv::Compression::kOn, "compressed");
  b.run(kv::Compression::kAutomatic, "automatic");
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
