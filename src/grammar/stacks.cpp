#include "grammar/stacks.h"

#include <algorithm>
#include <functional>

#include "base/error.h"

namespace millrace::grammar {
namespace {

// What no sensible grammar comes near: the state of one answer would take megabytes.
constexpr size_t kMaxConfigs = 50'000;

uint64_t hash_edges(std::span<const StackEdge> edges) {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const StackEdge& edge : edges) {
    hash ^= (uint64_t{edge.target} << 32 | edge.below) + (hash << 6) + (hash >> 2);
    hash *= 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

void Stacks::clear() {
  edges_.assign(1, StackEdge{});
  nodes_.assign(1, Node{0, 1, 0});
  table_.assign(table_.size() > 1024 || table_.empty() ? 64 : table_.size(), 0);
}

NodeId Stacks::node(std::span<const StackEdge> edges) {
  if (edges.size() == 1 && edges[0].target == kBottom) return 0;
  const uint64_t hash = hash_edges(edges);
  size_t slot = hash & (table_.size() - 1);
  for (; table_[slot] != 0; slot = (slot + 1) & (table_.size() - 1)) {
    const NodeId id = table_[slot];
    if (nodes_[id].hash == hash && std::ranges::equal(this->edges(id), edges)) return id;
  }
  const auto id = static_cast<NodeId>(nodes_.size());
  nodes_.push_back({static_cast<uint32_t>(edges_.size()), static_cast<uint32_t>(edges.size()), hash});
  edges_.insert(edges_.end(), edges.begin(), edges.end());
  table_[slot] = id;
  if (nodes_.size() * 2 > table_.size()) grow_table();
  return id;
}

void Stacks::grow_table() {
  table_.assign(table_.size() * 2, 0);
  for (NodeId id = 1; id < nodes_.size(); ++id) {
    size_t slot = nodes_[id].hash & (table_.size() - 1);
    while (table_[slot] != 0) slot = (slot + 1) & (table_.size() - 1);
    table_[slot] = id;
  }
}

void Stepper::add(Stacks& stacks, Config config, ConfigSet& out) {
  size_t next = out.configs.size();
  if (next == 0) seen_.clear();
  const auto key = [](Config c) { return uint64_t{c.state} << 32 | c.stack; };
  const auto is_new = [&](Config c) {
    constexpr size_t kFewConfigs = 32;  // looking through so many is faster than a table
    if (out.configs.size() < kFewConfigs)
      return std::find(out.configs.begin(), out.configs.end(), c) == out.configs.end();
    if (seen_.empty()) {
      for (const Config& known : out.configs) seen_.insert(key(known));
    }
    return seen_.insert(key(c)).second;
  };
  const auto insert = [&](Config c) {
    if (!is_new(c)) return;
    if (out.configs.size() >= kMaxConfigs)
      throw_error(ErrorCode::kUnsupported, "grammar: ambiguous in more than {} ways at once", kMaxConfigs);
    out.configs.push_back(c);
  };
  insert(config);
  for (; next < out.configs.size(); ++next) {
    const Config c = out.configs[next];
    if (!automaton_->states[c.state].accepting) continue;
    for (const StackEdge& edge : stacks.edges(c.stack)) {
      if (edge.target == kBottom) {
        out.ends = true;
      } else {
        insert({edge.target, edge.below});
      }
    }
  }
}

void Stepper::push_calls(const Stacks& stacks, Config config) {
  for (const CallEdge& call : automaton_->calls_of(config.state)) {
    const uint32_t rank = automaton_->rules[call.rule].rank;
    const auto push = [&](StackEdge edge) {
      calls_.push_back({rank, edge});
      std::push_heap(calls_.begin(), calls_.end(), std::greater<>());
    };
    if (automaton_->only_ends(call.target)) {
      // Nothing is left to do after the call: the callee returns to our callers at once.
      for (const StackEdge& edge : stacks.edges(config.stack)) push(edge);
    } else {
      push({call.target, config.stack});
    }
  }
}

void Stepper::expand(Stacks& stacks, std::span<const Config> set, std::vector<Config>& out) {
  out.assign(set.begin(), set.end());
  calls_.clear();
  for (const Config& config : set) push_calls(stacks, config);
  // Callees have higher ranks than their callers: once a rule is next, all who call it here are known.
  while (!calls_.empty()) {
    const uint32_t rank = calls_.front().rank;
    edges_.clear();
    while (!calls_.empty() && calls_.front().rank == rank) {
      std::pop_heap(calls_.begin(), calls_.end(), std::greater<>());
      if (edges_.empty() || !(edges_.back() == calls_.back().edge)) edges_.push_back(calls_.back().edge);
      calls_.pop_back();
    }
    const Config config = {automaton_->rules[automaton_->rule_of_rank[rank]].start, stacks.node(edges_)};
    out.push_back(config);
    push_calls(stacks, config);
  }
}

void Stepper::shift(Stacks& stacks, std::span<const Config> expanded, uint8_t byte, ConfigSet& out) {
  out.clear();
  for (const Config& config : expanded) {
    for (const ByteEdge& edge : automaton_->bytes_of(config.state)) {
      if (edge.first <= byte && byte <= edge.last) add(stacks, {edge.target, config.stack}, out);
    }
  }
}

}  // namespace millrace::grammar
