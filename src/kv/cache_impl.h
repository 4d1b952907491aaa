// The inside of kv::Cache, for its own files only:
//   cache.cpp            construction, the public face
//   cache_lookup.cpp     prompts, matching, attach
//   cache_sequences.cpp  blocks of the main pool; reserve, advance, fork
//   cache_tiers.cpp      what leaves the main pool and comes back: RAM, disk, swapped sequences
//   cache_check.cpp      statistics and invariants
//
// A block of the main pool is in exactly one of four states:
//   free      refs = 0, no node                       in its shelf's list
//   cached    refs = 0, a node, not loading           in its shelf's evictor; free for the taking
//   held      refs > 0, not loading                   with a node (shared by content) or without (private)
//   loading   a node whose bytes are on their way     whatever refs is; never evicted
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kv/cache.h"
#include "kv/disk_tier.h"
#include "kv/eviction.h"
#include "kv/prefix_index.h"

namespace millrace::kv {

struct Sequence::Rep {
  Cache::Impl* owner = nullptr;
  size_t place = 0;  // in the owner's list
  State state = State::kActive;
  int32_t length = 0, cached = 0;
  BlockKey key;                                  // of the last full block; the root before there is one
  std::array<int32_t, kBlockTokens> tail{};      // tokens of the block that is not full yet
  int32_t prompt_blocks = 0, branch_blocks = 0;  // boundaries whose window tails are kept

  struct Table {
    std::vector<int32_t> blocks;
    int32_t first_held = 0;  // logical blocks before this one are kNoBlock
  };
  std::array<Table, kMaxKvGroups> tables;

  std::shared_ptr<const Prompt> prompt;  // while loading: to look it up again if a read fails
  struct Load {
    int group;
    int32_t index;  // logical block; kNoBlock: the group's source
  };
  std::vector<Load> loads;
  uint64_t headers_until = 0;  // while loading: it waits for so many headers; 0: for none
  // While loading: blocks held per group whose first tokens go into the sequence's own last block once they
  // are there; kNoBlock for none.
  std::array<int32_t, kMaxKvGroups> sources;
  std::array<Buffer, kMaxKvGroups> ram_sources;  // while it is attached: the same, for those found in RAM

  struct Swapped {
    int32_t node = kNoNode;  // its RAM copy is pinned; or, without one:
    Buffer bytes;
    bool done = false;  // it is pinned or copied; false only while swap_out is at work
  };
  Rep() { sources.fill(kNoBlock); }
  std::array<std::vector<Swapped>, kMaxKvGroups> swapped;  // of the logical blocks from first_held on
};

class Cache::Impl {
 public:
  Impl(CacheOptions options, BlockStore& store);
  ~Impl();

  // --- cache_lookup.cpp
  std::shared_ptr<const Prompt> make_prompt(std::span<const int32_t> tokens, std::string_view salt,
                                            std::string_view variant) const;
  Match match(const Prompt& prompt) const;
  Sequence attach(std::shared_ptr<const Prompt> prompt);
  bool ready(Sequence::Rep& s);

  // --- cache_sequences.cpp
  Sequence make_sequence(std::string_view salt, std::string_view variant);
  bool reserve(Sequence::Rep& s, int32_t tokens);
  void advance(Sequence::Rep& s, std::span<const int32_t> tokens);
  Sequence fork(const Sequence::Rep& s);
  void release(Sequence::Rep* s) noexcept;
  int32_t available(int count) const;
  int counts() const { return static_cast<int>(places_.size()); }
  BlockCounts blocks_to_reserve(const Sequence::Rep& s, int32_t tokens) const;
  BlockCounts blocks_of_its_own(const Sequence::Rep& s) const;

  // --- cache_tiers.cpp
  bool swap_out(Sequence::Rep& s);
  bool swap_in(Sequence::Rep& s);
  SwapCost swap_cost(const Sequence::Rep& s) const;
  BlockCounts blocks_to_swap_in(const Sequence::Rep& s) const;
  int32_t evict(int group, int32_t count);
  void forget_main();
  void poll();
  void wait(std::chrono::milliseconds at_most);
  void flush();

  // --- cache_check.cpp
  CacheStats stats() const;
  void check_invariants() const;

 private:
  using Rep = Sequence::Rep;
  struct Pool {
    Pool(const GroupOptions& group, const CacheOptions& options, uint64_t seed);
    int32_t window;
    size_t block_bytes;
    bool sparse;
    int32_t boundary_blocks;  // between boundaries
    int32_t tail_blocks;      // that resuming at a boundary needs of a window group
    struct Block {
      int32_t refs = 0, node = kNoNode;
    };
    std::vector<Block> blocks;
    struct Shelf {
      std::vector<int32_t> free;
      Evictor evictor;
    };
    std::vector<Shelf> shelves;
    int32_t loading = 0;
    int first_count = 0;  // of BlockCounts
    int32_t num_shelves() const { return static_cast<int32_t>(shelves.size()); }
    Shelf& shelf(int32_t block) { return shelves[static_cast<size_t>(block % num_shelves())]; }
    const Shelf& shelf(int32_t block) const { return shelves[static_cast<size_t>(block % num_shelves())]; }
    int count_of(int32_t index) const { return first_count + shelf_of(index, num_shelves()); }
  };
  struct Hit {
    int32_t blocks = 0;  // whole
    PrefixIndex::Partial partial;
    int32_t branch = 0;  // whole blocks, had the window groups kept their tails there
    BlockCounts takes{};
    int32_t tokens() const { return blocks * kBlockTokens + partial.tokens; }
  };

  int num_groups() const { return static_cast<int>(pools_.size()); }
  static int32_t item_of(int32_t node, int group) { return node * kMaxKvGroups + group; }
  // The first logical block of a group that the token at this position sees.
  int32_t first_seen(int group, int32_t position) const;

  // --- cache_lookup.cpp. path_ is the last find()'s nodes, by logical block.
  Hit find(const Prompt& prompt) const;
  int32_t missing_block(int32_t blocks, int32_t position) const;
  int32_t usable_blocks(int32_t max) const;  // largest n <= max at which every window group has its tail
  BlockCounts taken_by(int32_t blocks, int32_t position) const;
  bool find_partial(const Prompt& prompt, Hit& hit) const;
  void start(Rep& s, const std::shared_ptr<const Prompt>& prompt);
  bool hold_copy(Rep& s, int32_t node, int group, int32_t index, int32_t& place);
  void hold_found(Rep& s, const Prompt& prompt, const Hit& hit);
  void hold_partial(Rep& s, const Hit& hit);
  void ask_for_headers(Rep& s, const Prompt& prompt, const Hit& hit);
  bool extend(Rep& s);
  bool is_whole(const Node& node) const;  // every group has it somewhere
  void take_path(Rep& s, const Hit& hit);
  void take_partial(Rep& s, const Prompt& prompt, const Hit& hit);
  void fill_from_ram(int32_t node, int group, int32_t block);
  void read_into(int32_t node, int group, int32_t block);
  void copy_sources(Rep& s);
  void undo_start(Rep& s, const Hit& hit) noexcept;
  void count_hit(const Hit& hit);
  void count_partial(const Hit& hit);
  TierStats& count_block(int32_t node, int32_t index, int32_t position);

  // --- cache_sequences.cpp
  // With one reference, for logical block `index`. There must be one available.
  int32_t allocate(int group, int32_t index);
  void hold(int group, int32_t block);
  void unhold(int group, int32_t block);
  void leave_window(int group, int32_t block);
  void leave_windows(Rep& s);
  void unname(int group, int32_t block);  // the node forgets its copy in the main pool
  // Used just now, as far as a hit of `length` tokens uses it: not the window's blocks (or states) that lie
  // further back.
  void touch(int32_t node, uint64_t uses, int32_t length);
  void commit(Rep& s, int32_t index, int32_t final_length);
  bool is_kept(const Rep& s, int group, int32_t index) const;
  // Is logical block `index` taken when a sequence is to grow to `wanted` of them?
  bool is_taken(const Rep& s, int group, int32_t index, int32_t wanted) const;
  void remember_tail(Rep& s);
  void drop_blocks(Rep& s);
  Rep* new_rep();
  int32_t add_node(const BlockKey& key);
  void give_back(int group, int32_t block) noexcept;  // one that allocate() gave and nobody has seen

  // --- cache_tiers.cpp
  struct Buffers;
  BlockLabel label_of(int32_t node, int group) const;
  Buffer read_main(int group, int32_t block);
  int32_t choose_victim(int group, int32_t shelf);
  void demote(int group, int32_t block);
  void keep_copy(int group, int32_t block);
  bool make_ram_space(size_t bytes);
  void put_ram(int32_t node, int group, Buffer bytes);
  void drop_ram(int32_t node, int group);
  void pin_ram(int32_t node, int group);
  void unpin_ram(int32_t node, int group);
  void copy_out(Rep& s, int32_t blocks);
  void forget_swapped(Rep& s) noexcept;
  uint64_t bytes_to_swap(const Rep& s) const;

  void open_disk();
  void mark_dirty(int32_t node, int group) noexcept;
  bool disk_on() const { return disk_ != nullptr && !disk_off_; }
  bool may_stage() const { return disk_on() && staged_bytes_ < options_.staging_bytes; }
  bool submit_write(int32_t node, int group, Buffer bytes);
  void drop_file(int32_t node, int group, bool remove);
  void finish_write(const DiskTier::Done& done);
  void finish_read(const DiskTier::Done& done);
  void finish_header(const DiskTier::Done& done);
  void take_done();
  void feed_writer();
  void turn_disk_off();

  // --- cache_check.cpp
  void check_pool(int group) const;
  void check_nodes() const;

  CacheOptions options_;
  BlockStore& store_;
  std::string identity_;
  std::vector<Pool> pools_;
  std::vector<std::pair<int, int32_t>> places_;  // group and shelf, of each of BlockCounts
  bool has_full_group_ = false;
  PrefixIndex index_;
  std::vector<Rep*> sequences_;
  std::vector<std::unique_ptr<Rep>> spare_;  // of sequences that are gone: their tables are used again
  uint64_t tick_ = 0;
  mutable std::vector<int32_t> path_;

  Heap ram_order_;  // items (node, group) in RAM and not pinned, least recent first
  size_t ram_used_ = 0, ram_unpinned_ = 0, swapped_bytes_ = 0;
  int64_t ram_blocks_ = 0;

  std::unique_ptr<DiskTier> disk_;
  bool disk_off_ = false;
  Heap disk_order_;  // items on disk and not being read
  uint64_t disk_used_ = 0;
  int64_t disk_blocks_ = 0;
  size_t staged_bytes_ = 0;
  int32_t writes_pending_ = 0, reads_pending_ = 0;
  std::deque<int32_t> dirty_;
  std::vector<DiskTier::Done> done_;
  // Files found at the start whose headers nobody has asked for, by how many blocks come before; newest last.
  std::unordered_map<int32_t, std::vector<BlockKey>> unread_;
  uint64_t headers_asked_ = 0, headers_read_ = 0;  // one after another

  CacheStats stats_;
};

}  // namespace millrace::kv
