// Memory: decoding allocates nothing, and an allocation that fails costs one request, not the engine.
// This file replaces operator new for the whole test program: it counts, and fails when told to.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
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

TEST(Allocation, DecodingAllocatesNothing) {
  for (const std::string& model : {kWindowModel, kLlamaModel}) {
    for (const Speculation speculation : {Speculation::kOff, Speculation::kLookup}) {
      EngineOptions options = counted_options(model);
      options.speculation = speculation;
      options.threads = 1;  // a thread allocates its own buffers the first time it draws, whenever that is
      options.prefix_cache = false;
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

// The n-th allocation of the engine's thread fails, for n from the first to the last there is. (Without the
// prefix cache, whose index does not promise this.)
TEST(Allocation, AFailureCostsOneRequest) {
  const std::vector<Request> requests = {ask_from(1, 12), ask_from(2, 30), ask_from(3, 20)};
  std::vector<std::vector<Answer>> want;
  for (const Request& r : requests) want.push_back(run_alone(kLlamaModel, r));
  EngineOptions options = counted_options(kLlamaModel);
  options.threads = 1;
  options.prefix_cache = false;
  int failed_requests = 0, runs = 0;
  bool reached_the_end = false;
  for (int64_t n = 0; !reached_the_end && n < 2000; n += 1 + n / 40) {
    Harness h(options);
    for (const Request& r : requests) h.submit(r);
    int failed = 0;
    fail_in = n;
    for (int rounds = 0; rounds < 400; ++rounds) {
      bool moved = false;
      try {
        moved = h.loop->turn();
      } catch (const std::bad_alloc&) {
        moved = true;  // nobody's own: run() tries again
      }
      if (!moved) break;
    }
    reached_the_end = fail_in >= 0;
    fail_in = -1;
    h.read_all();
    for (size_t i = 0; i < requests.size(); ++i) {
      const Answer& got = h.answers[i][0];
      ASSERT_TRUE(got.ended) << "allocation " << n << ", request " << i;
      if (got.finish == FinishReason::kError) {
        EXPECT_EQ(got.error, "out of memory");
        ++failed;
      } else {
        EXPECT_EQ(got.tokens, want[i][0].tokens) << "allocation " << n << ", request " << i;
      }
    }
    EXPECT_LE(failed, 1) << "allocation " << n;
    h.runtime->cache().check_invariants();
    EXPECT_EQ(h.runtime->cache().stats().groups[0].held, 0) << "allocation " << n;
    failed_requests += failed;
    ++runs;
  }
  std::printf("[  figure  ] %d runs with one failed allocation each, %d requests failed by it\n", runs,
              failed_requests);
  EXPECT_TRUE(reached_the_end);
  EXPECT_GT(failed_requests, 0);
}

}  // namespace
}  // namespace millrace::test
