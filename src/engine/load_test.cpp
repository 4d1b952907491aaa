// A real model under load: many clients at once, priorities, a pool far too small, the memory plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "engine/load_tokenizer.h"
#include "engine/memory_plan.h"
#include "engine/test_harness.h"

namespace millrace::test {
namespace {

constexpr const char* kSmolLm2 = "build/models/SmolLM2-135M-Instruct.Q4_1.gguf";

#define MILLRACE_NEEDS_MODEL()            \
  if (!std::filesystem::exists(kSmolLm2)) \
  GTEST_SKIP() << kSmolLm2 << " is not there; `python3 tools/fetch_model.py smollm2` fetches it"

// 200, or fewer under a sanitizer, which takes ten minutes for 200: MILLRACE_TEST_CLIENTS says how many.
int32_t clients_wanted() {
  const char* said = std::getenv("MILLRACE_TEST_CLIENTS");
  return said == nullptr ? 200 : std::clamp(std::atoi(said), 10, 200);
}

EngineOptions options_of(int32_t max_running, int64_t kv_tokens) {
  EngineOptions options;
  options.model = kSmolLm2;
  options.context = 128;
  options.max_running = max_running;
  options.kv_tokens = kv_tokens;
  options.step_tokens = 128;
  return options;
}

Request ask(int32_t index, int32_t prompt, int32_t generate) {
  Request r;
  uint32_t state = static_cast<uint32_t>(index) * 2654435761u + 1;
  for (int32_t i = 0; i < prompt; ++i) {
    state = state * 1664525u + 1013904223u;
    r.tokens.push_back(static_cast<int32_t>(state >> 17) % 49000);
  }
  r.max_tokens = generate;
  r.ignore_end = true;
  r.sampling.temperature = 0.0f;
  return r;
}

struct Done {
  std::vector<int32_t> tokens;
  Usage usage;
  bool good = false;
};

// All there before the first round: how long one waits behind others is the scheduler's doing, and not that
// of a thread that is slow to ask.
std::vector<Done> run_all(Harness& h, const std::vector<Request>& requests) {
  std::vector<size_t> ids;
  for (const Request& r : requests) ids.push_back(h.submit(r));
  h.run();
  std::vector<Done> done;
  for (const size_t id : ids) {
    const Answer& a = h.answers[id][0];
    done.push_back({a.tokens, a.usage, a.finish == FinishReason::kMaxTokens});
  }
  return done;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * static_cast<double>(values.size())))];
}

TEST(Load, TwoHundredClientsWithPriorities) {
  MILLRACE_NEEDS_MODEL();
  std::vector<Request> requests;
  const int32_t clients = clients_wanted();
  for (int32_t i = 0; i < clients; ++i) {
    requests.push_back(ask(i, 4 + i * 7 % 20, 3 + i % 8));
    requests.back().priority = i % 5 == 0 ? 3 : 0;
  }
  Harness engine(options_of(clients * 48 / 200, 0));
  const EngineStats start = engine.recorder->snapshot();
  std::vector<Request> few(requests.begin(), requests.begin() + 2);
  for (const Request& r : few) EXPECT_TRUE(run_all(engine, {r})[0].good);
  const EngineStats one = engine.recorder->snapshot();
  const std::vector<Done> done = run_all(engine, requests);
  const EngineStats all = engine.recorder->snapshot();
  std::vector<double> high, low;
  for (size_t i = 0; i < done.size(); ++i) {
    EXPECT_TRUE(done[i].good);
    EXPECT_EQ(static_cast<int32_t>(done[i].tokens.size()), requests[i].max_tokens);
    (requests[i].priority > 0 ? high : low).push_back(done[i].usage.queue_s);
  }
  Harness single(options_of(1, 0));
  EXPECT_EQ(done[0].tokens, run_all(single, {requests[0]})[0].tokens);
  const double alone =
      static_cast<double>(one.generated_tokens - start.generated_tokens) / (one.busy_s - start.busy_s);
  const double together =
      static_cast<double>(all.generated_tokens - one.generated_tokens) / (all.busy_s - one.busy_s);
  std::printf("[  figure  ] %d clients: %.1f tok/s of model time, one client %.1f, gain %.2f\n", clients,
              together, alone, together / alone);
  std::printf(
      "[  figure  ] queue: high p99 %.3f s, low p50 %.3f s; mean batch %.1f; scheduling %.2f%% of model "
      "time\n",
      quantile(high, 0.99), quantile(low, 0.5), all.mean_batch, 100 * all.schedule_s / all.busy_s);
  EXPECT_GT(all.mean_batch, 2);  // how many more, chunks of measured time say
  if (clients < 200) return;
  EXPECT_LT(quantile(high, 0.99), quantile(low, 0.5));
}

TEST(Load, ATenthOfTheMemoryChangesNoToken) {
  MILLRACE_NEEDS_MODEL();
  std::vector<Request> requests;
  const int32_t count = std::max(20, clients_wanted() * 36 / 200);
  for (int32_t i = 0; i < count; ++i) requests.push_back(ask(i, 6 + i * 5 % 10, 30 + i % 12));
  Harness large(options_of(36, 0));
  const std::vector<Done> want = run_all(large, requests);
  int64_t need = 0;
  for (const Request& r : requests) need += static_cast<int64_t>(r.tokens.size()) + r.max_tokens;
  for (const size_t ram : {size_t{0}, size_t{64} << 20}) {
    EngineOptions options = options_of(36, need / 10);
    options.ram_tier_bytes = ram;
    Harness small(options);
    const std::vector<Done> got = run_all(small, requests);
    const EngineStats stats = small.recorder->snapshot();
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(got[i].good);
      EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    }
    std::printf("[  figure  ] pool of %ld tokens for %ld: %lu swaps, %lu recomputations\n",
                static_cast<long>(options.kv_tokens), static_cast<long>(need), stats.preemptions_swap,
                stats.preemptions_recompute);
    EXPECT_EQ(small.runtime->cache().stats().groups[0].held, 0);
    EXPECT_GT(ram == 0 ? stats.preemptions_recompute : stats.preemptions_swap, 0u);
  }
}

size_t anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  size_t kib = 0;
  while (status >> word) {
    if (word == "RssAnon:" && status >> kib) return kib * 1024;
  }
  return 0;
}

// Once every block and every row has been used, the process has grown by what the plan said.
TEST(Load, TheMemoryPlanIsWhatIsUsed) {
  MILLRACE_NEEDS_MODEL();
  EngineOptions options = options_of(16, 16384);
  options.context = 1024;
  options.step_tokens = 512;
  options.threads = 1;
  const RuntimeSetup setup{.sequences = RuntimeSetup::kShared};
  MemoryPlan plan;
  {
    const io::Checkpoint checkpoint = io::Checkpoint::open(kSmolLm2);
    const auto backend = make_backend("cpu", {.threads = 1});
    plan = plan_memory(checkpoint, read_config(checkpoint), *backend, options, setup);
  }
  // The tokenizer is not part of the plan: measured by itself.
  size_t tokenizer = anonymous_bytes();
  const auto kept = load_tokenizer(io::Checkpoint::open(kSmolLm2));
  tokenizer = anonymous_bytes() - tokenizer;
  const size_t before = anonymous_bytes();
  const auto runtime = Runtime::open(options, setup);
  // Every page of pool and workspace, without the time that computing 16,384 tokens would take: blocks are
  // written through the store, rows by one full step.
  std::vector<std::byte> bytes(runtime->spec().kv_block_bytes(0));
  ExecutorStore store(runtime->executor());
  for (int32_t b = 0; b < runtime->spec().kv_groups[0].num_blocks; ++b) store.write(0, b, bytes);
  kv::Sequence sequence = runtime->make_sequence();
  const std::vector<int32_t> tokens(static_cast<size_t>(runtime->spec().max_tokens), 5);
  runtime->prefill(sequence, tokens);
  const size_t used = anonymous_bytes() - before - tokenizer - bytes.size();
  const size_t planned = plan.total - plan.weights_mapped;
  std::printf("[  figure  ] memory: planned %.1f MiB, used %.1f MiB\n",
              static_cast<double>(planned) / 1048576, static_cast<double>(used) / 1048576);
  EXPECT_NEAR(static_cast<double>(used) / static_cast<double>(planned), 1.0, 0.02);
}

}  // namespace
}  // namespace millrace::test
