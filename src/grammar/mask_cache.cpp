#include "grammar/mask_cache.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "grammar/mask_traversal.h"

namespace millrace::grammar {
namespace {

// For another thread that computes what we want: most entries take less. It may have no core to run on: after
// that we compute the same.
constexpr std::chrono::milliseconds kPatience{1};

}  // namespace

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

// Marks a place as being computed, until it goes.
class MaskCache::Computing {
 public:
  Computing(MaskCache& cache, Place place) : cache_(cache), place_(place) {}
  ~Computing() {
    {
      const std::unique_lock lock(cache_.mutex_);
      cache_.computing_.erase(place_);
    }
    cache_.computed_.notify_all();
  }
  Computing(const Computing&) = delete;
  Computing& operator=(const Computing&) = delete;

 private:
  MaskCache& cache_;
  Place place_;
};

std::shared_ptr<MaskCache::Node> MaskCache::find(const Automaton& automaton, const Vocabulary& vocabulary,
                                                 StateId state, const std::shared_ptr<Node>& above) {
  NodeMap& map = above != nullptr ? above->below : roots_;
  {
    std::shared_lock lock(mutex_);
    const auto it = map.find(state);
    if (it != map.end()) return it->second;
  }
  const Place place = {above.get(), state};
  bool is_ours = true;
  {
    std::unique_lock lock(mutex_);
    while (true) {
      const auto it = map.find(state);
      if (it != map.end()) return it->second;
      is_ours = computing_.insert(place).second;
      if (is_ours || computed_.wait_for(lock, kPatience) == std::cv_status::timeout) break;
    }
  }
  std::optional<Computing> computing;
  if (is_ours) computing.emplace(*this, place);
  auto node = std::make_shared<Node>();
  MaskTraversal traversal(automaton, vocabulary);
  node->entry = above != nullptr ? traversal.from_exits(state, above->entry) : traversal.from_state(state);
  num_computed_.fetch_add(1, std::memory_order_relaxed);
  const size_t size = node->entry.bytes();
  std::unique_lock lock(mutex_);
  if (bytes_ + size > max_bytes_) {
    // Full: begin anew. What others go down stays alive with them, unreachable from here.
    roots_.clear();
    bytes_ = 0;
  }
  const auto [it, is_new] = map.try_emplace(state, node);
  if (is_new) bytes_ += size;
  return it->second;
}

bool MaskCache::is_ready(const Stacks& stacks, const ConfigSet& set) {
  std::shared_lock lock(mutex_);
  return std::all_of(set.configs.begin(), set.configs.end(), [&](const Config& config) {
    return is_ready(stacks, config.stack, roots_, config.state);
  });
}

bool MaskCache::is_ready(const Stacks& stacks, NodeId stack, const NodeMap& map, StateId state) const {
  const auto it = map.find(state);
  if (it == map.end()) return false;
  if (it->second->entry.exits.empty()) return true;
  const std::span<const StackEdge> edges = stacks.edges(stack);
  return std::all_of(edges.begin(), edges.end(), [&](const StackEdge& edge) {
    return edge.target == kBottom || is_ready(stacks, edge.below, it->second->below, edge.target);
  });
}

void MaskCache::descend(const Automaton& automaton, const Vocabulary& vocabulary, const Stacks& stacks,
                        NodeId stack, const std::shared_ptr<Node>& node, std::span<uint64_t> mask) {
  if (!mask.empty()) node->entry.apply(vocabulary, mask);
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
