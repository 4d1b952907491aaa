// Looking a prompt up, and taking what was found.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv/cache_impl.h"

namespace millrace::kv {

// ---------------------------------------------------------------- looking up

std::shared_ptr<const Prompt> Cache::Impl::make_prompt(std::span<const int32_t> tokens,
                                                       std::string_view salt) const {
  auto prompt = std::make_shared<Prompt>();
  prompt->tokens.assign(tokens.begin(), tokens.end());
  prompt->root = root_key(identity_, salt);
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

int32_t Cache::Impl::usable_blocks(int32_t most) const {
  int32_t n = most;
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
      takes[g] += copy.block == kNoBlock || (!copy.loading && pools_[g].blocks[copy.block].refs == 0);
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
  const auto most = static_cast<int32_t>(prompt.tokens.size() - 1) / kBlockTokens;
  hit.blocks = hit.branch = std::min(static_cast<int32_t>(path_.size()), most);
  if (find_partial(prompt, hit)) return hit;
  hit.blocks = usable_blocks(hit.branch);
  while (true) {
    hit.takes = taken_by(hit.blocks, hit.tokens());
    int32_t excess = 0;
    for (int g = 0; g < num_groups(); ++g) excess = std::max(excess, hit.takes[g] - available(g));
    if (excess == 0) return hit;
    hit.blocks = usable_blocks(std::max(0, hit.blocks - excess));
  }
}

// All blocks of the path, and of the next one the first tokens: it is copied, and its other places are
// computed. False, and nothing is changed, when there is no such block, no tail to go on from there, or no
// room.
bool Cache::Impl::find_partial(const Prompt& prompt, Hit& hit) const {
  const auto usable = [&](const Node& node) {
    for (int g = 0; g < num_groups(); ++g) {
      const Copy& copy = node.copies[g];
      if (copy.block == kNoBlock || copy.loading) return false;
    }
    return true;
  };
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
    const int32_t source = index_[partial.node].copies[g].block;
    if (++takes[g] + (pools_[g].blocks[source].refs == 0) > available(g)) return false;
  }
  hit.partial = partial;
  hit.takes = takes;
  return true;
}

Match Cache::Impl::match(const Prompt& prompt) const {
  const Hit hit = find(prompt);
  Match match{.tokens = hit.tokens(), .takes = hit.takes};
  for (int32_t b = 0; b < hit.blocks; ++b) {
    bool ram = false, disk = false;
    for (int g = 0; g < num_groups(); ++g) {
      if (b < first_seen(g, hit.tokens())) continue;
      const Copy& copy = index_[path_[b]].copies[g];
      if (copy.block != kNoBlock) continue;
      (copy.ram != nullptr ? ram : disk) = true;
    }
    if (disk) {
      match.from_disk += kBlockTokens;
    } else if (ram) {
      match.from_ram += kBlockTokens;
    }
  }
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
  count_hit(hit);
  s.length = s.cached = hit.tokens();
  s.key = hit.blocks > 0 ? prompt->keys[hit.blocks - 1] : prompt->root;
  s.prompt_blocks = static_cast<int32_t>(prompt->tokens.size()) / kBlockTokens;
  s.branch_blocks = hit.branch;
  const bool partial = hit.partial.tokens > 0;
  if (partial) {  // must not leave while room is made for the rest
    touch(hit.partial.node, 1);
    for (int g = 0; g < num_groups(); ++g) hold(g, index_[hit.partial.node].copies[g].block);
  }
  take_path(s, *prompt, hit);
  if (partial) copy_partial(s, *prompt, hit);
  s.state = s.loads.empty() ? Sequence::State::kActive : Sequence::State::kLoading;
  s.prompt = s.loads.empty() ? nullptr : prompt;
}

void Cache::Impl::count_hit(const Hit& hit) {
  stats_.hit_tokens += static_cast<uint64_t>(hit.tokens());
  stats_.main.hit_tokens += static_cast<uint64_t>(hit.partial.tokens);
  for (int32_t b = 0; b < hit.blocks; ++b) {
    TierStats* slowest = &stats_.main;
    for (int g = 0; g < num_groups(); ++g) {
      if (b < first_seen(g, hit.tokens())) continue;
      const Copy& copy = index_[path_[b]].copies[g];
      TierStats& tier = copy.block != kNoBlock ? stats_.main : copy.ram != nullptr ? stats_.ram : stats_.disk;
      ++tier.hits;
      if (&tier == &stats_.disk || (&tier == &stats_.ram && slowest == &stats_.main)) slowest = &tier;
    }
    slowest->hit_tokens += kBlockTokens;
  }
}

// Holds the first blocks of path_. First everything that is wanted is made safe, then room is made for the
// rest.
void Cache::Impl::take_path(Rep& s, const Prompt& prompt, const Hit& hit) {
  const int32_t blocks = hit.blocks;
  for (int32_t b = blocks - 1; b >= 0; --b) {  // parents last: they are to leave after their children
    if (path_[b] == kNoNode) continue;
    const BlockKey& parent = b > 0 ? prompt.keys[b - 1] : prompt.root;
    index_.describe(path_[b], parent, b, std::span(prompt.tokens).subspan(b * kBlockTokens, kBlockTokens));
    touch(path_[b], 1);
  }
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    table.blocks.assign(blocks, kNoBlock);
    table.first_held = first_seen(g, hit.tokens());
    for (int32_t b = table.first_held; b < blocks; ++b) {
      Copy& copy = index_[path_[b]].copies[g];
      if (copy.block != kNoBlock) {
        hold(g, table.blocks[b] = copy.block);
        if (copy.loading) s.loads.push_back({g, b});
      } else if (copy.ram != nullptr) {
        pin_ram(path_[b], g);
      } else {
        copy.loading = true;
        disk_order_.erase(item_of(path_[b], g));
      }
    }
  }
  for (int g = 0; g < num_groups(); ++g) {
    Rep::Table& table = s.tables[g];
    for (int32_t b = table.first_held; b < blocks; ++b) {
      if (table.blocks[b] != kNoBlock) continue;
      const int32_t node = path_[b], block = table.blocks[b] = allocate(g);
      Copy& copy = index_[node].copies[g];
      copy.block = block;
      pools_[g].blocks[block].node = node;
      pools_[g].evictor.returned(index_[node].key);
      if (copy.loading) {
        submit_read(node, g);
        s.loads.push_back({g, b});
      } else {
        store_.write(g, block, copy.ram->span());
        stats_.ram.bytes_read += pools_[g].block_bytes;
        unpin_ram(node, g);
      }
    }
  }
}

// The source is held; it is let go here.
void Cache::Impl::copy_partial(Rep& s, const Prompt& prompt, const Hit& hit) {
  const auto begin = prompt.tokens.begin() + hit.blocks * kBlockTokens;
  std::copy(begin, begin + hit.partial.tokens, s.tail.begin());
  const auto& copies = index_[hit.partial.node].copies;
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t block = allocate(g);
    store_.copy(g, copies[g].block, block);
    s.tables[g].blocks.push_back(block);
    ++stats_.copies_on_write;
  }
  for (int g = 0; g < num_groups(); ++g) unhold(g, copies[g].block);
}

bool Cache::Impl::ready(Rep& s) {
  while (s.state == Sequence::State::kLoading) {
    bool failed = false;
    while (!s.loads.empty() && !failed) {
      const auto [g, b] = s.loads.back();
      const int32_t node = pools_[g].blocks[s.tables[g].blocks[b]].node;
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
    s.state = Sequence::State::kActive;
    s.prompt.reset();
  }
  return true;
}

}  // namespace millrace::kv
