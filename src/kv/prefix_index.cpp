#include "kv/prefix_index.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace millrace::kv {

PrefixIndex::PrefixIndex() : buckets_(1024, kNoNode) {}

int32_t PrefixIndex::find(const BlockKey& key) const {
  int32_t node = buckets_[key.low() & (buckets_.size() - 1)];
  while (node != kNoNode && nodes_[node].key != key) node = nodes_[node].next_in_bucket;
  return node;
}

int32_t PrefixIndex::find_or_add(const BlockKey& key) {
  if (const int32_t node = find(key); node != kNoNode) return node;
  if (free_.empty()) {
    if (nodes_.size() == buckets_.size()) set_buckets(2 * buckets_.size());
    if (nodes_.size() == nodes_.capacity()) nodes_.reserve(std::max<size_t>(64, 2 * nodes_.size()));
    free_.reserve(nodes_.capacity());  // erasing a node must not allocate
    nodes_.emplace_back();
    free_.push_back(static_cast<int32_t>(nodes_.size()) - 1);
  }
  const int32_t id = free_.back();
  free_.pop_back();
  Node& node = nodes_[id];
  node = Node{};
  node.key = key;
  node.used = true;
  int32_t& bucket = buckets_[key.low() & (buckets_.size() - 1)];
  node.next_in_bucket = std::exchange(bucket, id);
  return id;
}

void PrefixIndex::reserve(size_t nodes) {
  nodes_.reserve(nodes);
  free_.reserve(nodes);
  if (nodes > buckets_.size()) set_buckets(std::bit_ceil(nodes));
}

void PrefixIndex::set_buckets(size_t count) {
  buckets_.assign(count, kNoNode);
  for (size_t id = 0; id < nodes_.size(); ++id) {
    if (!nodes_[id].used) continue;
    int32_t& bucket = buckets_[nodes_[id].key.low() & (buckets_.size() - 1)];
    nodes_[id].next_in_bucket = std::exchange(bucket, static_cast<int32_t>(id));
  }
}

void PrefixIndex::describe(int32_t id, const BlockKey& parent, int32_t index,
                           std::span<const int32_t> tokens) {
  Node& node = nodes_[id];
  node.parent_key = parent;
  node.index = index;
  std::copy(tokens.begin(), tokens.end(), node.tokens.begin());
  node.known = true;
  if (node.parent != kNoNode) return;
  const int32_t parent_id = find(parent);
  if (parent_id == kNoNode) return;
  node.parent = parent_id;
  node.next_sibling = std::exchange(nodes_[parent_id].first_child, id);
  if (node.next_sibling != kNoNode) nodes_[node.next_sibling].previous_sibling = id;
}

void PrefixIndex::unlink(int32_t id) {
  Node& node = nodes_[id];
  for (int32_t child = node.first_child; child != kNoNode;) {
    Node& orphan = nodes_[child];
    child = orphan.next_sibling;
    orphan.parent = orphan.next_sibling = orphan.previous_sibling = kNoNode;
  }
  if (node.parent == kNoNode) return;
  (node.previous_sibling == kNoNode ? nodes_[node.parent].first_child
                                    : nodes_[node.previous_sibling].next_sibling) = node.next_sibling;
  if (node.next_sibling != kNoNode) nodes_[node.next_sibling].previous_sibling = node.previous_sibling;
}

void PrefixIndex::erase_if_unused(int32_t id) {
  Node& node = nodes_[id];
  for (const Copy& copy : node.copies) {
    if (copy.referenced()) return;
  }
  unlink(id);
  int32_t* at = &buckets_[node.key.low() & (buckets_.size() - 1)];
  while (*at != id) at = &nodes_[*at].next_in_bucket;
  *at = node.next_in_bucket;
  node = Node{};
  free_.push_back(id);
}

int32_t PrefixIndex::common_tokens(const Node& node, std::span<const int32_t> tokens) {
  if (!node.known) return 0;
  const auto count = std::min<size_t>(tokens.size(), kBlockTokens);
  const auto end =
      std::mismatch(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count), node.tokens.begin());
  return static_cast<int32_t>(end.first - tokens.begin());
}

}  // namespace millrace::kv
