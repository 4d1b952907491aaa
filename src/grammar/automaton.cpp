// compile_automaton: what can be empty, what can end at all, tables without dead ends, the order in which
// rules call one another before reading, and what the masks want to know of every state.
#include "grammar/automaton.h"

#include <algorithm>

#include "base/error.h"
#include "base/work_budget.h"
#include "grammar/determinize.h"
#include "grammar/rule_nfa.h"

namespace millrace::grammar {
namespace {

using Lowered = RuleLowering::Lowered;

// Rules whose end can be reached from their beginning by empty edges, calls of such rules and, if
// `through_bytes`, bytes: which can be empty, which can end. Linear: a call waits until its rule is known.
std::vector<uint8_t> rules_that_end(const std::vector<Lowered>& rules, bool through_bytes) {
  using Place = std::pair<RuleId, uint32_t>;
  std::vector<uint8_t> ends(rules.size(), 0);
  std::vector<std::vector<uint8_t>> reached(rules.size());
  std::vector<std::vector<Place>> waiting(rules.size());
  std::vector<Place> todo;
  const auto reach = [&](RuleId rule, uint32_t state) {
    if (reached[rule][state] != 0) return;
    reached[rule][state] = 1;
    todo.push_back({rule, state});
  };
  for (RuleId r = 0; r < rules.size(); ++r) reached[r].assign(rules[r].nfa.states.size(), 0);
  for (RuleId r = 0; r < rules.size(); ++r) reach(r, rules[r].nfa.start);
  while (!todo.empty()) {
    const auto [rule, state] = todo.back();
    todo.pop_back();
    if (state == rules[rule].nfa.accept && ends[rule] == 0) {
      ends[rule] = 1;
      for (const auto& [caller, target] : waiting[rule]) reach(caller, target);
    }
    for (const Nfa::Edge& edge : rules[rule].nfa.states[state]) {
      const bool passes = edge.kind == Nfa::Edge::Kind::kEmpty ||
                          (edge.kind == Nfa::Edge::Kind::kBytes && through_bytes) ||
                          (edge.kind == Nfa::Edge::Kind::kCall && ends[edge.rule] != 0);
      if (passes) {
        reach(rule, edge.target);
      } else if (edge.kind == Nfa::Edge::Kind::kCall) {
        waiting[edge.rule].push_back({rule, edge.target});
      }
    }
  }
  return ends;
}

void drop_dead_calls(std::vector<Lowered>& rules, const std::vector<uint8_t>& can_end) {
  for (Lowered& rule : rules) {
    for (auto& edges : rule.nfa.states) {
      std::erase_if(edges, [&](const Nfa::Edge& edge) {
        return edge.kind == Nfa::Edge::Kind::kCall && can_end[edge.rule] == 0;
      });
    }
  }
}

void step_over_empty_rules(std::vector<Lowered>& rules, const std::vector<uint8_t>& can_be_empty) {
  for (Lowered& rule : rules) {
    for (auto& edges : rule.nfa.states) {
      const size_t n = edges.size();
      for (size_t i = 0; i < n; ++i) {
        if (edges[i].kind != Nfa::Edge::Kind::kCall || can_be_empty[edges[i].rule] == 0) continue;
        const uint32_t target = edges[i].target;
        edges.push_back({Nfa::Edge::Kind::kEmpty, 0, 0, 0, target});
      }
    }
  }
}

// Removes the states from which the rule cannot end, and edges into them.
void trim(RuleStates& rule) {
  const size_t n = rule.states.size();
  std::vector<std::vector<uint32_t>> callers(n);
  std::vector<uint8_t> alive(n, 0);
  std::vector<uint32_t> todo;
  for (uint32_t s = 0; s < n; ++s) {
    for (const ByteEdge& edge : rule.states[s].bytes) callers[edge.target].push_back(s);
    for (const CallEdge& edge : rule.states[s].calls) callers[edge.target].push_back(s);
    if (rule.states[s].accepting) {
      alive[s] = 1;
      todo.push_back(s);
    }
  }
  while (!todo.empty()) {
    const uint32_t s = todo.back();
    todo.pop_back();
    for (const uint32_t caller : callers[s]) {
      if (alive[caller] != 0) continue;
      alive[caller] = 1;
      todo.push_back(caller);
    }
  }
  std::vector<uint32_t> id_of(n, 0);
  uint32_t next = 1;
  for (uint32_t s = 1; s < n; ++s) {
    if (alive[s] != 0) id_of[s] = next++;
  }
  RuleStates kept;
  for (uint32_t s = 0; s < n; ++s) {
    if (s != 0 && alive[s] == 0) continue;
    RuleStates::One state = std::move(rule.states[s]);
    std::erase_if(state.bytes, [&](const ByteEdge& edge) { return alive[edge.target] == 0; });
    std::erase_if(state.calls, [&](const CallEdge& edge) { return alive[edge.target] == 0; });
    for (ByteEdge& edge : state.bytes) edge.target = id_of[edge.target];
    for (CallEdge& edge : state.calls) edge.target = id_of[edge.target];
    kept.states.push_back(std::move(state));
  }
  rule = std::move(kept);
}

// A rule that is, among others, itself says nothing by that.
void drop_calls_of_itself(RuleStates& states, RuleId self) {
  const auto only_ends = [&](uint32_t s) {
    return states.states[s].accepting && states.states[s].bytes.empty() && states.states[s].calls.empty();
  };
  std::erase_if(states.states[0].calls,
                [&](const CallEdge& edge) { return edge.rule == self && only_ends(edge.target); });
}

void append_rule(const RuleStates& rule, RuleId id, Automaton& automaton) {
  const auto base = static_cast<StateId>(automaton.states.size());
  automaton.rules[id].start = base;
  for (const RuleStates::One& one : rule.states) {
    State state;
    state.first_byte_edge = static_cast<uint32_t>(automaton.byte_edges.size());
    state.first_call_edge = static_cast<uint32_t>(automaton.call_edges.size());
    state.rule = id;
    state.accepting = one.accepting;
    automaton.states.push_back(state);
    for (ByteEdge edge : one.bytes) {
      edge.target += base;
      automaton.byte_edges.push_back(edge);
    }
    for (CallEdge edge : one.calls) {
      edge.target += base;
      automaton.call_edges.push_back(edge);
    }
  }
}

// Kahn's order over "may call before it reads": what is left over calls itself.
void rank_rules(Automaton& automaton, const std::string& what) {
  const size_t n = automaton.rules.size();
  std::vector<uint32_t> callers(n, 0);
  for (const AutomatonRule& rule : automaton.rules) {
    for (const CallEdge& edge : automaton.calls_of(rule.start)) ++callers[edge.rule];
  }
  for (RuleId r = 0; r < n; ++r) {
    if (callers[r] == 0) automaton.rule_of_rank.push_back(r);
  }
  for (size_t i = 0; i < automaton.rule_of_rank.size(); ++i) {
    const RuleId rule = automaton.rule_of_rank[i];
    automaton.rules[rule].rank = static_cast<uint32_t>(i);
    for (const CallEdge& edge : automaton.calls_of(automaton.rules[rule].start)) {
      if (--callers[edge.rule] == 0) automaton.rule_of_rank.push_back(edge.rule);
    }
  }
  if (automaton.rule_of_rank.size() == n) return;
  // Names a rule on the ring itself, not one that a ring leads to: following callees that are left over from
  // any left-over rule ends on the ring after n steps, unless they lead away; callers never do.
  std::vector<RuleId> some_caller(n, 0);
  RuleId rule = 0;
  for (RuleId r = 0; r < n; ++r) {
    if (callers[r] == 0) continue;
    rule = r;
    for (const CallEdge& edge : automaton.calls_of(automaton.rules[r].start)) some_caller[edge.rule] = r;
  }
  for (size_t i = 0; i < n; ++i) rule = some_caller[rule];
  throw_error(ErrorCode::kUnsupported,
              "{}: rule '{}' calls itself before it has read anything (left recursion)", what,
              automaton.rules[rule].name);
}

ByteSet first_of(const Automaton& automaton, StateId s) {
  ByteSet set;
  for (const ByteEdge& edge : automaton.bytes_of(s)) {
    for (unsigned b = edge.first; b <= edge.last; ++b) set.set(b);
  }
  for (const CallEdge& edge : automaton.calls_of(s)) set |= automaton.rules[edge.rule].first;
  return set;
}

void find_first_and_follow(Automaton& automaton) {
  for (size_t i = automaton.rule_of_rank.size(); i-- > 0;) {
    AutomatonRule& rule = automaton.rules[automaton.rule_of_rank[i]];
    rule.first = first_of(automaton, rule.start);
  }
  std::vector<std::vector<RuleId>> passes_to(automaton.rules.size());  // callees at the end of a rule
  for (StateId s = 0; s < automaton.num_states(); ++s) {
    for (const CallEdge& edge : automaton.calls_of(s)) {
      automaton.rules[edge.rule].follow |= first_of(automaton, edge.target);
      if (automaton.states[edge.target].accepting) passes_to[automaton.states[s].rule].push_back(edge.rule);
    }
  }
  std::vector<RuleId> todo;
  for (RuleId r = 0; r < automaton.rules.size(); ++r) {
    std::sort(passes_to[r].begin(), passes_to[r].end());
    passes_to[r].erase(std::unique(passes_to[r].begin(), passes_to[r].end()), passes_to[r].end());
    todo.push_back(r);
  }
  while (!todo.empty()) {
    const RuleId rule = todo.back();
    todo.pop_back();
    for (const RuleId callee : passes_to[rule]) {
      const ByteSet both = automaton.rules[callee].follow | automaton.rules[rule].follow;
      if (both == automaton.rules[callee].follow) continue;
      automaton.rules[callee].follow = both;
      todo.push_back(callee);
    }
  }
}

// Whether plain characters may follow where the state's rule ends.
bool plain_after(const Automaton& automaton, const State& state, const ByteSet& plain) {
  return state.accepting && (automaton.rules[state.rule].follow & plain).any();
}

void find_plain(Automaton& automaton, RuleId non_ascii, RuleId separators) {
  ByteSet plain, plain_ascii;
  for (unsigned b = 0; b < 256; ++b) {
    if (is_plain(b)) plain.set(b);
    if (is_plain(b) && b < 0x80) plain_ascii.set(b);
  }
  const auto bytes_to = [&](StateId s, StateId target, bool to_others) {
    ByteSet set;
    for (const ByteEdge& edge : automaton.bytes_of(s)) {
      if ((edge.target == target) == to_others) continue;
      for (unsigned b = edge.first; b <= edge.last; ++b) set.set(b);
    }
    return set;
  };
  for (StateId s = 0; s < automaton.num_states(); ++s) {
    State& state = automaton.states[s];
    bool other_calls = false;
    for (const CallEdge& edge : automaton.calls_of(s)) {
      if (edge.rule == non_ascii && (bytes_to(s, edge.target, false) & plain_ascii) == plain_ascii)
        state.plain_next = edge.target;
    }
    for (const CallEdge& edge : automaton.calls_of(s)) {
      if (edge.rule == separators) continue;  // begins like plain characters, and is none
      if (edge.rule == non_ascii && edge.target == state.plain_next) continue;
      if ((automaton.rules[edge.rule].first & plain).any()) other_calls = true;
    }
    const bool ends = plain_after(automaton, state, plain);
    state.plain_only = state.plain_next != kNoState && !ends && !other_calls &&
                       (bytes_to(s, state.plain_next, true) & plain).none();
    state.plain_dead = !ends && (first_of(automaton, s) & plain).none();
  }
}

}  // namespace

size_t Automaton::bytes() const {
  return states.size() * sizeof(State) + byte_edges.size() * sizeof(ByteEdge) +
         call_edges.size() * sizeof(CallEdge) + rules.size() * sizeof(AutomatonRule);
}

Automaton compile_automaton(const GrammarBuilder& builder, RuleId root, const std::string& what) {
  RuleLowering lowering(builder, root, what);
  std::vector<Lowered> lowered = lowering.lower();
  const std::vector<uint8_t> can_end = rules_that_end(lowered, true);
  if (can_end[0] == 0) throw_error(ErrorCode::kBadInput, "{}: no text at all matches", what);
  drop_dead_calls(lowered, can_end);
  step_over_empty_rules(lowered, rules_that_end(lowered, false));

  Automaton automaton;
  automaton.root = 0;
  automaton.rules.resize(lowered.size());
  for (RuleId r = 0; r < lowered.size(); ++r) {
    automaton.rules[r].name = lowered[r].name;
    spend_work(100);
    RuleStates states = determinize(lowered[r].nfa, what);
    lowered[r].nfa = {};
    trim(states);
    drop_calls_of_itself(states, r);
    append_rule(states, r, automaton);
  }
  State end;
  end.first_byte_edge = static_cast<uint32_t>(automaton.byte_edges.size());
  end.first_call_edge = static_cast<uint32_t>(automaton.call_edges.size());
  automaton.states.push_back(end);
  rank_rules(automaton, what);
  find_first_and_follow(automaton);
  find_plain(automaton, lowering.non_ascii(), lowering.separators());
  return automaton;
}

}  // namespace millrace::grammar
