// Cache: the paged KV cache of one model. It owns block ids and what is known about them (who holds them,
// which tokens they stand for, where else the bytes are); the bytes of the main pool move through BlockStore.
//
//   Prompt     tokens and the names (hashes) of their full blocks, made once
//   Sequence   the tokens of one sample: a block table per layer group. Shares blocks with others
//   Cache      finds (match), takes (attach), grows (reserve, advance), forks, swaps and remembers
//
// The life of a request:
//
//   auto prompt = cache.make_prompt(tokens, salt);        // any thread
//   Match hit = cache.match(*prompt);                     // what is remembered, what taking it costs
//   Sequence s = cache.attach(prompt);                    // holds the hit; starts reading it from disk
//   while (!cache.ready(s)) { cache.poll(); ... }         // other sequences step meanwhile
//   // s.length() tokens are computed; at least one of the prompt is left
//   if (!cache.reserve(s, n)) preempt somebody;           // space for n more, copy-on-write done
//   ... the step computes positions [s.length(), s.length() + n) through s.table(g) ...
//   cache.advance(s, tokens_computed);                    // n, or fewer: drafts that were rejected
//   // s destroyed: its blocks stay remembered until somebody needs the space
//
// Threads: everything here is for ONE thread, the engine's, except make_prompt (any thread). The disk tier
// has I/O threads of its own, which never call back into the cache; CacheOptions::wake is the one thing that
// they call. Sequences must be destroyed before their cache, on the engine's thread.
//
// Outcomes: no space is a return value (false), never an exception. A disk that fails turns its tier off with
// one line of log. BlockStore's errors pass through. Only the constructor throws Error for bad options.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/paging.h"
#include "kv/block_store.h"
#include "kv/file_system.h"
#include "kv/hash.h"

namespace millrace::kv {

// ---------------------------------------------------------------- options

enum class Eviction { kLru, kLfu, kRandom, kAdaptive };
enum class Compression { kOff, kOn, kAutomatic };

struct GroupOptions {
  int32_t window = 0;      // a token sees itself and the window - 1 before it; 0: everything
  int32_t num_blocks = 0;  // of the main pool
  size_t block_bytes = 0;
  // Of layers with a state (base/state_block.h): a block is as large as the state, and what a token sees of
  // the blocks before its own is behind their last token. Of a long piece of a prompt only those are taken
  // that the step ends with, and those at boundaries; the table has kNoBlock for the others.
  bool sparse = false;
  // Of a context that is spread over ranks (base/paging.h); num_blocks is a multiple of it.
  int32_t shelves = 1;
  // Tokens between boundaries at which what resuming needs is kept; 0: CacheOptions::boundary_tokens.
  int32_t boundary_tokens = 0;
};

struct CacheOptions {
  std::vector<GroupOptions> groups = {};  // 1 to kMaxKvGroups
  // What makes KV bytes mean the same: the model's weights, KV type, the device's layout of a block. Caches
  // with different identities never share a block, in memory or on disk. The groups' geometry is added here.
  std::string identity = {};
  size_t element_bytes = 2;  // of a stored number: compression splits 2 and 4 into planes, others not
  bool prefix_cache = true;  // false: nothing is remembered, tokens are not hashed (tiers still swap)
  Eviction eviction = Eviction::kAdaptive;
  // Window groups keep the tail that resuming needs at the end of each prompt and sequence, where prompts
  // were seen to branch, and every so many tokens.
  int32_t boundary_tokens = 512;
  int32_t table_tokens = 0;  // tables are made for sequences this long at once; beyond, growing allocates
  size_t ram_bytes = 0;      // RAM tier: swapped sequences and blocks that left the main pool; 0: none
  std::string disk_directory = {};          // SSD tier; empty: none
  uint64_t disk_bytes = 0;                  // most that the files may take
  size_t staging_bytes = size_t{64} << 20;  // most that may wait to be written to disk
  Compression compression = Compression::kAutomatic;
  uint64_t seed = 1;                                      // of random eviction
  FileSystem* files = nullptr;                            // null: the machine's
  std::function<void(const std::string& line)> log = {};  // null: standard error. From any thread
  std::function<void()> wake = {};  // a read has finished: poll() has news. From an I/O thread
};

// ---------------------------------------------------------------- prompt, match, sequence

// Per group, or per shelf of a group that has several: those of group 0, then those of group 1 ..
using BlockCounts = std::array<int32_t, kMaxKvCounts>;

// Immutable once made; shared between threads and samples.
struct Prompt {
  std::vector<int32_t> tokens;
  BlockKey root;               // of this model and salt
  std::vector<BlockKey> keys;  // of the full blocks; empty without prefix cache
};

struct Match {
  int32_t tokens = 0;                   // that need not be computed, < prompt size
  int32_t from_ram = 0, from_disk = 0;  // of these, tokens whose blocks come from there
  // What attach takes from available(): blocks that are remembered and held by nobody, blocks to load, a
  // copy.
  BlockCounts takes{};
};

class Cache;

// Move-only handle. Gives its blocks back when destroyed (or reset); what is remembered stays remembered.
class Sequence {
 public:
  enum class State { kActive, kLoading, kSwapped };

  Sequence() = default;
  ~Sequence() { reset(); }
  Sequence(Sequence&& other) noexcept : s_(other.s_) { other.s_ = nullptr; }
  Sequence& operator=(Sequence&& other) noexcept;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  explicit operator bool() const { return s_ != nullptr; }
  void reset();  // any state; afterwards the handle is empty

  State state() const;
  int32_t length() const;  // tokens computed. While loading: what it will be at least if every read succeeds
  int32_t cached_tokens() const;  // of these, found at attach instead of computed
  // The block of group g for positions [16 i, 16 i + 16): kNoBlock once out of the window. Valid until the
  // next call of the cache that names this sequence; only in state kActive.
  const int32_t* table(int group) const;
  int32_t held_blocks(int group) const;

 private:
  friend class Cache;
  struct Rep;
  explicit Sequence(Rep* s) : s_(s) {}
  Rep* s_ = nullptr;
};

// ---------------------------------------------------------------- statistics

struct TierStats {
  int64_t blocks = 0;  // now
  uint64_t bytes = 0;
  uint64_t hits = 0;  // blocks taken from this tier by attach
  uint64_t hit_tokens = 0;
  uint64_t evictions = 0;                      // blocks that had to leave
  uint64_t bytes_written = 0, bytes_read = 0;  // moved into and out of the tier
};

struct CacheStats {
  struct Group {
    int32_t total = 0, free = 0, cached = 0, held = 0, loading = 0;  // add up to total
    bool sparse = false;                                             // GroupOptions'
  };
  std::array<Group, kMaxKvGroups> groups{};
  TierStats main, ram, disk;
  uint64_t prompts = 0, prompt_tokens = 0, hit_tokens = 0;  // of attach; token hit rate = hit / prompt
  uint64_t copies_on_write = 0, deduplicated = 0;           // blocks
  uint64_t swaps_out = 0, swaps_in = 0;
  uint64_t swapped_bytes = 0;    // now in the RAM tier for swapped sequences
  uint64_t writes_dropped = 0;   // blocks forgotten because the disk did not keep up
  uint64_t files_dropped = 0;    // corrupt, foreign or stale
  double compression_ratio = 1;  // stored / raw bytes of what was written
  bool compressing = false, disk_on = false;
  double swap_out_rate = 0, swap_in_rate = 0;      // bytes/s, measured
  double disk_write_rate = 0, disk_read_rate = 0;  // raw bytes/s, with (de)compression
  std::array<double, 3> policy_weights{};          // lru, lfu, random
};

struct SwapCost {
  uint64_t bytes = 0;                      // that swap_out would copy
  double out_seconds = 0, in_seconds = 0;  // at the measured rates
  bool fits = false;                       // in the RAM tier
};

// ---------------------------------------------------------------- the cache

class Cache {
 public:
  // Opens the disk directory when one is named. Throws Error: kBadInput for options that make no sense or a
  // directory another process uses, kIo when the directory cannot be made or read.
  // Measures the store by copying one block of each group; blocks have no meaning yet then.
  Cache(CacheOptions options, BlockStore& store);
  ~Cache();  // queued writes are dropped (see flush); every Sequence must be gone
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // Hashes the full blocks; about 0.5 us each. Any thread. `variant`: root_key's.
  std::shared_ptr<const Prompt> make_prompt(std::span<const int32_t> tokens, std::string_view salt = {},
                                            std::string_view variant = {}) const;

  // What attach would find now. Changes nothing; cheap (a lookup per block).
  Match match(const Prompt& prompt) const;

  // A sequence that begins with the longest remembered prefix for which there is space (perhaps none: attach
  // always succeeds). Blocks from RAM are there on return; for blocks from disk reading begins and the state
  // is kLoading. A hit may end inside a block: that block is copied. The prompt's last token is never part of
  // it. After a restart, whether a file goes on as the prompt does is read too: ready() may make the hit
  // longer.
  Sequence attach(std::shared_ptr<const Prompt> prompt);
  // An empty sequence that matches nothing; what it computes is remembered under salt and variant.
  Sequence make_sequence(std::string_view salt = {}, std::string_view variant = {});

  // True when the state is not (any longer) kLoading. If a read failed the hit is looked up again without it:
  // length() may then be smaller; it is larger, by less than a block, where a file on disk turned out to
  // begin as the prompt goes on. Call after poll().
  bool ready(Sequence& sequence);

  // Makes positions [length, length + tokens) writable: allocates (forgetting remembered blocks as the policy
  // says) and copies a shared partial block. False, and nothing changed, when there is no space. Repeating it
  // is free. State kActive.
  bool reserve(Sequence& sequence, int32_t tokens);
  // The step is done: these tokens are computed (at most what was reserved). Full blocks are remembered;
  // window groups give back what no later token sees. State kActive.
  void advance(Sequence& sequence, std::span<const int32_t> tokens);

  // Another sequence with the same tokens and the same blocks. State kActive.
  Sequence fork(const Sequence& sequence);

  // Moves a sequence out of the main pool into the RAM tier; all its blocks there may be used by others.
  // False, and nothing changed, when the RAM tier has no space. kActive -> kSwapped.
  bool swap_out(Sequence& sequence);
  // Back again. False, and nothing changed, when the main pool has no space. kSwapped -> kActive.
  bool swap_in(Sequence& sequence);
  SwapCost swap_cost(const Sequence& sequence) const;

  // Admission. available: blocks free or remembered and held by nobody; what the calls below need must be at
  // most that. Exact: they return true if and only if it is.
  // `count`: as in BlockCounts, of which the first counts() are used.
  int32_t available(int count) const;
  int counts() const;
  BlockCounts blocks_to_reserve(const Sequence& sequence, int32_t tokens) const;
  BlockCounts blocks_to_swap_in(const Sequence& sequence) const;
  // Blocks only this sequence holds: what available() grows by when it is released or swapped out.
  BlockCounts blocks_of_its_own(const Sequence& sequence) const;

  // Forgets up to count remembered blocks of a group that nobody holds (they go down the tiers). Returns how
  // many. reserve does this by itself.
  int32_t evict(int group, int32_t count);

  // What the main pool held is gone: its memory was lost, and is new. What is remembered in RAM and on disk
  // stays. No sequence may hold a block of the pool. Waits for reads that are under way.
  void forget_main();

  // Once per step: takes in finished reads and writes, hands new blocks to the writer. Never waits.
  void poll();
  // Waits until a read or write has finished or the time is over, then polls. For an engine with nothing to
  // do.
  void wait(std::chrono::milliseconds at_most);
  // Waits until every remembered block that belongs on disk is there (orderly shutdown, tests).
  void flush();

  CacheStats stats() const;
  // Aborts (MILLRACE_CHECK) unless counts add up and no block is lost or owned twice. O(blocks): for tests.
  void check_invariants() const;

 private:
  friend class Sequence;
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace::kv
