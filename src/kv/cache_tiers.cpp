// What leaves the main pool and comes back. One mechanism serves both: a node's copy in RAM is made when its
// block is evicted or when a sequence that holds it is swapped out (then it is pinned until the sequence
// returns); a file is written behind, from whichever copy is nearest, and read ahead when a prompt that wants
// it is attached.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv/cache_impl.h"

namespace millrace::kv {

using Clock = std::chrono::steady_clock;

Buffer Cache::Impl::read_main(int group, int32_t block) {
  auto bytes = std::make_shared<Bytes>(pools_[group].block_bytes);
  bytes->read_from(store_, group, block);
  stats_.main.bytes_read += pools_[group].block_bytes;
  return bytes;
}

// ---------------------------------------------------------------- out of the main pool

// Whatever the policy chose, a descendant that could go instead goes first: without its parent it is lost
// anyway.
int32_t Cache::Impl::choose_victim(int group, int32_t shelf) {
  constexpr int kChildrenAsked = 8;
  const Pool& pool = pools_[group];
  Evictor& evictor = pools_[group].shelves[static_cast<size_t>(shelf)].evictor;
  int32_t victim = evictor.choose();
  if (victim == kNoBlock || pool.window > 0) return victim;
  for (bool deeper = true; deeper;) {
    deeper = false;
    int32_t child = index_[pool.blocks[victim].node].first_child;
    for (int i = 0; i < kChildrenAsked && child != kNoNode && !deeper;
         ++i, child = index_[child].next_sibling) {
      const int32_t block = index_[child].copies[group].block;
      if (block == kNoBlock || !evictor.contains(block)) continue;
      victim = block;
      deeper = true;
    }
  }
  return victim;
}

void Cache::Impl::demote(int group, int32_t block) {
  Pool& pool = pools_[group];
  try {
    keep_copy(group, block);
  } catch (const std::bad_alloc&) {
    ++stats_.writes_dropped;  // forgotten: nobody waits for a memory
  }
  Pool::Shelf& shelf = pool.shelf(block);
  shelf.evictor.remove(block);
  const Node& node = index_[pool.blocks[block].node];
  shelf.evictor.evicted(node.key, node.uses);
  ++stats_.main.evictions;
  unname(group, block);
  shelf.free.push_back(block);
}

// One tier down.
void Cache::Impl::keep_copy(int group, int32_t block) {
  const Pool& pool = pools_[group];
  const int32_t node = pool.blocks[block].node;
  const Copy& copy = index_[node].copies[group];
  if (copy.ram != nullptr || (pool.window > 0 && !copy.keep)) return;
  if (make_ram_space(pool.block_bytes)) {
    put_ram(node, group, read_main(group, block));
  } else if (disk_on() && copy.disk_bytes == 0 && !copy.writing) {
    if (!may_stage() || !submit_write(node, group, read_main(group, block))) ++stats_.writes_dropped;
  }
}

int32_t Cache::Impl::evict(int group, int32_t count) {
  int32_t evicted = 0;
  for (int32_t s = 0; s < pools_[group].num_shelves(); ++s) {
    const Evictor& evictor = pools_[group].shelves[static_cast<size_t>(s)].evictor;
    for (; evicted < count && evictor.size() > 0; ++evicted) demote(group, choose_victim(group, s));
  }
  return evicted;
}

void Cache::Impl::forget_main() {
  while (disk_ != nullptr && reads_pending_ > 0) {
    disk_->wait(std::chrono::milliseconds(100));
    take_done();
  }
  for (int g = 0; g < num_groups(); ++g) {
    Pool& pool = pools_[g];
    for (int32_t block = 0; block < std::ssize(pool.blocks); ++block) {
      MILLRACE_CHECK(pool.blocks[block].refs == 0);
      if (pool.blocks[block].node == kNoNode) continue;
      pool.shelf(block).evictor.remove(block);
      unname(g, block);
      pool.shelf(block).free.push_back(block);
    }
  }
}

// ---------------------------------------------------------------- the RAM tier

bool Cache::Impl::make_ram_space(size_t bytes) {
  if (ram_used_ - ram_unpinned_ + bytes > options_.ram_bytes) return false;
  while (ram_used_ + bytes > options_.ram_bytes) {
    const int32_t item = ram_order_.top();
    ++stats_.ram.evictions;
    drop_ram(item / kMaxKvGroups, item % kMaxKvGroups);
  }
  return true;
}

void Cache::Impl::put_ram(int32_t node, int group, Buffer bytes) {
  ram_used_ += bytes->size();
  ram_unpinned_ += bytes->size();
  stats_.ram.bytes_written += bytes->size();
  ++ram_blocks_;
  index_[node].copies[group].ram = std::move(bytes);
  ram_order_.set(item_of(node, group), {index_[node].copies[group].last_use, 0});
}

// Not while pinned. What is nowhere else and belongs on disk gets its chance to go there.
void Cache::Impl::drop_ram(int32_t node, int group) {
  Copy& copy = index_[node].copies[group];
  const bool only_here = copy.block == kNoBlock && copy.disk_bytes == 0 && !copy.writing;
  if (only_here && disk_on() && (!may_stage() || !submit_write(node, group, copy.ram)))
    ++stats_.writes_dropped;
  ram_order_.erase(item_of(node, group));
  ram_used_ -= copy.ram->size();
  ram_unpinned_ -= copy.ram->size();
  --ram_blocks_;
  copy.ram.reset();
  index_.erase_if_unused(node);
}

void Cache::Impl::pin_ram(int32_t node, int group) {
  Copy& copy = index_[node].copies[group];
  if (copy.ram_pins++ > 0) return;
  ram_order_.erase(item_of(node, group));
  ram_unpinned_ -= copy.ram->size();
}

void Cache::Impl::unpin_ram(int32_t node, int group) {
  Copy& copy = index_[node].copies[group];
  if (--copy.ram_pins > 0) return;
  ram_order_.set(item_of(node, group), {index_[node].copies[group].last_use, 0});
  ram_unpinned_ += copy.ram->size();
}

// ---------------------------------------------------------------- swapped sequences

namespace {
double smoothed(double before, uint64_t bytes, Clock::duration time) {
  const double now = static_cast<double>(bytes) / std::max(std::chrono::duration<double>(time).count(), 1e-9);
  return before == 0 ? now : 0.7 * before + 0.3 * now;
}
}  // namespace

uint64_t Cache::Impl::bytes_to_swap(const Rep& s) const {
  uint64_t bytes = 0;
  for (int g = 0; g < num_groups(); ++g) {
    const Rep::Table& table = s.tables[g];
    for (int32_t b = table.first_held; b < blocks_for(s.length); ++b) {
      const int32_t node = pools_[g].blocks[table.blocks[b]].node;
      if (node == kNoNode || index_[node].copies[g].ram == nullptr) bytes += pools_[g].block_bytes;
    }
  }
  return bytes;
}

SwapCost Cache::Impl::swap_cost(const Rep& s) const {
  SwapCost cost;
  if (s.state != Sequence::State::kActive) return cost;
  cost.bytes = bytes_to_swap(s);
  uint64_t all = 0;
  for (int g = 0; g < num_groups(); ++g) {
    all += static_cast<uint64_t>(blocks_for(s.length) - s.tables[g].first_held) * pools_[g].block_bytes;
  }
  if (stats_.swap_out_rate > 0) cost.out_seconds = static_cast<double>(cost.bytes) / stats_.swap_out_rate;
  if (stats_.swap_in_rate > 0) cost.in_seconds = static_cast<double>(all) / stats_.swap_in_rate;
  // What it shares with the RAM tier already is pinned, and no longer room that could be made.
  cost.fits = ram_used_ - ram_unpinned_ + all <= options_.ram_bytes;
  return cost;
}

void Cache::Impl::copy_out(Rep& s, int32_t blocks) {
  // Pin first: making room must not drop what is there already.
  for (int g = 0; g < num_groups(); ++g) {
    const Rep::Table& table = s.tables[g];
    for (int32_t b = table.first_held; b < blocks; ++b) {
      const int32_t node = pools_[g].blocks[table.blocks[b]].node;
      const bool in_ram = node != kNoNode && index_[node].copies[g].ram != nullptr;
      s.swapped[g].push_back({node, nullptr, in_ram});
      if (in_ram) pin_ram(node, g);
    }
  }
  for (int g = 0; g < num_groups(); ++g) {
    const Rep::Table& table = s.tables[g];
    for (int32_t b = table.first_held; b < blocks; ++b) {
      Rep::Swapped& to = s.swapped[g][b - table.first_held];
      if (to.done) continue;
      MILLRACE_CHECK(make_ram_space(pools_[g].block_bytes));
      Buffer bytes = read_main(g, table.blocks[b]);
      if (to.node != kNoNode) {
        put_ram(to.node, g, std::move(bytes));
        pin_ram(to.node, g);
      } else {
        ram_used_ += pools_[g].block_bytes;
        swapped_bytes_ += pools_[g].block_bytes;
        to.bytes = std::move(bytes);
      }
      to.done = true;
    }
  }
}

bool Cache::Impl::swap_out(Rep& s) {
  MILLRACE_CHECK(s.state == Sequence::State::kActive);
  const SwapCost cost = swap_cost(s);
  if (!cost.fits) return false;
  const int32_t blocks = blocks_for(s.length);
  const auto start = Clock::now();
  try {
    copy_out(s, blocks);
  } catch (...) {
    forget_swapped(s);
    throw;
  }
  if (cost.bytes > 0) stats_.swap_out_rate = smoothed(stats_.swap_out_rate, cost.bytes, Clock::now() - start);
  ++stats_.swaps_out;
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    for (size_t b = table.first_held; b < table.blocks.size(); ++b) {
      if (table.blocks[b] != kNoBlock) unhold(g, table.blocks[b]);
    }
    table.blocks.resize(table.first_held);
  }
  s.state = Sequence::State::kSwapped;
  return true;
}

BlockCounts Cache::Impl::blocks_to_swap_in(const Rep& s) const {
  BlockCounts needs{};
  for (int g = 0; g < num_groups(); ++g) {
    for (size_t i = 0; i < s.swapped[g].size(); ++i) {
      const Rep::Swapped& from = s.swapped[g][i];
      const Copy* copy = from.node != kNoNode ? &index_[from.node].copies[g] : nullptr;
      const bool in_main = copy != nullptr && copy->block != kNoBlock && !copy->loading;
      needs[pools_[g].count_of(s.tables[g].first_held + static_cast<int32_t>(i))] +=
          !in_main || pools_[g].blocks[copy->block].refs == 0;
    }
  }
  return needs;
}

bool Cache::Impl::swap_in(Rep& s) {
  MILLRACE_CHECK(s.state == Sequence::State::kSwapped);
  const BlockCounts needs = blocks_to_swap_in(s);
  for (int c = 0; c < counts(); ++c) {
    if (needs[c] > available(c)) return false;
  }
  for (int g = 0; g < num_groups(); ++g) {
    s.tables[g].blocks.reserve(s.tables[g].blocks.size() + s.swapped[g].size());
  }
  const auto start = Clock::now();
  uint64_t moved = 0;
  for (int g = 0; g < num_groups(); ++g) {  // first hold what is still there
    for (const Rep::Swapped& from : s.swapped[g]) {
      const Copy* copy = from.node != kNoNode ? &index_[from.node].copies[g] : nullptr;
      const bool in_main = copy != nullptr && copy->block != kNoBlock && !copy->loading;
      s.tables[g].blocks.push_back(in_main ? copy->block : kNoBlock);
      if (in_main) hold(g, copy->block);
    }
  }
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    for (size_t i = 0; i < s.swapped[g].size(); ++i) {
      int32_t& block = table.blocks[table.first_held + i];
      if (block != kNoBlock) continue;
      const Rep::Swapped& from = s.swapped[g][i];
      block = allocate(g, table.first_held + static_cast<int32_t>(i));
      store_.write(g, block, (from.node != kNoNode ? index_[from.node].copies[g].ram : from.bytes)->span());
      moved += pools_[g].block_bytes;
      if (from.node == kNoNode || index_[from.node].copies[g].block != kNoBlock) continue;
      index_[from.node].copies[g].block = block;
      pools_[g].blocks[block].node = from.node;
    }
  }
  if (moved > 0) stats_.swap_in_rate = smoothed(stats_.swap_in_rate, moved, Clock::now() - start);
  stats_.ram.bytes_read += moved;
  ++stats_.swaps_in;
  forget_swapped(s);
  s.state = Sequence::State::kActive;
  return true;
}

void Cache::Impl::forget_swapped(Rep& s) noexcept {
  for (int g = 0; g < num_groups(); ++g) {
    for (const Rep::Swapped& from : s.swapped[g]) {
      if (!from.done) continue;
      if (from.node != kNoNode) {
        unpin_ram(from.node, g);
      } else {
        ram_used_ -= pools_[g].block_bytes;
        swapped_bytes_ -= pools_[g].block_bytes;
      }
    }
    s.swapped[g].clear();
  }
}

// ---------------------------------------------------------------- the disk tier

void Cache::Impl::open_disk() {
  disk_ = std::make_unique<DiskTier>(DiskTier::Options{
      .directory = options_.disk_directory,
      .element_bytes = options_.element_bytes,
      .compression = options_.compression,
      .files = options_.files != nullptr ? options_.files : &real_file_system(),
      .log = options_.log,
      .wake = options_.wake,
  });
  for (const DiskTier::Found& found : disk_->take_found()) {
    const int32_t node = add_node(found.key);
    index_[node].index = found.index;
    index_[node].copies[found.group].last_use = ++tick_;
    index_[node].copies[found.group].disk_bytes = found.bytes;
    disk_order_.set(item_of(node, found.group), {tick_, 0});
    disk_used_ += found.bytes;
    ++disk_blocks_;
    if (found.group == 0) unread_[found.index].push_back(found.key);  // other groups' say the same
  }
  while (disk_used_ > options_.disk_bytes) {
    const int32_t item = disk_order_.top();
    drop_file(item / kMaxKvGroups, item % kMaxKvGroups, true);
  }
}

BlockLabel Cache::Impl::label_of(int32_t id, int group) const {
  const Node& node = index_[id];
  return {node.key, node.parent_key, group, node.index, node.tokens, pools_[group].block_bytes};
}

// Without memory for the queue the block stays off the disk.
void Cache::Impl::mark_dirty(int32_t node, int group) noexcept {
  Copy& copy = index_[node].copies[group];
  if (!disk_on() || copy.disk_bytes > 0 || copy.writing || copy.dirty) return;
  try {
    dirty_.push_back(item_of(node, group));
    copy.dirty = true;
  } catch (const std::bad_alloc&) {
    ++stats_.writes_dropped;
  }
}

// Space on disk is set aside for the block as it is; compression gives some back afterwards.
bool Cache::Impl::submit_write(int32_t node, int group, Buffer bytes) {
  const uint64_t max_bytes = kFileHeaderBytes + bytes->size();
  while (disk_used_ + max_bytes > options_.disk_bytes && !disk_order_.empty()) {
    const int32_t item = disk_order_.top();
    ++stats_.disk.evictions;
    drop_file(item / kMaxKvGroups, item % kMaxKvGroups, true);
  }
  if (disk_used_ + max_bytes > options_.disk_bytes) return false;
  const size_t size = bytes->span().size();  // all there, before another thread looks at them
  disk_->write(item_of(node, group), label_of(node, group), std::move(bytes));  // may throw
  disk_used_ += max_bytes;
  disk_->set_short_of_space(disk_used_ > options_.disk_bytes / 2);
  staged_bytes_ += size;
  ++writes_pending_;
  index_[node].copies[group].writing = true;
  return true;
}

void Cache::Impl::finish_write(const DiskTier::Done& done) {
  const int32_t id = done.item / kMaxKvGroups;
  const int group = done.item % kMaxKvGroups;
  Copy& copy = index_[id].copies[group];
  --writes_pending_;
  staged_bytes_ -= pools_[group].block_bytes;
  disk_used_ -= kFileHeaderBytes + pools_[group].block_bytes;
  copy.writing = false;
  if (done.ok && disk_on()) {
    copy.disk_bytes = done.stored_bytes;
    disk_used_ += done.stored_bytes;
    ++disk_blocks_;
    stats_.disk.bytes_written += done.stored_bytes;
    // A prompt may have been attached meanwhile; a block that is being read has a file already, so it is not
    // this one.
    disk_order_.set(done.item, {copy.last_use, 0});
  }
  index_.erase_if_unused(id);
}

// The order and the accounts forget a file; `remove` when it is still there.
void Cache::Impl::drop_file(int32_t node, int group, bool remove) {
  Copy& copy = index_[node].copies[group];
  if (remove) disk_->remove(index_[node].key, group, index_[node].index);
  disk_order_.erase(item_of(node, group));
  disk_used_ -= copy.disk_bytes;
  copy.disk_bytes = 0;
  --disk_blocks_;
  index_.erase_if_unused(node);
}

void Cache::Impl::finish_read(const DiskTier::Done& done) {
  const int32_t id = done.item / kMaxKvGroups;
  const int group = done.item % kMaxKvGroups;
  Pool& pool = pools_[group];
  Copy& copy = index_[id].copies[group];
  const int32_t block = copy.block;
  --pool.loading;
  --reads_pending_;
  copy.loading = false;
  if (done.ok) {
    store_.write(group, block, done.bytes->span());
    if (copy.disk_bytes > 0) disk_order_.set(done.item, {copy.last_use, 0});
    copy.keep = true;
    if (pool.blocks[block].refs == 0) pool.shelf(block).evictor.add(block, copy.last_use, index_[id].uses);
    return;
  }
  // Those who hold the block see that it has no node any longer: ready().
  if (pool.blocks[block].refs == 0) pool.shelf(block).free.push_back(block);
  pool.blocks[block].node = kNoNode;
  copy.block = kNoBlock;
  if (copy.disk_bytes > 0)
    drop_file(id, group, false);
  else
    index_.erase_if_unused(id);
}

void Cache::Impl::finish_header(const DiskTier::Done& done) {
  ++headers_read_;
  if (!done.ok) return;
  const BlockLabel& label = *done.label;
  const int32_t node = index_.find(label.key);
  if (node != kNoNode) index_.describe(node, label.parent, index_[node].index, label.tokens);
}

void Cache::Impl::feed_writer() {
  constexpr int kMaxPerPoll = 64;  // a step does not wait for more copies than this
  for (int i = 0; i < kMaxPerPoll && !dirty_.empty() && may_stage(); ++i) {
    const int32_t node = dirty_.front() / kMaxKvGroups;
    const int group = dirty_.front() % kMaxKvGroups;
    // Writes under way may turn out smaller than the room set aside for them: wait rather than forget.
    const uint64_t max_bytes = kFileHeaderBytes + pools_[group].block_bytes;
    if (writes_pending_ > 0 && disk_used_ + max_bytes > options_.disk_bytes) return;
    dirty_.pop_front();
    Copy& copy = index_[node].copies[group];
    copy.dirty = false;
    if (copy.disk_bytes == 0 && !copy.writing && !copy.loading) {
      try {
        Buffer bytes = copy.ram;
        if (bytes == nullptr && copy.block != kNoBlock) bytes = read_main(group, copy.block);
        if (bytes != nullptr && !submit_write(node, group, std::move(bytes))) ++stats_.writes_dropped;
      } catch (const std::bad_alloc&) {
        ++stats_.writes_dropped;
      }
    }
    index_.erase_if_unused(node);
  }
}

void Cache::Impl::turn_disk_off() {
  disk_off_ = true;
  dirty_.clear();
  for (int32_t id = 0; id < index_.size(); ++id) {
    for (int g = 0; g < kMaxKvGroups && index_[id].used; ++g) {
      index_[id].copies[g].dirty = false;
      if (index_[id].copies[g].disk_bytes > 0)
        drop_file(id, g, false);
      else if (index_[id].used)
        index_.erase_if_unused(id);
    }
  }
}

void Cache::Impl::take_done() {
  done_.clear();
  disk_->take(done_);
  for (const DiskTier::Done& done : done_) {
    done.is_write ? finish_write(done) : done.is_header ? finish_header(done) : finish_read(done);
  }
  done_.clear();
  if (!disk_off_ && !disk_->on()) turn_disk_off();
}

void Cache::Impl::poll() {
  if (disk_ == nullptr) return;
  take_done();
  feed_writer();
}

void Cache::Impl::wait(std::chrono::milliseconds at_most) {
  const bool busy = writes_pending_ + reads_pending_ > 0 || headers_read_ < headers_asked_;
  if (disk_ != nullptr && busy) disk_->wait(at_most);
  poll();
}

void Cache::Impl::flush() {
  poll();
  while (disk_on() && (!dirty_.empty() || writes_pending_ > 0)) wait(std::chrono::milliseconds(100));
}

}  // namespace millrace::kv
