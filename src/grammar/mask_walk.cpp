#include "grammar/mask_walk.h"

#include <algorithm>

namespace millrace::grammar {

MaskWalk::MaskWalk(const Automaton& automaton, const Vocabulary& vocabulary)
    : automaton_(automaton), vocabulary_(vocabulary), stepper_(automaton) {
  sets_.emplace_back();
  sets_[0].next.fill(kDead);
}

int32_t MaskWalk::number_of(ConfigSet& set) {
  if (!set.alive()) return kDead;
  std::sort(set.configs.begin(), set.configs.end());
  // The bottom's own end is part of the set: a configuration of no state.
  std::vector<Config> key = set.configs;
  if (set.ends) key.push_back({kBottom, 0});
  const auto [it, is_new] = number_of_.try_emplace(std::move(key), static_cast<int32_t>(sets_.size()));
  if (is_new) {
    Set& added = sets_.emplace_back();
    added.next.fill(kUnknown);
    added.ends = set.ends;
    stepper_.expand(stacks_, set.configs, added.expanded);
  }
  return it->second;
}

int32_t MaskWalk::compute_step(int32_t set, uint8_t byte) {
  stepper_.shift(stacks_, sets_[set].expanded, byte, scratch_);
  const int32_t next = number_of(scratch_);
  sets_[set].next[byte] = next;
  return next;
}

int32_t MaskWalk::start(StateId state) {
  ConfigSet set;
  stepper_.add(stacks_, {state, 0}, set);
  follow_ = automaton_.rules[automaton_.states[state].rule].follow;
  return number_of(set);
}

bool MaskWalk::may_go_on(std::span<const TrieNode> trie, uint32_t node) const {
  for (uint32_t child = node + 1; child < trie[node].end; child = trie[child].end) {
    if (follow_.test(trie[child].byte)) return true;
  }
  return false;
}

void MaskWalk::walk(std::span<const TrieNode> trie, uint32_t node, int32_t set) {
  const uint32_t end = trie[node].end;
  const size_t base = trie[node].depth;
  if (path_.size() < base + 2) path_.resize(base + 2);
  path_[base] = set;
  for (uint32_t i = node + 1; i < end;) {
    const TrieNode& at = trie[i];
    const int32_t next = step(path_[at.depth - 1u], at.byte);
    if (next == kDead) {
      i = at.end;
      continue;
    }
    if (path_.size() <= at.depth) path_.resize(at.depth + 1u);
    path_[at.depth] = next;
    for (int32_t t = at.token; t >= 0; t = vocabulary_.next_same(t)) tokens_.push_back(t);
    if (sets_[next].ends && may_go_on(trie, i)) exits_.push_back(i);
    ++i;
  }
}

MaskEntry MaskWalk::finish(MaskEntry entry) {
  // A list costs a random write per token, a mask one word per 64 tokens of the vocabulary.
  if (tokens_.size() > vocabulary_.num_tokens() / 64) {
    entry.dense.assign(vocabulary_.num_words(), 0);
    for (const int32_t t : tokens_) entry.dense[t / 64] |= uint64_t{1} << (t % 64);
  } else {
    std::sort(tokens_.begin(), tokens_.end());
    tokens_.erase(std::unique(tokens_.begin(), tokens_.end()), tokens_.end());
    entry.tokens = tokens_;
  }
  entry.exits = std::move(exits_);
  return entry;
}

MaskEntry MaskWalk::from_state(StateId state) {
  MaskEntry entry;
  // How far plain characters carry: over the longest token, or so many and then no further, or nobody knows.
  // Only in the last case the plain tokens have to be walked.
  StateId at = state;
  bool is_only = true;
  const uint32_t longest = vocabulary_.longest_plain();
  uint32_t count = 0;
  for (; automaton_.states[at].plain_next != kNoState && count < longest; ++count) {
    is_only = is_only && automaton_.states[at].plain_only;
    at = automaton_.states[at].plain_next;
  }
  const bool forever = count >= longest;
  entry.plain_characters = count;
  entry.in_all = !forever && !(count > 0 && is_only && automaton_.states[at].plain_dead);
  const std::span<const TrieNode> trie = entry.in_all ? vocabulary_.all() : vocabulary_.not_plain();
  const int32_t first = start(state);
  walk(trie, 0, first);
  return finish(std::move(entry));
}

MaskEntry MaskWalk::from_exits(StateId state, const MaskEntry& above) {
  MaskEntry entry;
  entry.in_all = above.in_all;
  const std::span<const TrieNode> trie = above.in_all ? vocabulary_.all() : vocabulary_.not_plain();
  const int32_t first = start(state);
  for (const uint32_t node : above.exits) {
    if (sets_[first].ends && may_go_on(trie, node)) exits_.push_back(node);
    walk(trie, node, first);
  }
  return finish(std::move(entry));
}

}  // namespace millrace::grammar
