// Statistics, and the invariants that the property test holds the cache to after every operation.
#include <algorithm>

#include "base/check.h"
#include "kv/cache_impl.h"

namespace millrace::kv {

CacheStats Cache::Impl::stats() const {
  CacheStats stats = stats_;
  stats.main.blocks = 0;
  for (int g = 0; g < num_groups(); ++g) {
    const Pool& pool = pools_[g];
    CacheStats::Group& group = stats.groups[g];
    group.sparse = pool.sparse;
    group.total = static_cast<int32_t>(pool.blocks.size());
    for (const Pool::Shelf& shelf : pool.shelves) {
      group.free += static_cast<int32_t>(shelf.free.size());
      group.cached += shelf.evictor.size();
    }
    group.loading = pool.loading;
    group.held = group.total - group.free - group.cached - group.loading;
    stats.main.blocks += group.total - group.free;
    stats.main.bytes += static_cast<uint64_t>(group.total - group.free) * pool.block_bytes;
    stats.policy_weights = pools_[0].shelves[0].evictor.weights();
  }
  stats.ram.blocks = ram_blocks_;
  stats.ram.bytes = ram_used_;
  stats.swapped_bytes = swapped_bytes_;
  stats.disk.blocks = disk_blocks_;
  stats.disk.bytes = disk_used_;
  stats.disk_on = disk_on();
  if (disk_ == nullptr) return stats;
  const DiskTier::Rates rates = disk_->rates();
  stats.disk.bytes_read = rates.bytes_read;
  stats.disk_write_rate = rates.write;
  stats.disk_read_rate = rates.read;
  stats.files_dropped = rates.files_dropped;
  stats.compressing = rates.compressing;
  if (rates.raw_bytes > 0) {
    stats.compression_ratio = static_cast<double>(rates.stored_bytes) / static_cast<double>(rates.raw_bytes);
  }
  return stats;
}

void Cache::Impl::check_pool(int group) const {
  const Pool& pool = pools_[group];
  std::vector<int32_t> refs(pool.blocks.size()), times_free(pool.blocks.size());
  for (const Rep* s : sequences_) {
    const Rep::Table& table = s->tables[group];
    const auto size = static_cast<int32_t>(table.blocks.size());
    for (int32_t b = 0; b < size; ++b) {
      const bool may_lack = pool.sparse && b >= blocks_for(s->length);  // reserved for a step not done yet
      MILLRACE_CHECK(may_lack || (table.blocks[b] == kNoBlock) == (b < table.first_held));
      if (table.blocks[b] == kNoBlock) continue;
      ++refs[table.blocks[b]];
      MILLRACE_CHECK(&pool.shelf(table.blocks[b]) == &pool.shelves[shelf_of(b, pool.num_shelves())]);
    }
    if (s->sources[group] != kNoBlock) ++refs[s->sources[group]];
    if (s->state == Sequence::State::kSwapped) {
      MILLRACE_CHECK(size == table.first_held);
    } else {
      MILLRACE_CHECK(size >= blocks_for(s->length) && table.first_held == first_seen(group, s->length));
    }
  }
  int32_t loading = 0, cached = 0, evictable = 0;
  for (const Pool::Shelf& shelf : pool.shelves) {
    evictable += shelf.evictor.size();
    for (const int32_t block : shelf.free) {
      ++times_free[block];
      MILLRACE_CHECK(&pool.shelf(block) == &shelf);
    }
  }
  for (size_t i = 0; i < pool.blocks.size(); ++i) {
    const auto [counted, node] = pool.blocks[i];
    const auto block = static_cast<int32_t>(i);
    MILLRACE_CHECK(counted == refs[i]);
    const bool is_loading = node != kNoNode && index_[node].copies[group].loading;
    const bool is_cached = node != kNoNode && counted == 0 && !is_loading;
    MILLRACE_CHECK(node == kNoNode || (index_[node].used && index_[node].copies[group].block == block));
    MILLRACE_CHECK(times_free[i] == (counted == 0 && node == kNoNode ? 1 : 0));
    MILLRACE_CHECK(pool.shelf(block).evictor.contains(block) == is_cached);
    loading += is_loading;
    cached += is_cached;
  }
  MILLRACE_CHECK(loading == pool.loading && cached == evictable);
}

void Cache::Impl::check_nodes() const {
  size_t ram = swapped_bytes_, unpinned = 0;
  uint64_t disk = 0;
  int64_t ram_blocks = 0, disk_blocks = 0, writing = 0, dirty = 0;
  for (int32_t id = 0; id < index_.size(); ++id) {
    const Node& node = index_[id];
    if (!node.used) continue;
    MILLRACE_CHECK(index_.find(node.key) == id);
    bool needed = false;
    for (int g = 0; g < kMaxKvGroups; ++g) {
      const Copy& copy = node.copies[g];
      needed |= copy.referenced();
      MILLRACE_CHECK(copy.block == kNoBlock || pools_[g].blocks[copy.block].node == id);
      MILLRACE_CHECK(!copy.loading || copy.block != kNoBlock);
      MILLRACE_CHECK(ram_order_.contains(item_of(id, g)) == (copy.ram != nullptr && copy.ram_pins == 0));
      MILLRACE_CHECK(disk_order_.contains(item_of(id, g)) == (copy.disk_bytes > 0 && !copy.loading));
      if (copy.ram != nullptr) ram += copy.ram->size();
      if (copy.ram != nullptr && copy.ram_pins == 0) unpinned += copy.ram->size();
      if (copy.writing) disk += kFileHeaderBytes + pools_[g].block_bytes;
      disk += copy.disk_bytes;
      ram_blocks += copy.ram != nullptr;
      disk_blocks += copy.disk_bytes > 0;
      writing += copy.writing;
      dirty += copy.dirty;
    }
    MILLRACE_CHECK(needed);
  }
  MILLRACE_CHECK(ram == ram_used_ && unpinned == ram_unpinned_ && ram <= options_.ram_bytes);
  MILLRACE_CHECK(disk == disk_used_ && (disk_ == nullptr || disk <= options_.disk_bytes));
  MILLRACE_CHECK(ram_blocks == ram_blocks_ && disk_blocks == disk_blocks_);
  MILLRACE_CHECK(writing == writes_pending_ && dirty == static_cast<int64_t>(dirty_.size()));
}

void Cache::Impl::check_invariants() const {
  for (int g = 0; g < num_groups(); ++g) check_pool(g);
  check_nodes();
}

}  // namespace millrace::kv
