#include "kv/cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <random>
#include <set>
#include <thread>

#include "base/error.h"
#include "kv/test_model.h"

// Every allocation of this program passes here: one test counts them, others let some fail.
namespace {
std::atomic<int64_t> allocations{0};
}
thread_local int64_t millrace::kv::test_fail_in = -1;
void* operator new(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (millrace::kv::test_fail_in >= 0 && millrace::kv::test_fail_in-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace millrace::kv {
namespace {

// A cache with its store, and sequences run through it.
struct Rig {
  explicit Rig(std::vector<GroupOptions> groups_in, CacheOptions options_in = {})
      : groups(std::move(groups_in)), store(groups), cache(with_groups(std::move(options_in)), store) {}
  CacheOptions with_groups(CacheOptions options) {
    options.groups = groups;
    return options;
  }
  TestStream attach(const std::vector<int32_t>& tokens, std::string_view salt = {}) {
    TestStream s;
    s.tokens = tokens;
    s.sequence = cache.attach(cache.make_prompt(tokens, salt));
    return s;
  }
  bool run(TestStream& s) {
    const bool done = test_run(cache, store, groups, s);
    cache.check_invariants();
    return done;
  }
  int32_t hit(const std::vector<int32_t>& tokens, std::string_view salt = {}) {
    return cache.match(*cache.make_prompt(tokens, salt)).tokens;
  }
  std::vector<GroupOptions> groups;
  TestStore store;
  Cache cache;
};

// A state is large: of a long prompt the blocks are taken that the next token sees, and those at boundaries.
TEST(Cache, TakesFewBlocksOfALongPromptInASparseGroup) {
  Rig rig({full(200), state(200, 2048)});
  TestStream s{rig.cache.make_sequence(), "", counting(0, 1000)};
  ASSERT_TRUE(rig.cache.reserve(s.sequence, 1000));
  EXPECT_EQ(rig.cache.available(0), 200 - 63);
  EXPECT_EQ(rig.cache.available(1), 200 - 3);  // the first, and two at the end
  test_compute(rig.store, rig.groups, s, 1000);
  // A smaller step than was reserved for has what it ends with.
  ASSERT_TRUE(rig.cache.reserve(s.sequence, 500));
  rig.cache.advance(s.sequence, std::span(s.tokens).first(500));
  rig.cache.check_invariants();
  EXPECT_NE(s.sequence.table(1)[30], kNoBlock);
  EXPECT_NE(s.sequence.table(1)[31], kNoBlock);
}

// So many tokens apart, whatever windows are, and at the ends of prompts and answers: a prompt that leaves a
// known one computes at most that many tokens again, one that goes on less than a block.
TEST(Cache, StatesAreKeptAsFarApartAsTheirGroupSays) {
  for (const int32_t apart : {16, 48, 256, 1024}) {
    CacheOptions options;
    options.boundary_tokens = 512;
    Rig rig({full(400), state(200, apart)}, options);
    TestStream turn = rig.attach(counting(0, 1205));
    while (turn.sequence.length() < 1205) {  // a prompt in pieces
      const int32_t step = std::min(123, 1205 - turn.sequence.length());
      ASSERT_TRUE(rig.cache.reserve(turn.sequence, step));
      test_compute(rig.store, rig.groups, turn, step);
      rig.cache.advance(turn.sequence, std::span(turn.tokens).subspan(turn.sequence.length(), step));
      rig.cache.check_invariants();
    }
    for (int32_t i = 0; i < 100; ++i) {  // an answer, token by token
      turn.tokens.push_back(5000 + i);
      ASSERT_TRUE(rig.run(turn));
      ASSERT_LE(turn.sequence.held_blocks(1), 2);
    }
    std::vector<int32_t> next = turn.tokens;
    turn.sequence.reset();
    EXPECT_LE(rig.cache.stats().groups[1].cached, 1305 / apart + 2) << apart;
    next.resize(1400, -1);
    EXPECT_EQ(rig.hit(next), 1296) << apart;  // the answer's last whole block
    EXPECT_GE(rig.hit(counting(0, 1205)), 1200) << apart;
    for (int32_t leaves = 1; leaves < 1200; leaves += 37) {
      std::vector<int32_t> branch = counting(0, leaves);
      branch.resize(1400, -2);
      const int32_t hit = rig.hit(branch);
      ASSERT_LE(hit, leaves);
      ASSERT_GE(hit, leaves / apart * apart) << apart << " leaves at " << leaves;
    }
  }
}

// A turn needs the state at the end of the turn before it, and none of those further back: these grow old,
// and leave before another conversation's last one.
TEST(Cache, StatesOfEarlierTurnsLeaveFirst) {
  CacheOptions options;
  options.eviction = Eviction::kLru;
  options.ram_bytes = 6 * kTestBlockBytes;
  Rig rig({full(1000), state(5, 4096)}, options);
  std::vector<int32_t> talk, other = counting(50000, 48);
  const auto turn = [&rig](std::vector<int32_t>& tokens, int32_t more) {
    for (int32_t i = 0; i < more; ++i) tokens.push_back(static_cast<int32_t>(tokens.size()) + 7);
    TestStream s = rig.attach(tokens);
    ASSERT_TRUE(rig.run(s));
  };
  for (int i = 0; i < 6; ++i) turn(talk, 48);
  turn(other, 0);
  for (int i = 0; i < 6; ++i) turn(talk, 48);
  talk.resize(talk.size() + 16, -1);
  other.resize(other.size() + 16, -1);
  EXPECT_EQ(rig.hit(talk), 12 * 48);
  EXPECT_EQ(rig.hit(other), 48);
  std::vector<int32_t> early(talk.begin(), talk.begin() + 48);
  early.resize(100, -2);
  EXPECT_EQ(rig.hit(early), 0) << "its state left";
}

TEST(Cache, WindowGroupKeepsItsWindowOnly) {
  Rig rig({full(100), window(32, 100)}, {.prefix_cache = false});
  TestStream s;
  s.sequence = rig.cache.make_sequence();
  for (int32_t position = 0; position < 500; ++position) {
    s.tokens.push_back(position);
    ASSERT_TRUE(rig.run(s));  // checks that all that a token sees is mapped
    ASSERT_LE(s.sequence.held_blocks(1), 3) << "32 tokens span at most 3 blocks of 16";
  }
  EXPECT_EQ(s.sequence.held_blocks(0), blocks_for(500));
  EXPECT_EQ(100 - rig.cache.available(1), s.sequence.held_blocks(1));
}

TEST(Cache, ReserveThatDoesNotFitChangesNothing) {
  Rig rig({full(4), window(16, 2)});
  TestStream s = rig.attach(counting(0, 16));
  ASSERT_TRUE(rig.run(s));
  EXPECT_FALSE(rig.cache.reserve(s.sequence, 33));
  EXPECT_EQ(rig.cache.available(0), 3);
  EXPECT_EQ(rig.cache.available(1), 1);
  EXPECT_EQ(s.sequence.length(), 16);
  EXPECT_TRUE(rig.cache.reserve(s.sequence, 16));
}

TEST(Cache, PromptAgainIsAHitThatLeavesOneToken) {
  Rig rig({full(100)});
  for (const int32_t length : {16, 17, 40, 64, 65}) {
    const std::vector<int32_t> tokens = counting(1000 * length, length);
    TestStream first = rig.attach(tokens);
    EXPECT_EQ(first.sequence.length(), 0);
    ASSERT_TRUE(rig.run(first));
    first.sequence.reset();
    // The part of a block that was not full when the sequence ended is not remembered.
    const int32_t expected = std::min(length - 1, length / kBlockTokens * kBlockTokens);
    TestStream again = rig.attach(tokens);
    EXPECT_EQ(again.sequence.length(), expected);
    EXPECT_EQ(again.sequence.cached_tokens(), expected);
    ASSERT_TRUE(rig.run(again));
  }
  EXPECT_EQ(rig.cache.stats().main.hit_tokens, 15u + 16 + 32 + 63 + 64);
}

TEST(Cache, APoolThatIsLostIsForgottenAndRamIsNot) {
  Rig rig({full(8), window(16, 8)}, {.ram_bytes = size_t{1} << 20});
  TestStream evicted = rig.attach(counting(0, 33));
  ASSERT_TRUE(rig.run(evicted));
  evicted.sequence.reset();
  rig.cache.evict(0, 8);
  rig.cache.evict(1, 8);
  TestStream lost = rig.attach(counting(5000, 33));
  ASSERT_TRUE(rig.run(lost));
  lost.sequence.reset();
  rig.cache.forget_main();
  rig.cache.check_invariants();
  EXPECT_EQ(rig.cache.available(0), 8);
  EXPECT_EQ(rig.cache.stats().groups[0].cached, 0);
  TestStream from_ram = rig.attach(counting(0, 33));
  EXPECT_EQ(from_ram.sequence.cached_tokens(), 32);
  ASSERT_TRUE(rig.run(from_ram));
  from_ram.sequence.reset();
  EXPECT_EQ(rig.attach(counting(5000, 33)).sequence.cached_tokens(), 0);
}

TEST(Cache, PromptAgainIsAHitWithWindowsToo) {
  Rig rig({full(100), window(40, 100)});
  for (int32_t length = 100; length < 140; ++length) {
    const std::vector<int32_t> tokens = counting(1000 * length, length);
    TestStream first = rig.attach(tokens);
    for (int32_t i = 0; i < 60; ++i)
      first.tokens.push_back(i);  // an answer: the prompt's end leaves the window
    ASSERT_TRUE(rig.run(first));
    first.sequence.reset();
    TestStream again = rig.attach(tokens);
    EXPECT_EQ(again.sequence.length(), std::min(length - 1, length / kBlockTokens * kBlockTokens)) << length;
    ASSERT_TRUE(rig.run(again));
  }
}

TEST(Cache, HitMayEndInsideABlock) {
  Rig rig({full(100)});
  TestStream first = rig.attach(counting(0, 64));
  ASSERT_TRUE(rig.run(first));
  std::vector<int32_t> tokens = counting(0, 40);
  tokens.push_back(-7);
  tokens.resize(60, -8);
  TestStream second = rig.attach(tokens);
  EXPECT_EQ(second.sequence.length(), 40) << "two blocks and half of the third, copied";
  EXPECT_NE(second.sequence.table(0)[2], first.sequence.table(0)[2]);
  EXPECT_EQ(second.sequence.table(0)[1], first.sequence.table(0)[1]);
  ASSERT_TRUE(rig.run(second));
  first.tokens.push_back(99);
  ASSERT_TRUE(rig.run(first)) << "the source is untouched";
}

TEST(Cache, SaltsAndIdentitiesDoNotShare) {
  Rig rig({full(100)});
  const std::vector<int32_t> tokens = counting(0, 100);
  TestStream s = rig.attach(tokens, "alice");
  ASSERT_TRUE(rig.run(s));
  EXPECT_EQ(rig.hit(tokens, "alice"), 96);
  EXPECT_EQ(rig.hit(tokens, "bob"), 0);
  EXPECT_EQ(rig.hit(tokens), 0);
  Rig other({full(100)}, {.identity = "another model"});
  EXPECT_NE(other.cache.make_prompt(tokens)->keys, rig.cache.make_prompt(tokens)->keys);
}

TEST(Cache, TwoThatComputeTheSameShareInTheEnd) {
  Rig rig({full(100)});
  const std::vector<int32_t> tokens = counting(0, 64);
  TestStream a = rig.attach(tokens), b = rig.attach(tokens);
  ASSERT_TRUE(rig.run(a));
  EXPECT_EQ(b.sequence.length(), 0) << "nothing was there when it came";
  ASSERT_TRUE(rig.run(b));
  EXPECT_EQ(rig.cache.available(0), 96);
  EXPECT_EQ(rig.cache.stats().deduplicated, 4u);
}

TEST(Cache, ForksShareUntilTheyWrite) {
  Rig rig({full(100), window(20, 100)});
  TestStream a = rig.attach(counting(0, 40));
  ASSERT_TRUE(rig.run(a));
  const int32_t before = rig.cache.available(0);
  std::vector<TestStream> forks;
  for (int32_t i = 0; i < 4; ++i) {
    forks.push_back({rig.cache.fork(a.sequence), "", a.tokens});
    forks.back().tokens.push_back(100 + i);
  }
  EXPECT_EQ(rig.cache.available(0), before);
  a.sequence.reset();
  for (TestStream& fork : forks) ASSERT_TRUE(rig.run(fork));
  EXPECT_EQ(rig.cache.available(0), before - 3)
      << "the partial block: three copies, the last writes in place";
  EXPECT_EQ(rig.cache.stats().copies_on_write, 6u);
  for (TestStream& fork : forks) {
    fork.tokens.push_back(7);
    ASSERT_TRUE(rig.run(fork)) << "nobody has written into another's block";
  }
}

TEST(Cache, WindowTailsAreKeptAtBoundariesAndLearnedAtBranches) {
  CacheOptions options;
  options.boundary_tokens = 512;
  Rig rig({full(1000), window(128, 1000)}, options);
  TestStream first = rig.attach(counting(0, 1200));
  ASSERT_TRUE(rig.run(first));
  for (int32_t i = 0; i < 100; ++i) first.tokens.push_back(5000 + i);
  ASSERT_TRUE(rig.run(first));
  first.sequence.reset();

  // The end of the prompt, the end of the answer, multiples of 512; in between only the nearest below.
  std::vector<int32_t> tokens = counting(0, 1200);
  tokens.push_back(-1);
  EXPECT_EQ(rig.hit(tokens), 1200);
  std::vector<int32_t> whole = first.tokens;
  whole.resize(1400, -1);
  EXPECT_EQ(rig.hit(whole), 1296);
  const auto branch_at = [](int32_t length, int32_t mark) {
    std::vector<int32_t> branch = counting(0, length);
    branch.resize(length + 50, mark);
    return branch;
  };
  EXPECT_EQ(rig.hit(branch_at(800, -2)), 512);
  // The first who branches there computes from 512 on; those who follow resume at the branch.
  TestStream second = rig.attach(branch_at(800, -2));
  ASSERT_TRUE(rig.run(second));
  EXPECT_EQ(rig.hit(branch_at(800, -3)), 800);
  TestStream third = rig.attach(branch_at(800, -3));
  ASSERT_TRUE(rig.run(third));

  // Window blocks that nobody can resume with are not kept: of 1300 tokens, 4 tails of 8 blocks.
  second.sequence.reset();
  third.sequence.reset();
  EXPECT_LT(rig.cache.stats().groups[1].cached, 60);
}

TEST(Cache, SwapsOutAndBackAndReportsWhatItCosts) {
  CacheOptions options;
  options.ram_bytes = 20 * kTestBlockBytes;
  Rig rig({full(12), window(32, 12)}, options);
  TestStream a = rig.attach(counting(0, 100));
  ASSERT_TRUE(rig.run(a));
  const SwapCost cost = rig.cache.swap_cost(a.sequence);
  EXPECT_EQ(cost.bytes, (7 + 3) * kTestBlockBytes);
  EXPECT_TRUE(cost.fits);
  EXPECT_GT(cost.out_seconds, 0);
  EXPECT_GT(cost.in_seconds, 0);
  ASSERT_TRUE(rig.cache.swap_out(a.sequence));
  EXPECT_EQ(a.sequence.state(), Sequence::State::kSwapped);
  EXPECT_EQ(a.sequence.length(), 100);
  EXPECT_EQ(rig.cache.available(0), 12);
  rig.cache.check_invariants();

  TestStream b = rig.attach(counting(5000, 150));  // takes the room
  ASSERT_TRUE(rig.run(b));
  EXPECT_FALSE(rig.cache.swap_in(a.sequence));
  EXPECT_FALSE(rig.cache.swap_out(b.sequence)) << "10 blocks and 3 more do not fit beside a's 10";
  b.sequence.reset();
  ASSERT_TRUE(rig.cache.swap_in(a.sequence));
  a.tokens.push_back(1);
  ASSERT_TRUE(rig.run(a)) << "it holds what it held";
  EXPECT_EQ(rig.cache.stats().swapped_bytes, 0u);
}

TEST(Cache, BlocksThatLeftComeBackFromRam) {
  CacheOptions options;
  options.ram_bytes = 100 * kTestBlockBytes;
  Rig rig({full(10)}, options);
  const std::vector<int32_t> tokens = counting(0, 100);
  TestStream a = rig.attach(tokens);
  ASSERT_TRUE(rig.run(a));
  a.sequence.reset();
  TestStream b = rig.attach(counting(9000, 150));
  ASSERT_TRUE(rig.run(b));
  b.sequence.reset();
  const Match match = rig.cache.match(*rig.cache.make_prompt(tokens));
  EXPECT_EQ(match.tokens, 96);
  EXPECT_GE(match.from_ram, 80);
  a = rig.attach(tokens);
  EXPECT_EQ(a.sequence.length(), 96);
  ASSERT_TRUE(rig.run(a));
  EXPECT_GE(rig.cache.stats().ram.hit_tokens, 80u);
}

TEST(Cache, ATailThatLeftThePoolIsCopiedFromRam) {
  CacheOptions options;
  options.ram_bytes = 40 * kTestBlockBytes;
  Rig rig({full(30)}, options);
  TestStream first = rig.attach(counting(0, 160));
  ASSERT_TRUE(rig.run(first));
  first.sequence.reset();
  rig.cache.evict(0, 30);
  std::vector<int32_t> other = counting(0, 155);  // eleven tokens into the last block
  other.push_back(9999);
  const Match match = rig.cache.match(*rig.cache.make_prompt(other));
  EXPECT_EQ(match.tokens, 155);
  EXPECT_EQ(match.from_ram, 155);
  TestStream second = rig.attach(other);
  EXPECT_EQ(second.sequence.length(), 155);
  EXPECT_TRUE(rig.run(second));
}

TEST(Cache, PromptsAreHashedOnAnyThread) {
  Rig rig({full(10)});
  const std::vector<int32_t> tokens = counting(0, 1000);
  const auto expected = rig.cache.make_prompt(tokens, "x");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { EXPECT_EQ(rig.cache.make_prompt(tokens, "x")->keys, expected->keys); });
  }
  TestStream s = rig.attach(counting(0, 50));
  ASSERT_TRUE(rig.run(s));
  for (std::thread& thread : threads) thread.join();
}

TEST(Cache, RefusesOptionsThatMakeNoSense) {
  TestStore store({full(1)});
  const auto message_of = [&](const CacheOptions& options) {
    try {
      Cache cache(options, store);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  CacheOptions options;
  EXPECT_EQ(message_of(options), "kv cache: groups: found 0, expected 1 to 4");
  options.groups = {full(0)};
  EXPECT_EQ(message_of(options), "kv cache: blocks of a group: found 0, expected at least 1");
  options.groups = {full(1)};
  EXPECT_EQ(message_of(options), "accepted");
  options.boundary_tokens = 0;
  EXPECT_EQ(message_of(options), "kv cache: boundary tokens: found 0, expected at least 1");
}

// Decoding with evictions all the time, for long enough to go through the pool several times.
TEST(Cache, AllocatesNothingPerToken) {
  Rig rig({full(200), window(64, 120)}, {.table_tokens = 512});
  const std::vector<int32_t> prompt = counting(0, 64);
  const auto round = [&](int32_t mark) {
    for (int32_t i = 0; i < 4; ++i) {
      Sequence s = rig.cache.make_sequence();
      for (int32_t p = 0; p < 500; ++p) {
        ASSERT_TRUE(rig.cache.reserve(s, 1));
        const int32_t token = mark * 10 + i;
        rig.cache.advance(s, {&token, 1});
      }
    }
  };
  for (int32_t i = 0; i < 10; ++i) round(i);
  const int64_t before = allocations;
  for (int32_t i = 10; i < 40; ++i) round(i);
  EXPECT_EQ(allocations, before);
  EXPECT_GT(rig.cache.stats().main.evictions, 1000u);
}

// 64 sequences at any time, each from its prompt to its end; lengths 50 to 4,000, short ones more often.
TEST(Cache, MixedLoadTakesLessThanHalfOfContiguousCaches) {
  constexpr int kSequences = 64, kMaxTokens = 4000;
  Rig rig({full(kSequences * kMaxTokens / kBlockTokens)}, {.prefix_cache = false});
  std::mt19937 random(1);
  struct Live {
    Sequence sequence;
    int32_t end = 0;
  };
  const auto start = [&](Live& live) {
    live.sequence = rig.cache.make_sequence();
    const double x = static_cast<double>(random()) / 4294967296.0;
    live.end = static_cast<int32_t>(50 * std::pow(kMaxTokens / 50.0, x));
    const std::vector<int32_t> prompt(static_cast<size_t>(live.end / 2));
    ASSERT_TRUE(rig.cache.reserve(live.sequence, live.end / 2));
    rig.cache.advance(live.sequence, prompt);
  };
  std::vector<Live> live(kSequences);
  for (Live& one : live) start(one);
  int64_t held_tokens = 0, used_tokens = 0;
  int32_t most_blocks = 0;
  const std::vector<int32_t> next(16);
  for (int step = 0; step < 2000; ++step) {
    int32_t blocks = 0;
    for (Live& one : live) {
      const int32_t n =
          std::min<int32_t>(1 + static_cast<int32_t>(random() % 16), one.end - one.sequence.length());
      ASSERT_TRUE(rig.cache.reserve(one.sequence, n));
      rig.cache.advance(one.sequence, std::span(next).first(static_cast<size_t>(n)));
      blocks += one.sequence.held_blocks(0);
      used_tokens += one.sequence.length();
      if (one.sequence.length() == one.end) start(one);
    }
    held_tokens += int64_t{blocks} * kBlockTokens;
    most_blocks = std::max(most_blocks, blocks);
  }
  const double share = static_cast<double>(most_blocks) * kBlockTokens / (kSequences * kMaxTokens);
  const double waste = 1 - static_cast<double>(used_tokens) / static_cast<double>(held_tokens);
  std::printf("mixed load: at most %.1f%% of contiguous caches, internal waste %.2f%%\n", 100 * share,
              100 * waste);
  EXPECT_LT(share, 0.5);
  EXPECT_LT(waste, 0.04);
}

}  // namespace
}  // namespace millrace::kv
