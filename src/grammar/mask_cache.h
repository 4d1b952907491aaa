// Which tokens a state allows, computed once and kept.
//
// A state alone decides most tokens: those that stay inside its rule and the rules it calls. The others leave
// the rule somewhere on their way, and there the stack decides. So masks form a tree: the entry of a state
// has the tokens it decides and the places in the trie where the rule was left; for each state the rule may
// return to there is a child entry that goes on from these places; and so on down the stack, until no token
// is left. Looking up a mask goes down this tree beside the stack.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "grammar/automaton.h"
#include "grammar/mask_vocabulary.h"
#include "grammar/stacks.h"

namespace millrace::grammar {

struct MaskEntry {
  uint32_t plain_characters = 0;     // all plain tokens of up to so many characters are allowed
  bool in_all = false;               // which trie `exits` are in: all tokens, or those that are not plain
  std::vector<int32_t> tokens = {};  // allowed ones, unless `dense`
  std::vector<uint64_t> dense = {};  // or as a mask, when they are many
  std::vector<uint32_t> exits = {};  // trie nodes after which the rule may have ended and more may follow

  size_t bytes() const;
  void apply(const Vocabulary& vocabulary, std::span<uint64_t> mask) const;
};

// For one grammar and one vocabulary; shared between threads.
class MaskCache {
 public:
  explicit MaskCache(size_t max_bytes) : max_bytes_(max_bytes) {}
  // Sets the bits of all tokens that may come next; with an empty mask, only computes what is missing for it.
  void apply(const Automaton& automaton, const Vocabulary& vocabulary, const Stacks& stacks,
             const ConfigSet& set, std::span<uint64_t> mask);
  // Whether apply() would find all it needs.
  bool is_ready(const Stacks& stacks, const ConfigSet& set);
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  size_t num_computed() const { return num_computed_.load(std::memory_order_relaxed); }

 private:
  struct Node {
    MaskEntry entry = {};
    std::unordered_map<StateId, std::shared_ptr<Node>> below = {};  // under mutex_
  };
  using Place = std::pair<const Node*, StateId>;
  class Computing;
  using NodeMap = std::unordered_map<StateId, std::shared_ptr<Node>>;
  // The entry of `state` after `above` (null: at the beginning of a token), computed if it is not there. Who
  // finds another thread computing it waits a while.
  std::shared_ptr<Node> find(const Automaton& automaton, const Vocabulary& vocabulary, StateId state,
                             const std::shared_ptr<Node>& above);
  bool is_ready(const Stacks& stacks, NodeId stack, const NodeMap& map, StateId state) const;
  void descend(const Automaton& automaton, const Vocabulary& vocabulary, const Stacks& stacks, NodeId stack,
               const std::shared_ptr<Node>& node, std::span<uint64_t> mask);

  size_t max_bytes_;
  std::atomic<size_t> bytes_ = 0, num_computed_ = 0;
  std::shared_mutex mutex_;
  std::condition_variable_any computed_;
  std::set<Place> computing_;  // under mutex_
  NodeMap roots_;
};

}  // namespace millrace::grammar
