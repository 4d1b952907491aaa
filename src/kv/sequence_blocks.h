// Blocks of the paged KV cache: ids and counts, no bytes and no maths. A pool hands out ids; a sequence holds
// a table per layer group that maps its logical blocks (16 tokens each) to pool ids. Window groups give back
// the blocks that leave the window.
#pragma once

#include <cstdint>
#include <vector>

#include "base/paging.h"

namespace millrace::kv {

class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);
  int32_t allocate();  // an id with count 1, or kNoBlock when the pool is empty
  void retain(int32_t block);
  void release(int32_t block);
  int32_t free_blocks() const { return static_cast<int32_t>(free_.size()); }
  int32_t total_blocks() const { return static_cast<int32_t>(counts_.size()); }
  int32_t references(int32_t block) const { return counts_[block]; }

 private:
  std::vector<int32_t> counts_;
  std::vector<int32_t> free_;
};

// One sequence's blocks in every group. Move-only; gives its blocks back when destroyed.
class SequenceBlocks {
 public:
  // pools[g] serves group g; windows[g] is its window, 0 for full attention. Pools must outlive this.
  SequenceBlocks(std::vector<BlockPool*> pools, std::vector<int32_t> windows);
  ~SequenceBlocks();
  SequenceBlocks(SequenceBlocks&&) noexcept;
  SequenceBlocks& operator=(SequenceBlocks&&) noexcept;
  SequenceBlocks(const SequenceBlocks&) = delete;
  SequenceBlocks& operator=(const SequenceBlocks&) = delete;

  // Makes room for positions [length, length + tokens). False, and nothing changed, when a pool runs out.
  bool reserve(int32_t tokens);
  // The step that wrote them is done: they count now, and blocks no later token can see are released.
  void advance(int32_t tokens);
  void clear();

  int32_t length() const { return length_; }
  const int32_t* table(int group) const { return groups_[group].table.data(); }
  int32_t held_blocks(int group) const;

 private:
  struct Group {
    BlockPool* pool;
    int32_t window;
    int32_t first_held = 0;      // logical blocks before this one are released
    std::vector<int32_t> table;  // logical block -> id
  };
  std::vector<Group> groups_;
  int32_t length_ = 0;
};

}  // namespace millrace::kv
