#include "grammar/mask_cache.h"

#include "grammar/mask_walk.h"

namespace millrace::grammar {

size_t MaskEntry::bytes() const {
  constexpr size_t kOverhead = 256;  // of the node, its maps and its place in the map above
  return kOverhead + tokens.capacity() * sizeof(int32_t) + dense.capacity() * sizeof(uint64_t) +
         exits.capacity() * sizeof(uint32_t);
}

void MaskEntry::apply(const Vocabulary& vocabulary, std::span<uint64_t> mask) const {
  if (plain_characters > 0) vocabulary.add_plain(plain_characters, mask);
  for (size_t i = 0; i < dense.size(); ++i) mask[i] |= dense[i];
  for (const int32_t t : tokens) mask[t / 64] |= uint64_t{1} << (t % 64);
}

std::shared_ptr<MaskCache::Node> MaskCache::find(const Automaton& automaton, const Vocabulary& vocabulary,
                                                 StateId state, const std::shared_ptr<Node>& above) {
  auto& map = above != nullptr ? above->below : roots_;
  {
    std::shared_lock lock(mutex_);
    const auto it = map.find(state);
    if (it != map.end()) return it->second;
  }
  auto node = std::make_shared<Node>();
  MaskWalk walk(automaton, vocabulary);
  node->entry = above != nullptr ? walk.from_exits(state, above->entry) : walk.from_state(state);
  num_computed_.fetch_add(1, std::memory_order_relaxed);
  const size_t size = node->entry.bytes();
  std::unique_lock lock(mutex_);
  if (bytes_ + size > max_bytes_) {
    // Full: begin anew. What others are walking down stays alive with them, unreachable from here.
    roots_.clear();
    bytes_ = 0;
  }
  const auto [it, is_new] = map.try_emplace(state, node);
  if (is_new) bytes_ += size;
  return it->second;
}

void MaskCache::descend(const Automaton& automaton, const Vocabulary& vocabulary, const Stacks& stacks,
                        NodeId stack, const std::shared_ptr<Node>& node, std::span<uint64_t> mask) {
  node->entry.apply(vocabulary, mask);
  if (node->entry.exits.empty()) return;
  for (const StackEdge& edge : stacks.edges(stack)) {
    if (edge.target == kBottom) continue;
    descend(automaton, vocabulary, stacks, edge.below, find(automaton, vocabulary, edge.target, node), mask);
  }
}

void MaskCache::apply(const Automaton& automaton, const Vocabulary& vocabulary, const Stacks& stacks,
                      const ConfigSet& set, std::span<uint64_t> mask) {
  for (const Config& config : set.configs) {
    descend(automaton, vocabulary, stacks, config.stack, find(automaton, vocabulary, config.state, nullptr),
            mask);
  }
}

}  // namespace millrace::grammar
