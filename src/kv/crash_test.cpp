// kill -9 in the middle of writing, twenty times over: every start finds a directory it can read, and nothing
// in it is wrong.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "kv/cache.h"
#include "kv/test_model.h"

namespace millrace::kv {
namespace {

const std::vector<GroupOptions> kGroups = {{0, 300, 16384}, {64, 100, 8192}};

CacheOptions options(const std::string& directory) {
  CacheOptions o;
  o.groups = kGroups;
  o.disk_directory = directory;
  o.disk_bytes = 8 << 20;  // small enough that files are removed all the time, too
  o.log = [](const std::string&) {};
  return o;
}

std::vector<int32_t> tokens_of(int32_t i) {
  std::vector<int32_t> tokens(300);
  for (int32_t p = 0; p < 300; ++p) tokens[p] = p < 100 ? p : 1000 * i + p;
  return tokens;
}

// Serves requests until it is killed, and says in `news` when the first is done.
[[noreturn]] void serve(const std::string& directory, uint32_t seed, int news) {
  TestStore store(kGroups);
  Cache cache(options(directory), store);
  std::mt19937 random(seed);
  while (true) {
    TestStream s;
    s.tokens = tokens_of(static_cast<int32_t>(random() % 60));
    s.sequence = cache.attach(cache.make_prompt(s.tokens));
    if (!test_run(cache, store, kGroups, s)) ::_exit(1);
    if (news >= 0 && ::write(news, "1", 1) != 1) ::_exit(1);
    news = -1;
    cache.poll();
    if (random() % 4 == 0) cache.flush();
  }
}

TEST(Crash, KilledTwentyTimesTheDirectoryIsReadable) {
  TestDirectory directory;
  std::mt19937 random(7);
  int64_t found = 0, half_written = 0;
  for (int kill = 0; kill < 20; ++kill) {
    int news[2];
    ASSERT_EQ(::pipe(news), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) serve(directory.path(), static_cast<uint32_t>(kill), news[1]);
    ::close(news[1]);
    char word = 0;
    EXPECT_EQ(::read(news[0], &word, 1), 1) << "the child ended before it served anybody";
    ::close(news[0]);
    ::usleep(static_cast<useconds_t>(random() % 80000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child failed by itself";

    TestStore store(kGroups);
    Cache cache(options(directory.path()), store);
    half_written += static_cast<int64_t>(cache.stats().files_dropped);
    const uint64_t dropped = cache.stats().files_dropped;
    for (int32_t i = 0; i < 60; ++i) {
      TestStream s;
      s.tokens = tokens_of(i);
      s.sequence = cache.attach(cache.make_prompt(s.tokens));
      while (!cache.ready(s.sequence)) cache.wait(std::chrono::milliseconds(100));
      found += s.sequence.length();
      ASSERT_TRUE(test_run(cache, store, kGroups, s));  // every byte is what was computed
    }
    cache.check_invariants();
    ASSERT_EQ(cache.stats().files_dropped, dropped) << "a file with its final name was not whole";
    ASSERT_TRUE(cache.stats().disk_on);
  }
  std::printf("20 kills: %lld tokens found afterwards, %lld half-written files dropped\n",
              static_cast<long long>(found), static_cast<long long>(half_written));
  EXPECT_GT(found, 1000);
}

}  // namespace
}  // namespace millrace::kv
