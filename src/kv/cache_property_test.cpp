// Thousands of random operations against a naive model: the tokens of every sequence, from which test_model.h
// knows what each slot must hold. The invariants are checked after every operation.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <optional>
#include <random>

#include "kv/cache.h"
#include "kv/test_model.h"

namespace millrace::kv {
namespace {

struct Setup {
  const char* name;
  std::vector<GroupOptions> groups;
  size_t ram_blocks = 0;
  uint64_t disk_blocks = 0;
  Eviction eviction = Eviction::kAdaptive;
  size_t staging_blocks = 1000;
  bool flaky = false;    // files are damaged and the disk fails now and then
  bool starved = false;  // allocations fail now and then
  int32_t longer = 1;    // how many times as long prompts are
};
void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.name; }

// The machine's file system, which fails once in a few hundred calls.
class FlakyFiles final : public FileSystem {
 public:
  int make_directory(const std::string& path) override { return real_.make_directory(path); }
  int list(const std::string& directory, std::vector<FileEntry>& entries) override {
    return real_.list(directory, entries);
  }
  int write(const std::string& path, std::span<const std::span<const std::byte>> parts) override {
    return fails() ? ENOSPC : real_.write(path, parts);
  }
  int read(const std::string& path, std::vector<std::byte>& to, size_t limit) override {
    if (fails()) return EIO;
    const int status = real_.read(path, to, limit);
    if (calls_ % 7 == 0 && !to.empty()) to[calls_ * 31 % to.size()] ^= std::byte{1};
    return status;
  }
  int rename(const std::string& from, const std::string& to) override { return real_.rename(from, to); }
  int remove(const std::string& path) override { return fails() ? EIO : real_.remove(path); }
  int touch(const std::string& path) override { return real_.touch(path); }
  int lock(const std::string& path, std::shared_ptr<void>& lock, std::string& holder) override {
    return real_.lock(path, lock, holder);
  }

 private:
  bool fails() { return ++calls_ % 400 == 0; }
  FileSystem& real_ = real_file_system();
  std::atomic<uint32_t> calls_{0};
};

class Driver {
 public:
  Driver(const Setup& setup, uint32_t seed) : setup_(setup), random_(seed), store_(setup.groups) { open(); }

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      setup_.starved&& pick(2) == 0 ? operate_without_memory() : operate();
      ASSERT_FALSE(testing::Test::HasFatalFailure()) << setup_.name << " operation " << i;
      cache_->check_invariants();
    }
    close();
  }

  std::atomic<uint64_t> lines = 0;
  uint64_t hits = 0, restarts = 0, disk_hits = 0, ram_hits = 0, swaps = 0, copies = 0, failures = 0;

 private:
  int32_t pick(int32_t below) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(below)); }

  void open() {
    CacheOptions options;
    options.groups = setup_.groups;
    options.identity = "test";
    options.eviction = setup_.eviction;
    options.boundary_tokens = 64;
    options.ram_bytes = setup_.ram_blocks * kTestBlockBytes;
    if (setup_.disk_blocks > 0) {
      options.disk_directory = directory_.path();
      options.disk_bytes = setup_.disk_blocks * (kTestBlockBytes + 176);
      options.staging_bytes = setup_.staging_blocks * kTestBlockBytes;
      if (setup_.flaky) options.files = &flaky_;
      options.log = [this](const std::string&) { ++lines; };
    }
    cache_.emplace(options, store_);
  }

  void close() {
    streams_.clear();
    cache_->check_invariants();
    const CacheStats stats = cache_->stats();
    for (size_t g = 0; g < setup_.groups.size(); ++g) EXPECT_EQ(stats.groups[g].held, 0) << "leaked";
    EXPECT_EQ(stats.swapped_bytes, 0u);
    if (!setup_.flaky) {
      EXPECT_EQ(stats.files_dropped, 0u);
      EXPECT_EQ(stats.disk_on, setup_.disk_blocks > 0);
    }
    hits += stats.hit_tokens;
    disk_hits += stats.disk.hit_tokens;
    ram_hits += stats.ram.hit_tokens;
    swaps += stats.swaps_in;
    copies += stats.copies_on_write;
    cache_.reset();
  }

  // Most prompts begin like something that was there before.
  std::vector<int32_t> new_tokens() {
    std::vector<int32_t> tokens;
    if (!history_.empty() && pick(8) != 0) {
      const std::vector<int32_t>& old = history_[pick(static_cast<int32_t>(history_.size()))];
      tokens.assign(old.begin(), old.begin() + pick(static_cast<int32_t>(old.size()) + 1));
    }
    const int32_t more = pick((pick(3) == 0 ? 100 : 20) * setup_.longer) + 1;
    for (int32_t i = more; i > 0; --i) tokens.push_back(pick(2));
    const auto most = static_cast<size_t>(150 * setup_.longer);
    if (tokens.size() > most) tokens.resize(most);
    return tokens;
  }

  void attach() {
    TestStream s;
    s.tokens = new_tokens();
    s.salt = pick(4) == 0 ? "other" : "";
    const auto prompt = cache_->make_prompt(s.tokens, s.salt);
    const Match match = cache_->match(*prompt);
    std::vector<int32_t> before;
    for (int c = 0; c < cache_->counts(); ++c) before.push_back(cache_->available(c));
    s.sequence = cache_->attach(prompt);
    ASSERT_EQ(s.sequence.length(), match.tokens);
    ASSERT_LT(s.sequence.length(), static_cast<int32_t>(s.tokens.size()));
    ASSERT_LE(match.from_ram + match.from_disk, match.tokens);
    for (int c = 0; c < cache_->counts(); ++c) {
      const auto at = static_cast<size_t>(c);
      ASSERT_EQ(before[at] - cache_->available(c), match.takes[at]);
    }
    history_.push_back(s.tokens);
    if (history_.size() > 40) history_.erase(history_.begin() + pick(40));
    streams_.push_back(std::move(s));
  }

  bool fits(const BlockCounts& needs) const {
    for (int c = 0; c < cache_->counts(); ++c) {
      if (needs[static_cast<size_t>(c)] > cache_->available(c)) return false;
    }
    return true;
  }

  void step(TestStream& s) {
    if (!cache_->ready(s.sequence)) return;
    if (s.sequence.state() != Sequence::State::kActive) return;
    // A long piece of a prompt leaves blocks of a sparse group out, and none of it is rejected.
    const bool sparse = std::any_of(setup_.groups.begin(), setup_.groups.end(),
                                    [](const GroupOptions& group) { return group.sparse; });
    const bool prompt = sparse && pick(5) == 0;
    const int32_t length = s.sequence.length(),
                  n = prompt ? 90 + pick(200) : pick(pick(3) == 0 ? 60 * setup_.longer : 5) + 1;
    while (static_cast<int32_t>(s.tokens.size()) < length + n) s.tokens.push_back(pick(2));
    const bool should = fits(cache_->blocks_to_reserve(s.sequence, n));
    ASSERT_EQ(cache_->reserve(s.sequence, n), should);
    if (!should) return;
    test_compute(store_, setup_.groups, s, n);
    const int32_t accepted = !prompt && pick(3) == 0 ? pick(n) + 1 : n;  // rejected drafts are written again
    cache_->advance(s.sequence, std::span(s.tokens).subspan(length, accepted));
    ASSERT_EQ(s.sequence.length(), length + accepted);
  }

  void release(size_t i) {
    std::vector<int32_t> expected;
    const BlockCounts own = cache_->blocks_of_its_own(streams_[i].sequence);
    for (int c = 0; c < cache_->counts(); ++c) {
      expected.push_back(cache_->available(c) + own[static_cast<size_t>(c)]);
    }
    std::swap(streams_[i], streams_.back());
    streams_.pop_back();
    for (int c = 0; c < cache_->counts(); ++c) {
      ASSERT_EQ(cache_->available(c), expected[static_cast<size_t>(c)]);
    }
  }

  void swap(TestStream& s) {
    if (s.sequence.state() == Sequence::State::kSwapped) {
      const bool should = fits(cache_->blocks_to_swap_in(s.sequence));
      ASSERT_EQ(cache_->swap_in(s.sequence), should);
    } else if (cache_->ready(s.sequence)) {
      const SwapCost cost = cache_->swap_cost(s.sequence);
      ASSERT_EQ(cache_->swap_out(s.sequence), cost.fits);
    }
  }

  // A request that fails in the middle of a step is let go, as the engine does.
  void step_or_release(size_t i) {
    try {
      step(streams_[i]);
    } catch (const std::bad_alloc&) {
      test_fail_in = -1;
      ++failures;
      release(i);
    }
  }

  // One of the next allocations fails. Whatever throws leaves the cache as it was, or a sequence that can be
  // let go: the invariants are checked after it like after any other.
  void operate_without_memory() {
    streams_.reserve(streams_.size() + 2);
    test_fail_in = pick(pick(2) == 0 ? 4 : 40);
    try {
      operate();
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    test_fail_in = -1;
  }

  void operate() {
    const int32_t what = pick(100);
    if (what < 12 || streams_.empty()) return attach();
    const size_t i = pick(static_cast<int32_t>(streams_.size()));
    if (streams_.size() > 5 && pick(3) == 0) return release(i);
    if (what < 60) return step_or_release(i);
    if (what < 66 && streams_[i].sequence.state() == Sequence::State::kActive) {
      TestStream copy{cache_->fork(streams_[i].sequence), streams_[i].salt, streams_[i].tokens};
      copy.tokens.resize(copy.sequence.length());
      copy.tokens.push_back(pick(2));
      streams_.push_back(std::move(copy));
    } else if (what < 76) {
      release(i);
    } else if (what < 84) {
      swap(streams_[i]);
    } else if (what < 86) {
      cache_->evict(pick(static_cast<int32_t>(setup_.groups.size())), pick(6));
    } else if (what < 98) {
      cache_->poll();
    } else if (what == 98) {
      cache_->wait(std::chrono::milliseconds(5));
    } else if (setup_.disk_blocks > 0 && test_fail_in < 0 && pick(setup_.flaky ? 1 : 3) == 0) {
      if (pick(2) == 0) cache_->flush();
      close();
      open();
      ++restarts;
    }
  }

  Setup setup_;
  FlakyFiles flaky_;
  std::mt19937 random_;
  TestDirectory directory_;
  TestStore store_;
  std::optional<Cache> cache_;
  std::vector<TestStream> streams_;
  std::vector<std::vector<int32_t>> history_;
};

class CacheProperty : public testing::TestWithParam<Setup> {};

TEST_P(CacheProperty, HoldsTheRightBytesAndLosesNoBlock) {
  uint64_t hits = 0, disk = 0, ram = 0, swaps = 0, copies = 0, restarts = 0, lines = 0, failures = 0;
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    Driver driver(GetParam(), seed);
    driver.run(GetParam().starved ? 8000 : 1500);  // a failure in the right place is rare
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
    hits += driver.hits;
    disk += driver.disk_hits;
    ram += driver.ram_hits;
    swaps += driver.swaps;
    copies += driver.copies;
    restarts += driver.restarts;
    lines += driver.lines;
    failures += driver.failures;
  }
  // The test must have been about something. With a disk, how much is found depends on how soon its thread
  // gets to run.
  EXPECT_GT(hits, GetParam().disk_blocks > 0 ? 200u : 1000u);
  EXPECT_GT(copies, 20u);
  EXPECT_EQ(failures > 100, GetParam().starved) << failures;
  EXPECT_EQ(lines > 0, GetParam().flaky);
  EXPECT_EQ(disk > 0, GetParam().disk_blocks > 0);
  EXPECT_EQ(restarts > 0, GetParam().disk_blocks > 0);
  EXPECT_EQ(ram > 0, GetParam().ram_blocks > 0);
  EXPECT_GE(swaps, GetParam().ram_blocks > 0 ? 5u : 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CacheProperty,
    testing::Values(Setup{"full", {full(40)}}, Setup{"full_lru_ram", {full(30)}, 40, 0, Eviction::kLru},
                    Setup{"full_disk_only", {full(30)}, 0, 100, Eviction::kLfu},
                    Setup{"full_ram_disk", {full(30)}, 20, 60, Eviction::kRandom},
                    Setup{"full_window_ram", {full(40), window(32, 30)}, 40},
                    Setup{"window_full_all_tiers", {window(20, 24), full(36)}, 30, 120},
                    Setup{"slow_disk", {full(24), window(40, 24)}, 0, 60, Eviction::kAdaptive, 2},
                    Setup{"flaky_disk", {full(24), window(40, 24)}, 12, 60, Eviction::kAdaptive, 100, true},
                    Setup{
                        "starved", {full(24), window(40, 24)}, 12, 60, Eviction::kAdaptive, 100, false, true},
                    Setup{"only_window", {window(33, 30)}, 10, 40},
                    Setup{"full_state_all_tiers", {full(90), state(20)}, 60, 200},
                    Setup{"only_state", {state(24)}, 10, 40},
                    Setup{"three_groups", {full(40), window(16, 30), window(50, 30)}, 50, 200},
                    // Of a context over two ranks: 512 tokens are on a shelf, and the first one is fuller.
                    Setup{.name = "shelves_all_tiers",
                          .groups = {shelved(180, 2), window(40, 60)},
                          .ram_blocks = 200,
                          .disk_blocks = 600,
                          .longer = 5}),
    [](const auto& setup) { return std::string(setup.param.name); });

}  // namespace
}  // namespace millrace::kv
