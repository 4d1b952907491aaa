// Blocks of the main pool, and sequences that hold, fill and share them.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv/cache_impl.h"

namespace millrace::kv {

// What is short of memory on the way out of the pool is forgotten: only the store's errors pass through, and
// then nothing is changed.
int32_t Cache::Impl::allocate(int group, int32_t index) {
  Pool& pool = pools_[group];
  const int32_t shelf = shelf_of(index, pool.num_shelves());
  std::vector<int32_t>& free = pool.shelves[static_cast<size_t>(shelf)].free;
  if (free.empty()) {
    const int32_t victim = choose_victim(group, shelf);
    MILLRACE_CHECK(victim != kNoBlock);
    demote(group, victim);
  }
  const int32_t block = free.back();
  free.pop_back();
  pool.blocks[block].refs = 1;
  return block;
}

void Cache::Impl::give_back(int group, int32_t block) noexcept {
  pools_[group].blocks[block].refs = 0;
  pools_[group].shelf(block).free.push_back(block);
}

// A node and a place for it in every order, so that nothing that is done with it later allocates.
int32_t Cache::Impl::add_node(const BlockKey& key) {
  const int32_t node = index_.find_or_add(key);
  try {
    const int32_t items = index_.size() * kMaxKvGroups;
    if (options_.ram_bytes > 0) ram_order_.reserve(items);
    if (disk_ != nullptr) disk_order_.reserve(items);
  } catch (...) {
    index_.erase_if_unused(node);
    throw;
  }
  return node;
}

void Cache::Impl::hold(int group, int32_t block) {
  Pool& pool = pools_[group];
  if (pool.blocks[block].refs++ == 0) pool.shelf(block).evictor.remove(block);
}

void Cache::Impl::unhold(int group, int32_t block) {
  Pool& pool = pools_[group];
  MILLRACE_CHECK(pool.blocks[block].refs > 0);
  if (--pool.blocks[block].refs > 0) return;
  const int32_t node = pool.blocks[block].node;
  if (node == kNoNode) {
    pool.shelf(block).free.push_back(block);
  } else if (!index_[node].copies[group].loading) {
    pool.shelf(block).evictor.add(block, index_[node].copies[group].last_use, index_[node].uses);
  }
}

// As unhold, but what no boundary wants is not worth remembering.
void Cache::Impl::leave_window(int group, int32_t block) {
  const Pool::Block& b = pools_[group].blocks[block];
  if (b.refs == 1 && b.node != kNoNode && !index_[b.node].copies[group].keep) unname(group, block);
  unhold(group, block);
}

// What no token behind the sequence's length sees.
void Cache::Impl::leave_windows(Rep& s) {
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    const int32_t first = std::min(first_seen(g, s.length), static_cast<int32_t>(table.blocks.size()));
    for (; table.first_held < first; ++table.first_held) {
      if (table.blocks[table.first_held] == kNoBlock) continue;
      leave_window(g, std::exchange(table.blocks[table.first_held], kNoBlock));
    }
  }
}

void Cache::Impl::unname(int group, int32_t block) {
  const int32_t node = std::exchange(pools_[group].blocks[block].node, kNoNode);
  index_[node].copies[group].block = kNoBlock;
  index_.erase_if_unused(node);
}

void Cache::Impl::touch(int32_t id, uint64_t uses, int32_t length) {
  Node& node = index_[id];
  ++tick_;
  node.uses += uses;
  for (int g = 0; g < num_groups(); ++g) {
    if (node.index < first_seen(g, length)) continue;
    node.copies[g].last_use = tick_;
    const int32_t item = item_of(id, g);
    if (ram_order_.contains(item)) ram_order_.set(item, {tick_, 0});
    if (disk_order_.contains(item)) disk_order_.set(item, {tick_, 0});
  }
}

int32_t Cache::Impl::available(int count) const {
  const auto [group, at] = places_[static_cast<size_t>(count)];
  const Pool::Shelf& shelf = pools_[group].shelves[static_cast<size_t>(at)];
  return static_cast<int32_t>(shelf.free.size()) + shelf.evictor.size();
}

int32_t Cache::Impl::first_seen(int group, int32_t position) const {
  const int32_t window = pools_[group].window;
  return window == 0 ? 0 : std::max(0, position - window + 1) / kBlockTokens;
}

// ---------------------------------------------------------------- sequences

Cache::Impl::Rep* Cache::Impl::new_rep() {
  if (spare_.empty()) {
    auto made = std::make_unique<Rep>();
    for (int g = 0; g < num_groups(); ++g) {
      made->tables[g].blocks.reserve(blocks_for(options_.table_tokens));
    }
    // Room for all there are: giving one back happens in a destructor and must not allocate.
    constexpr size_t kFirst = 16;
    const size_t all = sequences_.size() + 1;
    if (spare_.capacity() < all) spare_.reserve(std::max(kFirst, 2 * all));
    spare_.push_back(std::move(made));
  }
  sequences_.push_back(spare_.back().get());  // may throw; then it is still spare
  Rep* s = spare_.back().release();
  spare_.pop_back();
  s->owner = this;
  s->place = sequences_.size() - 1;
  return s;
}

Sequence Cache::Impl::make_sequence(std::string_view salt, std::string_view variant) {
  Rep* s = new_rep();
  s->key = root_key(identity_, salt, variant);
  return Sequence(s);
}

// What drafts may reach is taken as a whole: any of them may be the last that counts.
bool Cache::Impl::is_taken(const Rep& s, int group, int32_t index, int32_t wanted) const {
  constexpr int32_t kDense = 6;  // blocks: 64 drafts and the token before them
  const Pool& pool = pools_[group];
  if (!pool.sparse) return true;
  const int32_t current = s.length / kBlockTokens;
  const int32_t seen = blocks_for(pool.window);  // at the end of the step
  return wanted - current <= kDense || index <= current || index >= wanted - seen || is_kept(s, group, index);
}

BlockCounts Cache::Impl::blocks_to_reserve(const Rep& s, int32_t tokens) const {
  BlockCounts needs{};
  if (tokens <= 0) return needs;
  const int32_t wanted = blocks_for(static_cast<int64_t>(s.length) + tokens),
                partial = s.length / kBlockTokens;
  for (int g = 0; g < num_groups(); ++g) {
    const auto held = static_cast<int32_t>(s.tables[g].blocks.size());
    const Pool& pool = pools_[g];
    const int count = pool.first_count;
    if (pool.sparse) {
      for (int32_t b = partial; b < wanted; ++b) {
        const bool there = b < held && s.tables[g].blocks[b] != kNoBlock;
        needs[count] += !there && is_taken(s, g, b, wanted);
      }
    } else {
      for (int32_t shelf = 0; wanted > held && shelf < pool.num_shelves(); ++shelf) {
        needs[count + shelf] = blocks_on_shelf(wanted, shelf, pool.num_shelves()) -
                               blocks_on_shelf(held, shelf, pool.num_shelves());
      }
    }
    if (s.length % kBlockTokens != 0 && pool.blocks[s.tables[g].blocks[partial]].refs > 1)
      ++needs[pool.count_of(partial)];
  }
  return needs;
}

bool Cache::Impl::reserve(Rep& s, int32_t tokens) {
  MILLRACE_CHECK(s.state == Sequence::State::kActive);
  const BlockCounts needs = blocks_to_reserve(s, tokens);
  for (int c = 0; c < counts(); ++c) {
    if (needs[c] > available(c)) return false;
  }
  const int32_t wanted = blocks_for(static_cast<int64_t>(s.length) + tokens);
  // Before any block is taken, so that nothing has changed when there is no memory; seldom, so that decoding
  // allocates nothing.
  for (int g = 0; g < num_groups(); ++g) {
    constexpr size_t kFirst = 64;
    std::vector<int32_t>& table = s.tables[g].blocks;
    if (const auto size = static_cast<size_t>(wanted); table.capacity() < size) {
      table.reserve(std::max({size, 2 * table.capacity(), kFirst}));
    }
  }
  for (int g = 0; g < num_groups(); ++g) {
    // None at all: the last block is always taken, so the table is long enough.
    const auto first = needs.begin() + pools_[g].first_count;
    if (std::all_of(first, first + pools_[g].num_shelves(), [](int32_t n) { return n == 0; })) continue;
    std::vector<int32_t>& table = s.tables[g].blocks;
    if (s.length % kBlockTokens != 0) {
      int32_t& partial = table[s.length / kBlockTokens];
      if (pools_[g].blocks[partial].refs > 1) {
        const int32_t copy = allocate(g, s.length / kBlockTokens);
        try {
          store_.copy(g, partial, copy);
        } catch (...) {
          give_back(g, copy);
          throw;
        }
        unhold(g, std::exchange(partial, copy));
        ++stats_.copies_on_write;
      }
    }
    for (int32_t b = s.length / kBlockTokens; b < wanted; ++b) {
      const bool take = is_taken(s, g, b, wanted);
      if (b == static_cast<int32_t>(table.size())) {
        table.push_back(take ? allocate(g, b) : kNoBlock);
      } else if (take && table[b] == kNoBlock) {
        table[b] = allocate(g, b);
      }
    }
  }
  return true;
}

void Cache::Impl::advance(Rep& s, std::span<const int32_t> tokens) {
  MILLRACE_CHECK(s.state == Sequence::State::kActive);
  const int32_t final_length = s.length + static_cast<int32_t>(tokens.size());
  MILLRACE_CHECK(blocks_for(final_length) <= static_cast<int32_t>(s.tables[0].blocks.size()));
  if (options_.prefix_cache) {
    for (const int32_t token : tokens) {
      s.tail[s.length % kBlockTokens] = token;
      if (++s.length % kBlockTokens == 0) commit(s, s.length / kBlockTokens - 1, final_length);
    }
  }
  s.length = final_length;
  leave_windows(s);
}

// A full block gets its name. If that is known already, the sequence takes the known block and gives up its
// own.
void Cache::Impl::commit(Rep& s, int32_t index, int32_t final_length) {
  const BlockKey key = child_key(s.key, s.tail);
  const int32_t node = add_node(key);  // may throw: nothing is changed
  const BlockKey parent = std::exchange(s.key, key);
  index_.describe(node, parent, index, s.tail);
  // Computed again although it was there (a window's tail was not): somebody did find it.
  bool again = false;
  for (int g = 0; g < num_groups(); ++g) again |= index_[node].copies[g].block != kNoBlock;
  touch(node, again ? 1 : 0, final_length);
  for (int g = 0; g < num_groups(); ++g) {
    const bool keep = is_kept(s, g, index);
    if (!keep && index < first_seen(g, final_length)) continue;  // nobody will ask for it
    int32_t& mine = s.tables[g].blocks[index];
    if (mine == kNoBlock) continue;
    Copy& copy = index_[node].copies[g];
    if (copy.block == kNoBlock) {
      copy.block = mine;
      copy.last_use = tick_;
      pools_[g].blocks[mine].node = node;
      pools_[g].shelf(mine).evictor.returned(s.key);
    } else if (!copy.loading) {
      hold(g, copy.block);
      unhold(g, std::exchange(mine, copy.block));
      ++stats_.deduplicated;
    }
    if (keep) {
      copy.keep = true;
      mark_dirty(node, g);
    }
  }
  index_.erase_if_unused(node);
}

// Is the block in the tail that resuming at some boundary needs?
bool Cache::Impl::is_kept(const Rep& s, int group, int32_t index) const {
  const Pool& pool = pools_[group];
  if (pool.window == 0) return true;
  const auto in_tail_of = [&](int32_t boundary) {
    return index < boundary && index >= boundary - pool.tail_blocks;
  };
  const int32_t every = pool.boundary_blocks;
  return in_tail_of(s.prompt_blocks) || in_tail_of(s.branch_blocks) ||
         in_tail_of((index / every + 1) * every);
}

Sequence Cache::Impl::fork(const Rep& s) {
  MILLRACE_CHECK(s.state == Sequence::State::kActive);
  Rep* copy = new_rep();
  Sequence forked(copy);
  for (int g = 0; g < num_groups(); ++g) copy->tables[g].blocks.reserve(s.tables[g].blocks.size());
  copy->length = s.length;
  copy->cached = s.cached;
  copy->key = s.key;
  copy->tail = s.tail;
  copy->prompt_blocks = s.prompt_blocks;
  copy->branch_blocks = s.branch_blocks;
  for (int g = 0; g < num_groups(); ++g) {
    const Rep::Table& from = s.tables[g];
    const int32_t count = blocks_for(s.length);  // what is reserved beyond stays its own
    copy->tables[g].blocks.assign(from.blocks.begin(), from.blocks.begin() + count);
    copy->tables[g].first_held = from.first_held;
    for (int32_t b = from.first_held; b < count; ++b) hold(g, from.blocks[b]);
  }
  return forked;
}

BlockCounts Cache::Impl::blocks_of_its_own(const Rep& s) const {
  BlockCounts counts{};
  for (int g = 0; g < num_groups(); ++g) {
    const auto count_of = [&pool = pools_[g]](int32_t block) {
      return pool.first_count + block % pool.num_shelves();
    };
    for (const int32_t block : s.tables[g].blocks) {
      if (block == kNoBlock) continue;
      const Pool::Block& b = pools_[g].blocks[block];
      counts[count_of(block)] += b.refs == 1 && (b.node == kNoNode || !index_[b.node].copies[g].loading);
    }
    if (s.sources[g] == kNoBlock) continue;
    const Pool::Block& b = pools_[g].blocks[s.sources[g]];
    counts[count_of(s.sources[g])] += b.refs == 1 && (b.node == kNoNode || !index_[b.node].copies[g].loading);
  }
  return counts;
}

// The end of a sequence is where the next turn of a conversation resumes.
void Cache::Impl::remember_tail(Rep& s) {
  // Tables differ in length when the store failed in the middle of reserve().
  size_t blocks = s.tables[0].blocks.size();
  for (int g = 1; g < num_groups(); ++g) blocks = std::min(blocks, s.tables[g].blocks.size());
  for (int32_t b = static_cast<int32_t>(blocks) - 1; b >= 0; --b) {
    bool touched = false;
    for (int g = 0; g < num_groups(); ++g) {
      const int32_t block = s.tables[g].blocks[b];
      const int32_t node = block == kNoBlock ? kNoNode : pools_[g].blocks[block].node;
      if (node == kNoNode) continue;
      if (!std::exchange(touched, true)) touch(node, 0, s.length);
      index_[node].copies[g].keep = true;
      mark_dirty(node, g);
    }
  }
}

void Cache::Impl::drop_blocks(Rep& s) {
  for (int g = 0; g < num_groups(); ++g) {
    for (const int32_t block : s.tables[g].blocks) {
      if (block != kNoBlock) unhold(g, block);
    }
    s.tables[g].blocks.clear();
    s.tables[g].first_held = 0;
    if (s.sources[g] != kNoBlock) unhold(g, std::exchange(s.sources[g], kNoBlock));
    s.ram_sources[g].reset();
  }
  s.loads.clear();
  s.length = s.cached = 0;
}

void Cache::Impl::release(Rep* s) noexcept {
  if (s->state == Sequence::State::kActive) remember_tail(*s);
  if (s->state == Sequence::State::kSwapped) forget_swapped(*s);
  drop_blocks(*s);
  sequences_.back()->place = s->place;
  std::swap(sequences_[s->place], sequences_.back());
  sequences_.pop_back();
  s->state = Sequence::State::kActive;
  s->prompt_blocks = s->branch_blocks = 0;
  s->prompt.reset();
  spare_.emplace_back(s);
}

}  // namespace millrace::kv
