// Looking a prompt up, and taking what was found.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv/cache_impl.h"

namespace millrace::kv {

// ---------------------------------------------------------------- looking up

std::shared_ptr<const Prompt> Cache::Impl::make_prompt(std::span<const int32_t> tokens, std::string_view salt,
                                                       std::string_view variant) const {
  auto prompt = std::make_shared<Prompt>();
  prompt->tokens.assign(tokens.begin(), tokens.end());
  prompt->root = root_key(identity_, salt, variant);
  if (!options_.prefix_cache) return prompt;
  const BlockKey* parent = &prompt->root;
  prompt->keys.reserve(tokens.size() / kBlockTokens);
  for (; tokens.size() >= kBlockTokens; tokens = tokens.subspan(kBlockTokens)) {
    prompt->keys.push_back(child_key(*parent, tokens.first(kBlockTokens)));
    parent = &prompt->keys.back();
  }
  return prompt;
}

// The last block that a hit of `blocks` blocks needs to go on at this position and nobody has; -1 when it has
// all.
int32_t Cache::Impl::missing_block(int32_t blocks, int32_t position) const {
  int32_t missing = -1;
  for (int g = 0; g < num_groups(); ++g) {
    if (pools_[g].window == 0) continue;
    for (int32_t b = blocks - 1; b >= first_seen(g, position) && b > missing; --b) {
      if (path_[b] == kNoNode || !index_[path_[b]].copies[g].anywhere()) missing = b;
    }
  }
  return missing;
}

int32_t Cache::Impl::usable_blocks(int32_t max) const {
  int32_t n = max;
  // Any boundary behind a missing block that is nearer than the window needs it too: go on before it.
  for (int32_t missing = 0; n > 0 && missing >= 0;) {
    missing = missing_block(n, n * kBlockTokens);
    if (missing >= 0) n = missing;
  }
  return n;
}

BlockCounts Cache::Impl::taken_by(int32_t blocks, int32_t position) const {
  BlockCounts takes{};
  for (int g = 0; g < num_groups(); ++g) {
    for (int32_t b = first_seen(g, position); b < blocks; ++b) {
      const Copy& copy = index_[path_[b]].copies[g];
      takes[pools_[g].count_of(b)] +=
          copy.block == kNoBlock || (!copy.loading && pools_[g].blocks[copy.block].refs == 0);
    }
  }
  return takes;
}

Cache::Impl::Hit Cache::Impl::find(const Prompt& prompt) const {
  Hit hit;
  path_.clear();
  for (const BlockKey& key : prompt.keys) {
    const int32_t node = index_.find(key);
    bool whole = node != kNoNode;
    for (int g = 0; whole && g < num_groups(); ++g) {
      whole = pools_[g].window > 0 || index_[node].copies[g].anywhere();
    }
    if (!whole && has_full_group_) break;
    path_.push_back(whole ? node : kNoNode);
  }
  if (path_.empty()) return hit;
  // The last token is always left to compute: its logits are wanted.
  const auto max_blocks = static_cast<int32_t>(prompt.tokens.size() - 1) / kBlockTokens;
  hit.blocks = hit.branch = std::min(static_cast<int32_t>(path_.size()), max_blocks);
  if (find_partial(prompt, hit)) return hit;
  hit.blocks = usable_blocks(hit.branch);
  while (true) {
    hit.takes = taken_by(hit.blocks, hit.tokens());
    int32_t excess = 0;
    for (int c = 0; c < counts(); ++c) excess = std::max(excess, hit.takes[c] - available(c));
    if (excess == 0) return hit;
    hit.blocks = usable_blocks(std::max(0, hit.blocks - excess));
  }
}

bool Cache::Impl::is_whole(const Node& node) const {
  for (int g = 0; g < num_groups(); ++g) {
    if (!node.copies[g].anywhere()) return false;
  }
  return true;
}

// All blocks of the path, and of the next one the first tokens: it is copied, and its other places are
// computed. False, and nothing is changed, when there is no such block, no tail to go on from there, or no
// room.
bool Cache::Impl::find_partial(const Prompt& prompt, Hit& hit) const {
  const auto usable = [&](const Node& node) { return is_whole(node); };
  const int32_t begin = hit.blocks * kBlockTokens;
  const int32_t left = static_cast<int32_t>(prompt.tokens.size()) - 1 - begin;
  PrefixIndex::Partial partial;
  if (hit.blocks < static_cast<int32_t>(path_.size())) {  // known as a whole, but for the last token
    const int32_t node = path_[hit.blocks];
    if (node != kNoNode && usable(index_[node])) partial = {node, left};
  } else if (hit.blocks > 0 && left > 0 && path_[hit.blocks - 1] != kNoNode) {
    partial = index_.best_child(path_[hit.blocks - 1], std::span(prompt.tokens).subspan(begin, left), usable);
  }
  if (partial.tokens == 0 || missing_block(hit.blocks, begin + partial.tokens) >= 0) return false;
  BlockCounts takes = taken_by(hit.blocks, begin + partial.tokens);
  for (int g = 0; g < num_groups(); ++g) {  // the copy, and its source until it is made
    const Copy& source = index_[partial.node].copies[g];
    const int count = pools_[g].count_of(hit.blocks);
    takes[count] += 1 + (source.block == kNoBlock && source.ram == nullptr);
    const bool cached =
        source.block != kNoBlock && !source.loading && pools_[g].blocks[source.block].refs == 0;
    if (takes[count] + cached > available(count)) return false;
  }
  for (int c = 0; c < counts(); ++c) {  // of the shelves that the copy is not on
    if (takes[c] > available(c)) return false;
  }
  hit.partial = partial;
  hit.takes = takes;
  return true;
}

// The slowest tier that some group's bytes of a block come from.
TierStats& Cache::Impl::count_block(int32_t node, int32_t index, int32_t position) {
  TierStats* slowest = &stats_.main;
  for (int g = 0; g < num_groups(); ++g) {
    if (index < first_seen(g, position)) continue;
    const Copy& copy = index_[node].copies[g];
    TierStats& tier = copy.block != kNoBlock ? stats_.main : copy.ram != nullptr ? stats_.ram : stats_.disk;
    ++tier.hits;
    if (&tier == &stats_.disk || (&tier == &stats_.ram && slowest == &stats_.main)) slowest = &tier;
  }
  return *slowest;
}

Match Cache::Impl::match(const Prompt& prompt) const {
  const Hit hit = find(prompt);
  Match match{.tokens = hit.tokens(), .takes = hit.takes};
  const auto count = [&](int32_t node, int32_t index, int32_t tokens) {
    bool ram = false, disk = false;
    for (int g = 0; g < num_groups(); ++g) {
      if (index < first_seen(g, hit.tokens())) continue;
      const Copy& copy = index_[node].copies[g];
      if (copy.block != kNoBlock) continue;
      (copy.ram != nullptr ? ram : disk) = true;
    }
    if (disk) {
      match.from_disk += tokens;
    } else if (ram) {
      match.from_ram += tokens;
    }
  };
  for (int32_t b = 0; b < hit.blocks; ++b) count(path_[b], b, kBlockTokens);
  if (hit.partial.tokens > 0) count(hit.partial.node, hit.blocks, hit.partial.tokens);
  return match;
}

// ---------------------------------------------------------------- taking what was found

Sequence Cache::Impl::attach(std::shared_ptr<const Prompt> prompt) {
  Sequence sequence(new_rep());
  ++stats_.prompts;
  stats_.prompt_tokens += prompt->tokens.size();
  start(*sequence.s_, prompt);
  return sequence;
}

void Cache::Impl::start(Rep& s, const std::shared_ptr<const Prompt>& prompt) {
  const Hit hit = find(*prompt);
  const auto blocks = static_cast<size_t>(hit.blocks);
  // What follows holds and marks blocks, and does so without allocating.
  for (int g = 0; g < num_groups(); ++g) s.tables[g].blocks.reserve(blocks + 1);
  s.loads.reserve((blocks + 1) * pools_.size());
  count_hit(hit);
  s.length = s.cached = hit.tokens();
  s.key = hit.blocks > 0 ? prompt->keys[blocks - 1] : prompt->root;
  s.prompt_blocks = static_cast<int32_t>(prompt->tokens.size()) / kBlockTokens;
  s.branch_blocks = hit.branch;
  hold_found(s, *prompt, hit);
  try {
    ask_for_headers(s, *prompt, hit);
    take_path(s, hit);
    if (hit.partial.tokens > 0) take_partial(s, *prompt, hit);
  } catch (...) {
    undo_start(s, hit);
    s.key = prompt->root;
    throw;
  }
  const bool there = s.loads.empty() && s.headers_until == 0;
  s.state = there ? Sequence::State::kActive : Sequence::State::kLoading;
  s.prompt = there ? nullptr : prompt;
}

void Cache::Impl::count_hit(const Hit& hit) {
  stats_.hit_tokens += static_cast<uint64_t>(hit.tokens());
  for (int32_t b = 0; b < hit.blocks; ++b) count_block(path_[b], b, hit.tokens()).hit_tokens += kBlockTokens;
  if (hit.partial.tokens > 0) count_partial(hit);
}

void Cache::Impl::count_partial(const Hit& hit) {
  count_block(hit.partial.node, hit.blocks, hit.tokens()).hit_tokens +=
      static_cast<uint64_t>(hit.partial.tokens);
}

// A block of the main pool is in its place, one on disk marked as loading without a place. False, and nothing
// is done, for a block in RAM.
bool Cache::Impl::hold_copy(Rep& s, int32_t node, int group, int32_t index, int32_t& place) {
  Copy& copy = index_[node].copies[group];
  if (copy.block != kNoBlock) {
    hold(group, place = copy.block);
    if (copy.loading) s.loads.push_back({group, index});
  } else if (copy.ram != nullptr) {
    return false;
  } else {
    copy.loading = true;
    disk_order_.erase(item_of(node, group));
  }
  return true;
}

void Cache::Impl::hold_partial(Rep& s, const Hit& hit) {
  touch(hit.partial.node, 1, hit.tokens());
  for (int g = 0; g < num_groups(); ++g) {
    // The bytes are all that is wanted of a copy in RAM: it may leave meanwhile.
    if (!hold_copy(s, hit.partial.node, g, kNoBlock, s.sources[g]))
      s.ram_sources[g] = index_[hit.partial.node].copies[g].ram;
  }
}

// Everything that is wanted is made safe, before room is made for what has to come from elsewhere. Blocks of
// the main pool are in the table, blocks in RAM pinned, blocks on disk marked as loading without a place.
void Cache::Impl::hold_found(Rep& s, const Prompt& prompt, const Hit& hit) {
  if (hit.partial.tokens > 0) hold_partial(s, hit);
  // Parents last: they are to leave after their children. A partial block that is known as a whole is on the
  // path too; others have been described before.
  const int32_t last = hit.blocks < static_cast<int32_t>(path_.size()) ? hit.blocks : hit.blocks - 1;
  for (int32_t b = last; b >= 0; --b) {
    if (path_[b] == kNoNode || (b == hit.blocks && hit.partial.node != path_[b])) continue;
    const BlockKey& parent = b > 0 ? prompt.keys[b - 1] : prompt.root;
    index_.describe(path_[b], parent, b, std::span(prompt.tokens).subspan(b * kBlockTokens, kBlockTokens));
    touch(path_[b], 1, hit.tokens());
  }
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    table.blocks.assign(hit.blocks, kNoBlock);
    table.first_held = first_seen(g, hit.tokens());
    for (int32_t b = table.first_held; b < hit.blocks; ++b) {
      if (!hold_copy(s, path_[b], g, b, table.blocks[b])) pin_ram(path_[b], g);
    }
  }
}

// Where the path ends and nothing that is known begins as the prompt goes on, a file that was found at the
// start may. Their headers say so; the newest are asked for, once, and ready() goes on from there.
void Cache::Impl::ask_for_headers(Rep& s, const Prompt& prompt, const Hit& hit) {
  constexpr int kMostHeaders = 64;  // 15 tokens are not worth more
  s.headers_until = 0;
  const bool ends = hit.blocks > 0 && hit.blocks == static_cast<int32_t>(path_.size()) &&
                    path_.back() != kNoNode && hit.partial.tokens == 0;
  if (!disk_on() || !ends || std::ssize(prompt.tokens) - 1 <= hit.tokens()) return;
  const auto files = unread_.find(hit.blocks);
  for (int asked = 0; files != unread_.end() && !files->second.empty() && asked < kMostHeaders;
       files->second.pop_back()) {
    const int32_t id = index_.find(files->second.back());
    if (id == kNoNode || index_[id].known || !is_whole(index_[id])) continue;
    disk_->read_header(index_[id].key, 0, hit.blocks);
    ++headers_asked_;
    ++asked;
  }
  if (headers_read_ < headers_asked_) s.headers_until = headers_asked_;
}

// The headers are there: if one of them goes on as the prompt does, the block's first tokens are taken too.
// False when there is none.
bool Cache::Impl::extend(Rep& s) {
  s.headers_until = 0;
  const Hit hit = find(*s.prompt);
  if (hit.partial.tokens == 0 || hit.blocks * kBlockTokens != s.length) return false;
  count_partial(hit);
  stats_.hit_tokens += static_cast<uint64_t>(hit.partial.tokens);
  hold_partial(s, hit);
  try {
    take_partial(s, *s.prompt, hit);
  } catch (...) {
    undo_start(s, hit);
    s.key = s.prompt->root;
    throw;
  }
  s.length = s.cached = hit.tokens();
  leave_windows(s);
  return true;
}

// The block is the node's own from here on.
void Cache::Impl::fill_from_ram(int32_t node, int group, int32_t block) {
  Copy& copy = index_[node].copies[group];
  store_.write(group, block, copy.ram->span());
  stats_.ram.bytes_read += pools_[group].block_bytes;
  copy.block = block;
  pools_[group].blocks[block].node = node;
  pools_[group].shelf(block).evictor.returned(index_[node].key);
  unpin_ram(node, group);
}

// As above, when the reader is done with it.
void Cache::Impl::read_into(int32_t node, int group, int32_t block) {
  disk_->read(item_of(node, group), label_of(node, group));
  ++pools_[group].loading;
  ++reads_pending_;
  index_[node].copies[group].block = block;
  pools_[group].blocks[block].node = node;
  pools_[group].shelf(block).evictor.returned(index_[node].key);
}

// A place in the main pool for the blocks of the path that have none.
void Cache::Impl::take_path(Rep& s, const Hit& hit) {
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    for (int32_t b = table.first_held; b < hit.blocks; ++b) {
      if (table.blocks[b] != kNoBlock) continue;
      const int32_t node = path_[b], block = allocate(g, b);
      const bool from_disk = index_[node].copies[g].loading;
      try {
        from_disk ? read_into(node, g, block) : fill_from_ram(node, g, block);
      } catch (...) {
        give_back(g, block);
        throw;
      }
      table.blocks[b] = block;
      if (from_disk) s.loads.push_back({g, b});
    }
  }
}

// The first tokens of a block in one of the sequence's own. A source that is not there yet is copied when it
// is: ready().
void Cache::Impl::take_partial(Rep& s, const Prompt& prompt, const Hit& hit) {
  const auto begin = prompt.tokens.begin() + hit.blocks * kBlockTokens;
  std::copy(begin, begin + hit.partial.tokens, s.tail.begin());
  const int32_t node = hit.partial.node;
  for (int g = 0; g < num_groups(); ++g) {
    s.tables[g].blocks.push_back(allocate(g, hit.blocks));
    if (s.ram_sources[g] != nullptr) {
      store_.write(g, s.tables[g].blocks.back(), s.ram_sources[g]->span());
      stats_.ram.bytes_read += pools_[g].block_bytes;
    } else if (s.sources[g] == kNoBlock) {
      const int32_t block = allocate(g, hit.blocks);
      try {
        read_into(node, g, block);
      } catch (...) {
        give_back(g, block);
        throw;
      }
      s.sources[g] = block;
      s.loads.push_back({g, kNoBlock});
    }
  }
  s.ram_sources.fill(nullptr);
  copy_sources(s);
}

// Something could not be taken: the sequence lets go of everything, and begins with nothing.
void Cache::Impl::undo_start(Rep& s, const Hit& hit) noexcept {
  const auto not_read = [&](int32_t node, int g) {
    Copy& copy = index_[node].copies[g];
    if (!copy.loading || copy.block != kNoBlock) return false;
    copy.loading = false;
    disk_order_.set(item_of(node, g), {copy.last_use, 0});
    return true;
  };
  for (int g = 0; g < num_groups(); ++g) {
    const Rep::Table& table = s.tables[g];
    for (int32_t b = table.first_held; b < hit.blocks; ++b) {
      if (table.blocks[b] == kNoBlock && !not_read(path_[b], g)) unpin_ram(path_[b], g);
    }
    if (hit.partial.tokens > 0 && s.ram_sources[g] == nullptr) not_read(hit.partial.node, g);
  }
  drop_blocks(s);
}

// Those that are there; they are let go.
void Cache::Impl::copy_sources(Rep& s) {
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t source = s.sources[g];
    if (source == kNoBlock || index_[pools_[g].blocks[source].node].copies[g].loading) continue;
    store_.copy(g, source, s.tables[g].blocks[s.length / kBlockTokens]);
    ++stats_.copies_on_write;
    unhold(g, std::exchange(s.sources[g], kNoBlock));
  }
}

bool Cache::Impl::ready(Rep& s) {
  while (s.state == Sequence::State::kLoading) {
    if (headers_read_ < s.headers_until) return false;
    bool failed = false;
    while (!s.loads.empty() && !failed) {
      const auto [g, b] = s.loads.back();
      const int32_t node = pools_[g].blocks[b == kNoBlock ? s.sources[g] : s.tables[g].blocks[b]].node;
      failed = node == kNoNode;
      if (!failed && index_[node].copies[g].loading) return false;
      if (!failed) s.loads.pop_back();
    }
    if (failed) {  // look it up again: what could not be read is forgotten
      const std::shared_ptr<const Prompt> prompt = s.prompt;
      stats_.hit_tokens -= static_cast<uint64_t>(s.cached);
      drop_blocks(s);
      start(s, prompt);
      continue;
    }
    copy_sources(s);
    if (s.headers_until > 0 && extend(s)) continue;
    s.state = Sequence::State::kActive;
    s.prompt.reset();
  }
  return true;
}

}  // namespace millrace::kv
