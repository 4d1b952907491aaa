// Which remembered block leaves when space is needed.
//   Heap       ids ordered by a priority that may change: the order of least recent, least frequent
//   Evictor    one pool's blocks that are remembered and held by nobody, and the policy that picks among them
//
// The adaptive policy has three experts (least recently used, least frequently used, random). Each eviction
// is one expert's choice, drawn by their weights, and the victim's name goes into a ghost list with that
// expert's number. A block that comes back (computed or loaded again) and is found there was a mistake: the
// expert's weight falls, by more the shorter the block was gone. Before any expert is asked, blocks that were
// never found again leave, as long as there are more of them than a target that the same ghosts move. The
// ghost lists and the target are ARC's idea, the experts' weights LeCaR's (Vietri et al. 2018).
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/paging.h"
#include "kv/cache.h"
#include "kv/hash.h"

namespace millrace::kv {

// A binary min-heap of small ids with their places known. set and erase are O(log n); nothing is allocated
// once the largest id and size have been seen.
class Heap {
 public:
  using Priority = std::pair<uint64_t, uint64_t>;

  // Room for ids below this one: set() then allocates nothing. Grows by doubling.
  void reserve(int32_t ids);
  void set(int32_t id, Priority priority);  // inserts or moves
  void erase(int32_t id);                   // no matter when it is not there
  bool contains(int32_t id) const { return id < static_cast<int32_t>(where_.size()) && where_[id] >= 0; }
  bool empty() const { return heap_.empty(); }
  int32_t size() const { return static_cast<int32_t>(heap_.size()); }
  int32_t top() const { return heap_.front().second; }
  int32_t at(int32_t i) const { return heap_[i].second; }  // the i-th in no order

 private:
  using Entry = std::pair<Priority, int32_t>;
  void place(int32_t i, const Entry& entry);
  void up(int32_t i);
  void down(int32_t i);
  std::vector<Entry> heap_;
  std::vector<int32_t> where_;  // id -> index into heap_, or -1
};

class Evictor {
 public:
  // run: so many blocks are of use only together (the tail of a window). The adaptive policy then lets one
  // expert choose that many in a row, and does without the random one, which would spoil a tail with each
  // choice.
  Evictor(Eviction policy, int32_t num_blocks, uint64_t seed, int32_t run = 1);

  void add(int32_t block, uint64_t last_use, uint64_t uses);
  void remove(int32_t block);
  bool contains(int32_t block) const { return recent_.contains(block); }
  int32_t size() const { return recent_.size(); }

  int32_t choose();  // kNoBlock when there is none; the block stays until remove
  // What the last choose (or a descendant of it) was about, and how often that had been found again.
  void evicted(const BlockKey& key, uint64_t uses);
  void returned(const BlockKey& key);
  const std::array<double, 3>& weights() const { return weights_; }  // lru, lfu, random
  double once_target() const { return once_target_; }                // blocks

 private:
  enum Expert : uint8_t { kLruExpert, kLfuExpert, kRandomExpert, kOnce, kNobody };
  struct Ghost {
    uint64_t name = 0;  // the key's other half
    uint64_t when = 0;
    Expert expert = kNobody;
    bool found_again = false;
  };
  uint64_t random();
  Expert draw();
  Ghost& ghost_of(const BlockKey& key) { return ghosts_[key.low() & (ghosts_.size() - 1)]; }

  Eviction policy_;
  int32_t num_blocks_;
  int num_experts_;
  uint64_t state_;
  Heap recent_, frequent_;
  Heap once_;  // those never found again, by last use
  double once_target_ = 0;
  Expert last_ = kLruExpert;
  int32_t run_, left_of_run_ = 0;
  std::array<double, 3> weights_{};
  std::vector<Ghost> ghosts_;  // by key; a newer one takes the place of an older
  uint64_t evictions_ = 0;
};

}  // namespace millrace::kv
