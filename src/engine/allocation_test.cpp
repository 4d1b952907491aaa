// Memory: decoding allocates nothing, and an allocation that fails costs one request, not the engine.
// This file replaces operator new for the whole test program: it counts, and fails when told to.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <new>

#include "engine/test_harness.h"

namespace {

std::atomic<uint64_t> news{0};
thread_local int64_t fail_in = -1;  // allocations of this thread until one fails; -1: never

void* counted(size_t bytes) {
  news.fetch_add(1, std::memory_order_relaxed);
  if (fail_in >= 0 && fail_in-- == 0) throw std::bad_alloc();
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return counted(bytes); }
void* operator new[](size_t bytes) { return counted(bytes); }
// libstdc++'s own would come here too; a sanitizer's would not, and its memory is not for free().
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return counted(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](size_t bytes, const std::nothrow_t& tag) noexcept { return operator new(bytes, tag); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace millrace::test {
namespace {

EngineOptions counted_options(const std::string& model) {
  EngineOptions options;
  options.model = model;
  options.threads = 2;
  options.context = 256;
  options.max_running = 4;
  options.step_tokens = 64;
  options.kv_tokens = 2048;
  return options;
}

Request ask_from(int32_t first, int32_t max_tokens) {
  Request r;
  for (int32_t i = 0; i < 20; ++i) r.tokens.push_back(3 + (first * 31 + i * 7) % 200);
  r.max_tokens = max_tokens;
  r.ignore_end = true;
  r.sampling = {.temperature = 0.8f, .top_k = 40, .top_p = 0.9f, .seed = static_cast<uint64_t>(first)};
  return r;
}

// What steps write is the pool's, counted, and there for the next engine.
TEST(Allocation, AnExecutorsWorkspaceComesFromThePool) {
  const EngineOptions options = counted_options(kLlamaModel);
  const size_t before = buffer_pool().stats().in_use;
  uint64_t asked = 0;
  for (int life = 0; life < 3; ++life) {
    const auto engine = Engine::create(options);
    const size_t workspace = engine->model().memory.workspace;
    EXPECT_GT(workspace, size_t{1} << 16);
    const MemoryStats memory = engine->stats().memory;
    EXPECT_GE(memory.in_use, before + workspace);
    EXPECT_GE(memory.peak, memory.in_use);
    EXPECT_GE(memory.reserved, memory.in_use);
    if (life == 0) asked = memory.system_calls;
    EXPECT_EQ(memory.system_calls, asked) << "the second engine takes what the first gave back";
  }
  EXPECT_EQ(buffer_pool().stats().in_use, before);
}

TEST(Allocation, DecodingAllocatesNothing) {
  for (const std::string& model : {kWindowModel, kLlamaModel}) {
    for (const Speculation speculation : {Speculation::kOff, Speculation::kLookup}) {
      EngineOptions options = counted_options(model);
      options.speculation = speculation;
      options.threads = 1;  // a thread allocates its own buffers the first time it draws, whenever that is
      options.prefix_cache = speculation == Speculation::kOff;
      Harness h(options);
      for (int i = 0; i < 4; ++i) h.submit(ask_from(i, 200));
      for (auto& answers : h.answers) {
        answers[0].tokens.reserve(400);
        answers[0].text.reserve(8000);
      }
      for (int i = 0; i < 40; ++i) {
        h.loop->turn();
        h.read_all();
      }
      const uint64_t before = news.load();
      const uint64_t system_before = buffer_pool().stats().system_calls;
      const uint64_t tokens_before = h.recorder->generated_tokens.load();
      for (int i = 0; i < 60; ++i) {
        h.loop->turn();
        h.read_all();
      }
      const uint64_t tokens = h.recorder->generated_tokens.load() - tokens_before;
      EXPECT_GE(tokens, 4u * 60u);
      // Token texts over 15 bytes would allocate; these models have none.
      EXPECT_EQ(news.load() - before, 0u) << "in " << tokens << " tokens";
      EXPECT_EQ(buffer_pool().stats().system_calls, system_before);
    }
  }
}

// The n-th allocation of the engine's thread fails, for n from the first to the last there is. At most one
// request ends with an error, the others' tokens are what they are alone, and no block is lost.
struct Failures {
  int runs = 0, failed_requests = 0;
};

Failures fail_everywhere(EngineOptions options, const std::vector<int32_t>& pool,
                         const std::vector<Request>& requests) {
  std::vector<std::vector<Answer>> want;
  for (const Request& r : requests) want.push_back(run_alone(options.model, r));
  Failures out;
  bool reached_the_end = false;
  for (int64_t n = 0; !reached_the_end && n < 4000; n += 1 + n / 40) {
    Harness h(options, pool);
    for (const Request& r : requests) h.submit(r);
    fail_in = n;
    for (int rounds = 0, idle = 0; rounds < 3000 && idle < 3; ++rounds) {
      try {
        if (h.loop->turn()) {
          idle = 0;
          continue;
        }
        h.runtime->cache().wait(std::chrono::milliseconds(2));  // may take in what a disk has read
      } catch (const std::bad_alloc&) {
        idle = 0;  // nobody's own: run() tries again
        continue;
      }
      idle = h.recorder->running.load() + h.recorder->waiting.load() > 0 ? 0 : idle + 1;
    }
    reached_the_end = fail_in >= 0;
    fail_in = -1;
    h.read_all();
    int failed = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      bool this_failed = false;
      for (size_t s = 0; s < want[i].size(); ++s) {
        const Answer& got = h.answers[i][s];
        EXPECT_TRUE(got.ended) << "allocation " << n << ", request " << i << ", sample " << s;
        this_failed |= got.finish == FinishReason::kError;
        if (got.finish != FinishReason::kError) {
          EXPECT_EQ(got.tokens, want[i][s].tokens) << "allocation " << n << ", request " << i;
        } else if (s == 0) {
          EXPECT_EQ(got.error, "out of memory");
        }
      }
      failed += this_failed;
    }
    EXPECT_LE(failed, 1) << "allocation " << n;
    h.runtime->cache().check_invariants();
    for (size_t g = 0; g < h.runtime->spec().kv_groups.size(); ++g) {
      EXPECT_EQ(h.runtime->cache().stats().groups[g].held, 0) << "allocation " << n;
    }
    out.failed_requests += failed;
    ++out.runs;
    if (testing::Test::HasFailure()) return out;
  }
  EXPECT_TRUE(reached_the_end);
  EXPECT_GT(out.failed_requests, 0);
  return out;
}

TEST(Allocation, AFailureCostsOneRequest) {
  EngineOptions options = counted_options(kLlamaModel);
  options.threads = 1;
  options.prefix_cache = false;
  const Failures f = fail_everywhere(options, {}, {ask_from(1, 12), ask_from(2, 30), ask_from(3, 20)});
  std::printf("[  figure  ] %d runs with one failed allocation each, %d requests failed by it\n", f.runs,
              f.failed_requests);
}

// The same with everything that remembers: prefix index, RAM and disk tiers, a pool so small that requests
// are swapped, forks, drafts.
TEST(Allocation, AFailureCostsOneRequestOfACacheThatRemembers) {
  namespace fs = std::filesystem;
  const fs::path directory = fs::path(testing::TempDir()) / fmt::format("allocation_kv_{}", ::getpid());
  fs::remove_all(directory);
  EngineOptions options = counted_options(kWindowModel);
  options.threads = 1;
  options.context = 128;
  options.speculation = Speculation::kLookup;
  options.ram_tier_bytes = size_t{1} << 20;
  options.kv_dir = directory.string();
  options.kv_dir_bytes = size_t{1} << 20;
  std::vector<Request> requests = {ask_from(1, 30), ask_from(1, 20), ask_from(2, 40), ask_from(3, 40)};
  requests[1].samples = 2;
  requests[3].priority = 2;
  const Failures f = fail_everywhere(options, {11, 11}, requests);
  fs::remove_all(directory);
  std::printf(
      "[  figure  ] with all tiers: %d runs with one failed allocation each, %d requests failed by it\n",
      f.runs, f.failed_requests);
}

}  // namespace
}  // namespace millrace::test
