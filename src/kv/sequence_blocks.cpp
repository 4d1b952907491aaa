#include "kv/sequence_blocks.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace millrace::kv {

BlockPool::BlockPool(int32_t num_blocks) : counts_(num_blocks, 0), free_(num_blocks) {
  // Handed out from the back: low ids first, so a short run touches little memory.
  std::iota(free_.rbegin(), free_.rend(), 0);
}

int32_t BlockPool::allocate() {
  if (free_.empty()) return kNoBlock;
  const int32_t block = free_.back();
  free_.pop_back();
  counts_[block] = 1;
  return block;
}

void BlockPool::retain(int32_t block) {
  MILLRACE_CHECK(counts_[block] > 0);
  ++counts_[block];
}

void BlockPool::release(int32_t block) {
  MILLRACE_CHECK(counts_[block] > 0);
  if (--counts_[block] == 0) free_.push_back(block);
}

SequenceBlocks::SequenceBlocks(std::vector<BlockPool*> pools, std::vector<int32_t> windows) {
  MILLRACE_CHECK(pools.size() == windows.size() && pools.size() <= kMaxKvGroups);
  for (size_t g = 0; g < pools.size(); ++g) groups_.push_back({pools[g], windows[g], 0, {}});
}

SequenceBlocks::~SequenceBlocks() { clear(); }

SequenceBlocks::SequenceBlocks(SequenceBlocks&& other) noexcept
    : groups_(std::move(other.groups_)), length_(std::exchange(other.length_, 0)) {
  other.groups_.clear();
}

SequenceBlocks& SequenceBlocks::operator=(SequenceBlocks&& other) noexcept {
  if (this == &other) return *this;
  clear();
  groups_ = std::move(other.groups_);
  other.groups_.clear();
  length_ = std::exchange(other.length_, 0);
  return *this;
}

bool SequenceBlocks::reserve(int32_t tokens) {
  const int32_t wanted = blocks_for(static_cast<int64_t>(length_) + tokens);
  for (const Group& group : groups_) {
    const int32_t missing = wanted - static_cast<int32_t>(group.table.size());
    if (missing > group.pool->free_blocks()) return false;
  }
  for (Group& group : groups_) {
    while (static_cast<int32_t>(group.table.size()) < wanted) group.table.push_back(group.pool->allocate());
  }
  return true;
}

void SequenceBlocks::advance(int32_t tokens) {
  length_ += tokens;
  for (Group& group : groups_) {
    if (group.window == 0) continue;
    // The next token, at position length_, sees back to length_ - window + 1.
    const int32_t first_needed = std::max(0, length_ - group.window + 1) / kBlockTokens;
    for (; group.first_held < std::min<int32_t>(first_needed, static_cast<int32_t>(group.table.size()));
         ++group.first_held) {
      group.pool->release(std::exchange(group.table[group.first_held], kNoBlock));
    }
  }
}

void SequenceBlocks::clear() {
  for (Group& group : groups_) {
    for (const int32_t block : group.table) {
      if (block != kNoBlock) group.pool->release(block);
    }
    group.table.clear();
    group.first_held = 0;
  }
  length_ = 0;
}

int32_t SequenceBlocks::held_blocks(int group) const {
  return static_cast<int32_t>(groups_[group].table.size()) - groups_[group].first_held;
}

}  // namespace millrace::kv
