// PrefixIndex: what is remembered, by name. A node stands for one logical block (16 tokens after a certain
// prefix); per layer group it says where the bytes are: in the main pool, in RAM, on disk, or in several of
// these. Nodes are linked into a tree as far as parents are known. A node lives as long as some copy of it
// does.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/paging.h"
#include "kv/block_file.h"
#include "kv/hash.h"

namespace millrace::kv {

inline constexpr int32_t kNoNode = -1;

// One group's bytes of a node.
struct Copy {
  int32_t block = kNoBlock;  // in the main pool
  uint64_t disk_bytes = 0;   // the file's size, 0: not on disk
  uint64_t last_use = 0;     // a window's blocks further back than a hit needs are not used by it
  Buffer ram;
  int32_t ram_pins = 0;  // swapped sequences that need the RAM copy
  bool loading = false;  // block is being filled from disk: not readable yet
  bool writing = false;  // handed to the disk's writer
  bool dirty = false;    // waits in the queue to be handed to it
  bool keep = false;     // window groups: part of a tail worth keeping

  bool anywhere() const { return block != kNoBlock || ram != nullptr || disk_bytes > 0; }
  bool referenced() const { return anywhere() || loading || writing || dirty; }
};

struct Node {
  BlockKey key, parent_key;
  int32_t index = 0;  // how many blocks come before it
  std::array<int32_t, kBlockTokens> tokens{};
  // parent_key and tokens are: not so for a file found at the start, until somebody asks for it or its header
  // is read.
  bool known = false;
  bool used = false;  // this entry of the array is a node
  int32_t parent = kNoNode, first_child = kNoNode, next_sibling = kNoNode, previous_sibling = kNoNode;
  int32_t next_in_bucket = kNoNode;
  uint64_t uses = 0;
  std::array<Copy, kMaxKvGroups> copies;
};

class PrefixIndex {
 public:
  PrefixIndex();
  void reserve(size_t nodes);

  Node& operator[](int32_t node) { return nodes_[node]; }
  const Node& operator[](int32_t node) const { return nodes_[node]; }
  int32_t find(const BlockKey& key) const;   // kNoNode when there is none
  int32_t find_or_add(const BlockKey& key);  // when there is no memory it throws, and nothing is changed
  // Says what a node is: 16 tokens after `parent` (whose node is found if it exists). Repeating it links a
  // child to a parent that was forgotten and has come back.
  void describe(int32_t node, const BlockKey& parent, int32_t index, std::span<const int32_t> tokens);
  // Forgets the node if no copy needs it any longer.
  void erase_if_unused(int32_t node);

  // The child that begins with the most of `tokens`, among those that `usable` says yes to.
  struct Partial {
    int32_t node = kNoNode, tokens = 0;
  };
  template <class Usable>
  Partial best_child(int32_t parent, std::span<const int32_t> tokens, Usable usable) const {
    Partial best;
    int32_t looked_at = 0;
    for (int32_t child = nodes_[parent].first_child; child != kNoNode && looked_at < kMaxChildren;
         child = nodes_[child].next_sibling, ++looked_at) {
      const int32_t common = common_tokens(nodes_[child], tokens);
      if (common > best.tokens && usable(nodes_[child])) best = {child, common};
    }
    return best;
  }

  int32_t size() const { return static_cast<int32_t>(nodes_.size()); }  // ids are below this; see Node::used

 private:
  static constexpr int32_t kMaxChildren = 256;  // looked at; recomputing 15 tokens is not worth more
  static int32_t common_tokens(const Node& node, std::span<const int32_t> tokens);
  void set_buckets(size_t count);
  void unlink(int32_t node);

  std::vector<Node> nodes_;
  std::vector<int32_t> free_;
  std::vector<int32_t> buckets_;  // a power of two, at least the number of nodes
};

}  // namespace millrace::kv
