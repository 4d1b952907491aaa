// Subset construction over bytes and calls. Two calls of one rule become one call that returns to both
// places; bytes never lead to two states. Where that would need many times the states, the rule stays as it
// is, without its empty edges: the automaton is run with sets of states anyway.
#include "grammar/determinize.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/work_budget.h"

namespace millrace::grammar {
namespace {

using Subset = std::vector<uint32_t>;

// Steps over states and edges. Nested repetitions need a step for each pair of states: some tenths of a
// second, then the rule is left as it is, and if even that takes so much it is refused.
constexpr size_t kMaxSubsetWork = 10'000'000;

class Determinizer {
 public:
  Determinizer(const Nfa& nfa, const std::string& what)
      : nfa_(nfa), what_(what), mark_(nfa.states.size(), 0) {}

  RuleStates run() {
    const size_t budget = 4 * nfa_.states.size() + 2000;
    intern({nfa_.start});
    for (size_t i = 0; i < subsets_.size(); ++i) {
      if (subsets_.size() > budget || work_ > kMaxSubsetWork) return without_empty_edges();
      const Subset subset = *subsets_[i];
      expand(subset, i);
    }
    return std::move(result_);
  }

 private:
  void close(Subset& subset) {
    ++stamp_;
    Subset todo = subset;
    for (const uint32_t s : subset) mark_[s] = stamp_;
    while (!todo.empty()) {
      const uint32_t s = todo.back();
      todo.pop_back();
      work_ += 1 + nfa_.states[s].size();
      spend_work(1 + nfa_.states[s].size());
      for (const Nfa::Edge& edge : nfa_.states[s]) {
        if (edge.kind != Nfa::Edge::Kind::kEmpty || mark_[edge.target] == stamp_) continue;
        mark_[edge.target] = stamp_;
        subset.push_back(edge.target);
        todo.push_back(edge.target);
      }
    }
    // What has only empty edges tells nothing: dropping it makes equal sets equal.
    std::erase_if(subset, [&](uint32_t s) {
      if (s == nfa_.accept) return false;
      return std::all_of(nfa_.states[s].begin(), nfa_.states[s].end(),
                         [](const Nfa::Edge& edge) { return edge.kind == Nfa::Edge::Kind::kEmpty; });
    });
    std::sort(subset.begin(), subset.end());
  }

  uint32_t intern(Subset subset) {
    std::sort(subset.begin(), subset.end());
    subset.erase(std::unique(subset.begin(), subset.end()), subset.end());
    close(subset);
    const auto [it, is_new] = ids_.try_emplace(std::move(subset), static_cast<uint32_t>(subsets_.size()));
    if (is_new) {
      subsets_.push_back(&it->first);
      result_.states.emplace_back();
      result_.states.back().accepting = std::binary_search(it->first.begin(), it->first.end(), nfa_.accept);
    }
    return it->second;
  }

  void expand(const Subset& subset, size_t id) {
    std::vector<const Nfa::Edge*> edges;
    std::map<RuleId, Subset> calls;
    std::vector<uint32_t> cuts;  // where the set of targets may change
    for (const uint32_t s : subset) {
      for (const Nfa::Edge& edge : nfa_.states[s]) {
        if (edge.kind == Nfa::Edge::Kind::kCall) calls[edge.rule].push_back(edge.target);
        if (edge.kind != Nfa::Edge::Kind::kBytes) continue;
        edges.push_back(&edge);
        cuts.push_back(edge.first);
        cuts.push_back(edge.last + 1u);
      }
    }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      Subset targets;
      spend_work(1 + edges.size() / 4);
      for (const Nfa::Edge* edge : edges) {
        if (edge->first <= cuts[i] && cuts[i] <= edge->last) targets.push_back(edge->target);
      }
      if (targets.empty()) continue;
      const uint32_t target = intern(std::move(targets));
      std::vector<ByteEdge>& out = result_.states[id].bytes;
      const auto first = static_cast<uint8_t>(cuts[i]), last = static_cast<uint8_t>(cuts[i + 1] - 1);
      if (!out.empty() && out.back().target == target && out.back().last + 1 == first) {
        out.back().last = last;
      } else {
        out.push_back({first, last, target});
      }
    }
    for (auto& [rule, targets] : calls) {
      const uint32_t target = intern(std::move(targets));
      result_.states[id].calls.push_back({rule, target});
    }
  }

  RuleStates without_empty_edges() {
    work_ = 0;
    RuleStates result;
    std::map<uint32_t, uint32_t> id_of = {{nfa_.start, 0}};
    std::vector<uint32_t> order = {nfa_.start};
    const auto id = [&](uint32_t s) {
      const auto [it, is_new] = id_of.try_emplace(s, static_cast<uint32_t>(order.size()));
      if (is_new) order.push_back(s);
      return it->second;
    };
    for (size_t i = 0; i < order.size(); ++i) {
      Subset subset = {order[i]};
      close(subset);
      if (work_ > kMaxSubsetWork)
        throw_error(ErrorCode::kUnsupported, "{}: repetitions in repetitions take too many steps", what_);
      RuleStates::One state;
      for (const uint32_t s : subset) {
        if (s == nfa_.accept) state.accepting = true;
        for (const Nfa::Edge& edge : nfa_.states[s]) {
          if (edge.kind == Nfa::Edge::Kind::kBytes)
            state.bytes.push_back({edge.first, edge.last, id(edge.target)});
          if (edge.kind == Nfa::Edge::Kind::kCall) state.calls.push_back({edge.rule, id(edge.target)});
        }
      }
      result.states.push_back(std::move(state));
    }
    return result;
  }

  const Nfa& nfa_;
  const std::string& what_;
  size_t work_ = 0;
  std::vector<uint32_t> mark_;
  uint32_t stamp_ = 0;
  std::map<Subset, uint32_t> ids_;
  std::vector<const Subset*> subsets_;
  RuleStates result_;
};

}  // namespace

RuleStates determinize(const Nfa& nfa, const std::string& what) { return Determinizer(nfa, what).run(); }

}  // namespace millrace::grammar
