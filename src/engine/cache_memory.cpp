#include "engine/cache_memory.h"

#include <algorithm>

namespace millrace {

CacheMemory::CacheMemory(Runtime& runtime, const SampleTable& samples)
    : cache_(runtime.cache()), spec_(runtime.spec()), samples_(samples) {}

int32_t CacheMemory::available(int count) const { return cache_.available(count); }

sched::Counts CacheMemory::to_grow(sched::Id id, int32_t tokens) const {
  return cache_.blocks_to_reserve(samples_[id].blocks, tokens);
}

sched::Memory::Start CacheMemory::to_start(sched::Id id) const {
  const Sample& sample = samples_[id];
  const auto known = static_cast<int32_t>(sample.tokens.size());
  Start start;
  const size_t groups = spec_.kv_groups.size();
  if (sample.blocks) {  // swapped out
    start.blocks = cache_.blocks_to_swap_in(sample.blocks);
    size_t first = 0;
    for (const KvGroupSpec& group : spec_.kv_groups) {  // and one for the token it is about to compute
      ++start.blocks[first +
                     static_cast<size_t>(shelf_of(sample.blocks.length() / kBlockTokens, group.shelves))];
      first += static_cast<size_t>(group.shelves);
    }
    return start;
  }
  const kv::Match match = sample.needs_every_row() ? kv::Match{} : cache_.match(*sample.prompt);
  start.computed = match.tokens;
  start.loading = match.from_disk > 0;
  size_t count = 0;
  for (size_t g = 0; g < groups; ++g) {
    if (const int32_t shelves = spec_.kv_groups[g].shelves; shelves > 1) {
      for (int32_t s = 0; s < shelves; ++s, ++count) {
        start.blocks[count] = match.takes[count] + blocks_on_shelf(blocks_for(known), s, shelves) -
                              blocks_on_shelf(blocks_for(match.tokens), s, shelves);
      }
      continue;
    }
    int32_t more = blocks_for(known) - blocks_for(match.tokens);
    const int32_t window = spec_.kv_groups[g].window;
    if (spec_.kv_groups[g].state) {
      more = std::min(more, state_blocks_of_step(spec_.max_tokens, spec_.kv_groups[g].states_apart));
    } else if (window > 0) {
      more = std::min(more, blocks_for(window) + blocks_for(spec_.max_tokens) + 1);
    }
    start.blocks[count] = match.takes[count] + more;
    ++count;
  }
  return start;
}

sched::Counts CacheMemory::freed_by(sched::Id id) const {
  const Sample& sample = samples_[id];
  return sample.blocks ? cache_.blocks_of_its_own(sample.blocks) : sched::Counts{};
}

double CacheMemory::swap_seconds(sched::Id id) const {
  const kv::SwapCost cost = cache_.swap_cost(samples_[id].blocks);
  return cost.fits ? cost.out_seconds + cost.in_seconds : sched::kNever;
}

}  // namespace millrace
