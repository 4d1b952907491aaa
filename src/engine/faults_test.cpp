// A whole engine against what goes wrong around it: a disk that is full or broken, a process that is killed
// in the middle of its work, tenants that must not see each other's prompts; and 64 requests in one batch.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <random>

#include "engine/test_harness.h"

namespace millrace::test {
namespace {

namespace fs = std::filesystem;

class Directory {
 public:
  explicit Directory(const char* name)
      : path_(fs::path(testing::TempDir()) / fmt::format("millrace-{}-{}", name, ::getpid())) {
    fs::remove_all(path_);
  }
  ~Directory() { fs::remove_all(path_); }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

// Of less than the requests below hold together: blocks leave and come back.
EngineOptions crowded(const std::string& model) { return small_options(model, 640); }

// Requests of six documents: every second one begins as another does.
Request document(int32_t i, int32_t max_tokens = 12) {
  Request r;
  for (int32_t p = 0; p < 60 + i % 7; ++p)
    r.tokens.push_back(3 + (i % 6 * 41 + p * 13 + (p > 40 ? i : 0)) % 240);
  r.max_tokens = max_tokens;
  r.ignore_end = true;
  r.sampling = {.temperature = 0.7f, .seed = static_cast<uint64_t>(i)};
  return r;
}

TEST(Faults, InABatchOfSixtyFourEverybodyGetsWhatTheyGetAlone) {
  for (const std::string& model : {kWindowModel, kLlamaModel}) {
    EngineOptions options = crowded(model);
    options.max_running = 64;
    options.step_tokens = 256;
    options.kv_tokens = 0;
    options.threads = 2;
    options.chunk_s =
        60.0;  // a slow build (a sanitizer's) cuts prompts no smaller, so that all of them run at once
    Harness h(options);
    for (int32_t i = 0; i < 64; ++i) h.submit(document(i, 16));
    int32_t most = 0;
    h.run([&] { most = std::max(most, static_cast<int32_t>(h.recorder->running.load())); });
    EXPECT_EQ(most, 64);
    for (int32_t i = 0; i < 64; ++i) {
      EXPECT_EQ(h.answers[static_cast<size_t>(i)][0].tokens, run_alone(model, document(i, 16))[0].tokens)
          << i;
    }
  }
}

TEST(Faults, AnotherSaltFindsNothing) {
  const auto engine = Engine::create(crowded(kLlamaModel));
  const auto cached = [&](const char* salt) {
    Request r = document(0);
    r.cache_salt = salt;
    EventStream stream = engine->submit(r);
    int32_t found = -1;
    while (const auto event = stream.next()) found = event->usage.cached_tokens;
    return found;
  };
  EXPECT_EQ(cached("one"), 0);
  EXPECT_GE(cached("one"), 48);
  EXPECT_EQ(cached("two"), 0);
  EXPECT_EQ(cached(""), 0);
}

// Every operation on files fails from its n-th call on.
class BrokenFiles final : public kv::FileSystem {
 public:
  BrokenFiles(bool writes, int after, int reason) : writes_(writes), left_(after), reason_(reason) {}
  int make_directory(const std::string& path) override { return real_.make_directory(path); }
  int list(const std::string& directory, std::vector<kv::FileEntry>& entries) override {
    return real_.list(directory, entries);
  }
  int write(const std::string& path, std::span<const std::span<const std::byte>> parts) override {
    return writes_ && fails() ? reason_ : real_.write(path, parts);
  }
  int read(const std::string& path, std::vector<std::byte>& to, size_t limit) override {
    return !writes_ && fails() ? reason_ : real_.read(path, to, limit);
  }
  int rename(const std::string& from, const std::string& to) override { return real_.rename(from, to); }
  int remove(const std::string& path) override { return real_.remove(path); }
  int touch(const std::string& path) override { return real_.touch(path); }
  int lock(const std::string& path, std::shared_ptr<void>& lock, std::string& holder) override {
    return real_.lock(path, lock, holder);
  }
  bool failed() const { return left_ < 0; }

 private:
  bool fails() { return left_-- <= 0; }
  kv::FileSystem& real_ = kv::real_file_system();
  const bool writes_;
  std::atomic<int> left_;
  const int reason_;
};

TEST(Faults, ADiskThatIsFullOrBrokenTurnsItsTierOffAndRequestsGoOn) {
  std::vector<std::vector<int32_t>> want;
  for (int32_t i = 0; i < 24; ++i) want.push_back(run_alone(kWindowModel, document(i))[0].tokens);
  for (const bool writes : {true, false}) {
    for (const int after : {0, 5, 11}) {
      const Directory directory("broken");
      BrokenFiles files(writes, after, writes ? ENOSPC : EIO);
      std::atomic<int> lines{0};
      EngineOptions options = crowded(kWindowModel);
      options.kv_dir = directory.path();
      int32_t wrong = 0;
      bool on = true;
      for (int life = 0; life < 2; ++life) {  // the second reads what the first could write
        Harness h(options, {}, nullptr, [&](RuntimeSetup& setup) {
          setup.adjust_cache = [&](kv::CacheOptions& cache) {
            cache.files = &files;
            cache.log = [&lines](const std::string&) { ++lines; };
          };
        });
        for (int32_t i = 0; i < 24; ++i) h.submit(document(i));
        h.run([&] { h.runtime->cache().check_invariants(); });
        h.runtime->cache().flush();
        on = h.runtime->cache().stats().disk_on;
        for (int32_t i = 0; i < 24; ++i) {
          const Answer& got = h.answers[static_cast<size_t>(i)][0];
          wrong += got.finish != FinishReason::kMaxTokens || got.tokens != want[static_cast<size_t>(i)];
        }
      }
      EXPECT_EQ(wrong, 0) << (writes ? "ENOSPC" : "EIO") << " after " << after;
      EXPECT_TRUE(files.failed());
      EXPECT_FALSE(on);
      EXPECT_GE(lines, 1);
    }
  }
}

// A device that fails at its n-th step and at everything after that, as a GPU does after a fault in a kernel.
class DyingExecutor final : public ForwardingExecutor {
 public:
  DyingExecutor(std::unique_ptr<Executor> inner, int steps)
      : ForwardingExecutor(std::move(inner)), left_(steps) {}
  void begin(const Batch& batch) override {
    if (left_-- <= 0) throw Error(ErrorCode::kDevice, "device cuda: an illegal memory access");
    ForwardingExecutor::begin(batch);
  }
  void read_block(int group, int32_t block, std::span<std::byte> to) override {
    if (left_ < 0) throw Error(ErrorCode::kDevice, "device cuda: an illegal memory access");
    ForwardingExecutor::read_block(group, block, to);
  }

 private:
  int left_;
};

TEST(Faults, ADeadDeviceIsToldToEverybodyAndTriedNoMore) {
  for (const int steps : {0, 3, 11}) {
    EngineOptions options = crowded(kWindowModel);
    options.ram_tier_bytes = size_t{1} << 20;
    Harness h(options, {}, nullptr, [&](RuntimeSetup& setup) {
      setup.wrap_executor = [&](std::unique_ptr<Executor> inner) {
        return std::make_unique<DyingExecutor>(std::move(inner), steps);
      };
    });
    for (int32_t i = 0; i < 20; ++i) h.submit(document(i));  // eight run, the others wait
    h.run();
    for (int32_t i = 0; i < 20; ++i) {
      const Answer& answer = h.answers[static_cast<size_t>(i)][0];
      EXPECT_TRUE(answer.ended) << i;
      EXPECT_EQ(answer.finish, FinishReason::kError) << i;
      EXPECT_EQ(answer.error, "device cuda: an illegal memory access") << i;
    }
    EXPECT_TRUE(h.loop->device_lost());
    EXPECT_EQ(h.inbox->failure, "device cuda: an illegal memory access");
    h.submit(document(0));
    h.run();
    EXPECT_EQ(h.answers[20][0].error, "device cuda: an illegal memory access");
    EXPECT_EQ(h.recorder->failed.load(), 21u);
    EXPECT_EQ(h.recorder->running.load() + h.recorder->waiting.load(), 0);
  }
}

// The same device with another to go on with: everybody gets the tokens that they would have got, and those
// who come later are answered too.
TEST(Faults, ADeadDeviceIsFollowedByTheCpu) {
  for (const int steps : {0, 3, 11}) {
    EngineOptions options = crowded(kWindowModel);
    options.ram_tier_bytes = 0;
    std::vector<std::vector<int32_t>> want;
    {
      Harness h(options);
      for (int32_t i = 0; i < 12; ++i) h.submit(document(i));
      h.run();
      for (int32_t i = 0; i < 12; ++i) want.push_back(h.answers[static_cast<size_t>(i)][0].tokens);
    }
    options.device = "auto";  // whose fallback is not refused; what fails here is a CPU that plays a GPU
    options.fallback = "cpu";
    Harness h(options, {}, nullptr, [&](RuntimeSetup& setup) {
      setup.wrap_executor = [&](std::unique_ptr<Executor> inner) {
        return std::make_unique<DyingExecutor>(std::move(inner), steps);
      };
    });
    for (int32_t i = 0; i < 12; ++i) h.submit(document(i));
    h.run();
    h.submit(document(0));
    h.run();
    want.push_back(want[0]);
    for (size_t i = 0; i < want.size(); ++i) {
      const Answer& answer = h.answers[i][0];
      EXPECT_TRUE(answer.ended) << i;
      EXPECT_EQ(answer.error, "") << i;
      EXPECT_EQ(answer.tokens, want[i]) << i << " after " << steps << " steps";
    }
    EXPECT_FALSE(h.loop->device_lost());
    EXPECT_EQ(h.inbox->failure, "");
    EXPECT_EQ(h.inbox->fallback,
              "using the CPU since the device failed: device cuda: an illegal memory access");
    EXPECT_EQ(h.recorder->failed.load(), 0u);
    h.runtime->cache().check_invariants();
  }
}

// Killed in the middle of serving, twenty times over one directory: each new process opens it, finds what was
// written, and answers as if nothing had happened.
TEST(Faults, KilledTwentyTimesUnderLoadTheNextProcessGoesOn) {
  const Directory directory("killed");
  EngineOptions options = crowded(kWindowModel);
  options.kv_dir = directory.path();
  options.kv_dir_bytes = size_t{1} << 20;  // small enough that files leave all the time, too
  std::vector<std::vector<int32_t>> want;
  for (int32_t i = 0; i < 12; ++i) want.push_back(run_alone(kWindowModel, document(i))[0].tokens);
  std::mt19937 random(9);
  uint64_t found = 0;
  for (int kill = 0; kill < 20; ++kill) {
    int news[2];
    ASSERT_EQ(::pipe(news), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const auto engine = Engine::create(options);
      for (int32_t i = kill;; i += 8) {
        std::vector<EventStream> streams;
        for (int32_t k = 0; k < 8; ++k) streams.push_back(engine->submit(document(i + k)));
        if (i == kill && ::write(news[1], "1", 1) != 1) ::_exit(1);
        for (EventStream& stream : streams) {
          while (stream.next()) {
          }
        }
      }
    }
    ::close(news[1]);
    char word = 0;
    EXPECT_EQ(::read(news[0], &word, 1), 1) << "the child ended before it was asked anything";
    ::close(news[0]);
    ::usleep(static_cast<useconds_t>(random() % 120000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child failed by itself";

    const auto engine = Engine::create(options);
    for (int32_t i = 0; i < 12; ++i) {
      EventStream stream = engine->submit(document(i));
      std::vector<int32_t> tokens;
      while (const auto event = stream.next()) {
        if (event->kind == Event::Kind::kToken) tokens.push_back(event->token);
      }
      ASSERT_EQ(tokens, want[static_cast<size_t>(i)]) << "request " << i << " after kill " << kill;
    }
    engine->shutdown(true);
    found += engine->stats().cache_hits_disk;
  }
  std::printf("[  figure  ] 20 kills under load: %lu tokens found on disk by the processes that followed\n",
              found);
  EXPECT_GT(found, 1000u);
}

}  // namespace
}  // namespace millrace::test
