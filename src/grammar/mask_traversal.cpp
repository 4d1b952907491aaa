#include "grammar/mask_traversal.h"

#include <algorithm>
#include <bit>

#include "base/work_budget.h"

namespace millrace::grammar {

MaskTraversal::MaskTraversal(const Automaton& automaton, const Vocabulary& vocabulary)
    : automaton_(automaton),
      vocabulary_(vocabulary),
      stepper_(automaton),
      next_(256, kDead),
      ends_(1, 0),
      expanded_(1),
      path_(vocabulary.longest_token() + 1, kDead),
      found_(vocabulary.num_words(), 0) {}

int32_t MaskTraversal::number_of(ConfigSet& set) {
  if (!set.alive()) return kDead;
  std::sort(set.configs.begin(), set.configs.end());
  // The bottom's own end is part of the set: a configuration of no state.
  std::vector<Config> key = set.configs;
  if (set.ends) key.push_back({kBottom, 0});
  const auto [it, is_new] = number_of_.try_emplace(std::move(key), static_cast<int32_t>(ends_.size()));
  if (is_new) {
    next_.resize(next_.size() + 256, kUnknown);
    ends_.push_back(set.ends ? 1 : 0);
    stepper_.expand(stacks_, set.configs, expanded_.emplace_back());
  }
  return it->second;
}

int32_t MaskTraversal::compute_step(int32_t set, uint8_t byte) {
  // Bytes that no edge tells apart lead to the same set: one step for all of them.
  int first = 0, last = 255;
  for (const Config& config : expanded_[set]) {
    for (const ByteEdge& edge : automaton_.bytes_of(config.state)) {
      first = std::max<int>(first, edge.last < byte ? edge.last + 1 : edge.first <= byte ? edge.first : 0);
      last = std::min<int>(last, edge.first > byte ? edge.first - 1 : edge.last >= byte ? edge.last : 255);
    }
  }
  stepper_.shift(stacks_, expanded_[set], byte, scratch_);
  const int32_t next = number_of(scratch_);
  const auto row = next_.begin() + static_cast<std::ptrdiff_t>(set) * 256;
  std::fill(row + first, row + last + 1, next);
  return next;
}

int32_t MaskTraversal::start(StateId state) {
  ConfigSet set;
  stepper_.add(stacks_, {state, 0}, set);
  follow_ = automaton_.rules[automaton_.states[state].rule].follow;
  has_follow_ = follow_.any();
  return number_of(set);
}

bool MaskTraversal::may_go_on(std::span<const TrieNode> trie, uint32_t node) const {
  if (!has_follow_) return false;
  for (uint32_t child = node + 1; child < trie[node].end; child = trie[child].end) {
    if (follow_.test(trie[child].byte)) return true;
  }
  return false;
}

void MaskTraversal::take(const TrieNode& node) {
  const auto add = [&](int32_t t) { found_[t / 64] |= uint64_t{1} << (t % 64); };
  if (node.token < 0) return;
  add(node.token);
  if (!node.has_same) return;
  for (int32_t t = vocabulary_.next_same(node.token); t >= 0; t = vocabulary_.next_same(t)) add(t);
}

void MaskTraversal::traverse(std::span<const TrieNode> trie, uint32_t node, int32_t set) {
  const uint32_t end = trie[node].end;
  path_[trie[node].depth] = set;
  for (uint32_t i = node + 1; i < end;) {
    const TrieNode& at = trie[i];
    const int32_t next = step(path_[at.depth - 1u], at.byte);
    if (next == kDead) {
      i = at.end;
      continue;
    }
    path_[at.depth] = next;
    take(at);
    if (ends_[next] != 0 && may_go_on(trie, i)) exits_.push_back(i);
    spend_work(1);
    ++i;
  }
}

MaskEntry MaskTraversal::finish(MaskEntry entry) {
  size_t count = 0;
  for (const uint64_t word : found_) count += static_cast<size_t>(std::popcount(word));
  // A list costs a random write per token, a mask one word per 64 tokens of the vocabulary.
  if (count > vocabulary_.num_tokens() / 64) {
    entry.dense = std::move(found_);
  } else {
    entry.tokens.reserve(count);
    for (size_t w = 0; w < found_.size(); ++w) {
      for (uint64_t word = found_[w]; word != 0; word &= word - 1) {
        entry.tokens.push_back(static_cast<int32_t>(w * 64 + static_cast<size_t>(std::countr_zero(word))));
      }
    }
  }
  entry.exits = std::move(exits_);
  return entry;
}

MaskEntry MaskTraversal::from_state(StateId state) {
  MaskEntry entry;
  // How far plain characters carry: over the longest token, or so many and then no further, or nobody knows.
  // Only in the last case the plain tokens have to be visited.
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
  traverse(trie, 0, first);
  return finish(std::move(entry));
}

MaskEntry MaskTraversal::from_exits(StateId state, const MaskEntry& above) {
  MaskEntry entry;
  entry.in_all = above.in_all;
  const std::span<const TrieNode> trie = above.in_all ? vocabulary_.all() : vocabulary_.not_plain();
  const int32_t first = start(state);
  for (const uint32_t node : above.exits) {
    if (ends_[first] != 0 && may_go_on(trie, node)) exits_.push_back(node);
    traverse(trie, node, first);
  }
  return finish(std::move(entry));
}

}  // namespace millrace::grammar
