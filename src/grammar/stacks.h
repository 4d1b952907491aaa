// Running an Automaton over bytes: a set of configurations, each a state and a stack of return states. Stacks
// that were pushed at the same place for the same rule are one node with several edges, equal nodes are one
// node: however ambiguous the grammar, the set grows with the text's length at worst, never exponentially.
#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "grammar/automaton.h"

namespace millrace::grammar {

using NodeId = uint32_t;

// The return state of the bottom node's only edge: nothing is below.
constexpr StateId kBottom = 0xfffffffe;

struct StackEdge {
  StateId target = kBottom;  // where the caller goes on
  NodeId below = 0;
  bool operator==(const StackEdge&) const = default;
  bool operator<(const StackEdge& o) const { return std::tie(target, below) < std::tie(o.target, o.below); }
};

// Immutable nodes by number; node 0 is the bottom.
class Stacks {
 public:
  Stacks() { clear(); }
  void clear();
  std::span<const StackEdge> edges(NodeId node) const {
    return {edges_.data() + nodes_[node].first, nodes_[node].count};
  }
  NodeId node(std::span<const StackEdge> edges);  // sorted, without repeats
  size_t size() const { return nodes_.size(); }

 private:
  struct Node {
    uint32_t first = 0, count = 0;
    uint64_t hash = 0;
  };
  void grow_table();

  std::vector<Node> nodes_;
  std::vector<StackEdge> edges_;
  std::vector<NodeId> table_;  // open addressing, 0: free (the bottom needs no entry)
};

struct Config {
  StateId state = 0;
  NodeId stack = 0;
  bool operator==(const Config&) const = default;
  bool operator<(const Config& o) const { return std::tie(state, stack) < std::tie(o.state, o.stack); }
};

// A set of configurations after a byte. `ends`: the bottom was reached, all that was pushed is done.
struct ConfigSet {
  std::vector<Config> configs = {};
  bool ends = false;
  bool alive() const { return ends || !configs.empty(); }
  void clear() {
    configs.clear();
    ends = false;
  }
};

// One step at a time, with scratch memory of its own.
class Stepper {
 public:
  explicit Stepper(const Automaton& automaton) : automaton_(&automaton) {}
  // Adds the configuration (one set is built at a time), and where it may return to if its rule may end here.
  void add(Stacks& stacks, Config config, ConfigSet& out);
  // The set together with the beginnings of all rules it may call before it reads.
  void expand(Stacks& stacks, std::span<const Config> set, std::vector<Config>& out);
  // One byte on from an expanded set.
  void shift(Stacks& stacks, std::span<const Config> expanded, uint8_t byte, ConfigSet& out);

 private:
  struct Call {
    uint32_t rank = 0;
    StackEdge edge = {};
    bool operator>(const Call& o) const { return std::tie(o.rank, o.edge) < std::tie(rank, edge); }
  };
  void push_calls(const Stacks& stacks, Config config);

  const Automaton* automaton_;
  std::vector<Call> calls_;  // a heap, lowest rank first
  std::vector<StackEdge> edges_;
  std::unordered_set<uint64_t> seen_;  // the set being built, once it is too large to look through
};

}  // namespace millrace::grammar
