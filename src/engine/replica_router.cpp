#include "engine/replica_router.h"

#include <algorithm>

#include "base/check.h"

namespace millrace {

ReplicaRouter::ReplicaRouter(int replicas, size_t blocks, int32_t slots)
    : blocks_(std::max<size_t>(1, blocks)), slots_(slots), memories_(static_cast<size_t>(replicas)) {}

int ReplicaRouter::choose(std::span<const kv::BlockKey> keys, std::span<const int64_t> loads,
                          const std::vector<bool>& away) {
  MILLRACE_CHECK(loads.size() == memories_.size() && (away.empty() || away.size() == loads.size()));
  const bool some_there = std::find(away.begin(), away.end(), false) != away.end();
  std::vector<size_t> there;
  for (size_t r = 0; r < memories_.size(); ++r) {
    if (!some_there || !away[r]) there.push_back(r);
  }
  const size_t idlest =
      *std::min_element(there.begin(), there.end(), [&](size_t a, size_t b) { return loads[a] < loads[b]; });
  size_t best = idlest, most = 0;
  for (const size_t r : there) {
    size_t known = 0;
    while (known < keys.size() && memories_[r].places.contains(keys[known])) ++known;
    if (known < most || (known == most && loads[r] >= loads[best])) continue;
    // To wait for a slot takes longer than to compute a prompt where there is one.
    if (loads[r] >= slots_ && loads[idlest] < slots_) continue;
    best = r;
    most = known;
  }
  remember(memories_[best], keys);
  return static_cast<int>(best);
}

void ReplicaRouter::remember(Memory& memory, std::span<const kv::BlockKey> keys) const {
  // The last first: a block without those before it is of no use, so it is forgotten before them.
  for (size_t i = keys.size(); i-- > 0;) {
    const auto found = memory.places.find(keys[i]);
    if (found != memory.places.end()) {
      memory.order.splice(memory.order.begin(), memory.order, found->second);
      continue;
    }
    memory.order.push_front(keys[i]);
    memory.places[keys[i]] = memory.order.begin();
  }
  while (memory.order.size() > blocks_) {
    memory.places.erase(memory.order.back());
    memory.order.pop_back();
  }
}

}  // namespace millrace
