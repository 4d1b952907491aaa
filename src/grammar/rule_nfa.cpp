#include "grammar/rule_nfa.h"

#include <algorithm>

#include "base/error.h"
#include "base/work_budget.h"

namespace millrace::grammar {
namespace {

constexpr size_t kMaxStates = 400'000;      // of all rules together: about 20 MB of tables
constexpr uint64_t kInlineSize = 48;        // a rule of so many states is copied into each caller
constexpr uint64_t kInlineOnceSize = 4000;  // into its only caller
constexpr uint64_t kRepeatInlineSize = 10;  // larger bodies of counted repetitions are called
constexpr uint64_t kTooLarge = uint64_t{1} << 40;

const CodepointSet& line_separators() {
  static const CodepointSet set(kFirstLineSeparator, kLastLineSeparator);
  return set;
}

const CodepointSet& plain_beyond_ascii() {
  static const CodepointSet set =
      CodepointSet(0x80, kLastCodepoint).intersection(line_separators().complement());
  return set;
}

}  // namespace

RuleLowering::RuleLowering(const GrammarBuilder& builder, RuleId root, std::string what)
    : builder_(builder), root_(root), what_(std::move(what)), size_of_expr_(builder.exprs().size(), 0) {
  find_recursion();
}

void RuleLowering::collect_calls(ExprId id, std::vector<RuleId>& out) const {
  const Expr& expr = builder_.exprs()[id];
  switch (expr.kind) {
    case Expr::Kind::kBytes:
    case Expr::Kind::kSet:
      break;
    case Expr::Kind::kSequence:
    case Expr::Kind::kChoice:
      for (const ExprId part : builder_.parts_of(expr)) collect_calls(part, out);
      break;
    case Expr::Kind::kRepeat:
      collect_calls(expr.index, out);
      break;
    case Expr::Kind::kRule:
      out.push_back(expr.index);
      break;
    case Expr::Kind::kGraph:
      for (const GraphEdge& edge : builder_.graph_of(expr).edges) collect_calls(edge.expr, out);
      break;
  }
}

// Tarjan's components, without recursion: a rule is recursive when its component has a call inside.
void RuleLowering::find_recursion() {
  const size_t n = builder_.rules().size();
  std::vector<std::vector<RuleId>> calls(n);
  uses_.assign(n, 0);
  recursive_.assign(n, 0);
  for (RuleId r = 0; r < n; ++r) {
    collect_calls(builder_.rules()[r].body, calls[r]);
    for (const RuleId callee : calls[r]) {
      ++uses_[callee];
      if (callee == r) recursive_[r] = 1;
    }
  }
  std::vector<uint32_t> order(n, 0), low(n, 0);
  std::vector<uint8_t> on_stack(n, 0);
  std::vector<RuleId> component;
  std::vector<std::pair<RuleId, size_t>> trail;
  uint32_t next = 1;
  for (RuleId first = 0; first < n; ++first) {
    if (order[first] != 0) continue;
    trail.push_back({first, 0});
    while (!trail.empty()) {
      const RuleId rule = trail.back().first;
      if (trail.back().second == 0) {
        order[rule] = low[rule] = next++;
        on_stack[rule] = 1;
        component.push_back(rule);
      }
      if (trail.back().second < calls[rule].size()) {
        const RuleId callee = calls[rule][trail.back().second++];
        if (order[callee] == 0) {
          trail.push_back({callee, 0});
        } else if (on_stack[callee] != 0) {
          low[rule] = std::min(low[rule], order[callee]);
        }
        continue;
      }
      trail.pop_back();
      if (!trail.empty()) low[trail.back().first] = std::min(low[trail.back().first], low[rule]);
      if (low[rule] != order[rule]) continue;
      const bool is_cycle = component.back() != rule;
      for (RuleId member = component.back();; member = component.back()) {
        component.pop_back();
        on_stack[member] = 0;
        if (is_cycle) recursive_[member] = 1;
        if (member == rule) break;
      }
    }
  }
}

// An estimate of the states `expr` takes, with what is inlined inside it.
uint64_t RuleLowering::size_of(ExprId id) {
  if (size_of_expr_[id] != 0) return size_of_expr_[id];
  const Expr& expr = builder_.exprs()[id];
  uint64_t size = 1;
  switch (expr.kind) {
    case Expr::Kind::kBytes:
      size += builder_.text_of(expr).size();
      break;
    case Expr::Kind::kSet:
      size += builder_.set_of(expr).ranges().back().last < 0x80 ? 0 : 4;
      break;
    case Expr::Kind::kSequence:
    case Expr::Kind::kChoice:
      for (const ExprId part : builder_.parts_of(expr)) size += size_of(part);
      break;
    case Expr::Kind::kRepeat: {
      const uint64_t copies = expr.max == kUnbounded ? expr.min + 1ull : expr.max;
      const uint64_t body = size_of(expr.index);
      size += copies * (body > kRepeatInlineSize && copies > 2 ? 1 : body);
      break;
    }
    case Expr::Kind::kRule:
      size += is_inlined(expr.index) ? size_of(builder_.rules()[expr.index].body) : 1;
      break;
    case Expr::Kind::kGraph: {
      const Graph& graph = builder_.graph_of(expr);
      size += graph.num_nodes;
      for (const GraphEdge& edge : graph.edges) size += size_of(edge.expr);
      break;
    }
  }
  return size_of_expr_[id] = std::min(size, kTooLarge);
}

bool RuleLowering::is_inlined(RuleId rule) {
  if (rule == root_ || recursive_[rule] != 0 || builder_.rules()[rule].shared) return false;
  const uint64_t size = size_of(builder_.rules()[rule].body);
  return size <= kInlineSize || (uses_[rule] == 1 && size <= kInlineOnceSize);
}

std::vector<RuleLowering::Lowered> RuleLowering::lower() {
  called(root_);
  for (size_t i = 0; i < pending_.size(); ++i) {
    const auto [is_expr, id] = pending_[i];
    Nfa nfa;
    nfa_ = &nfa;
    tails_.clear();
    nfa.start = new_state();
    nfa.accept = new_state();
    if (i == non_ascii_ || i == separators_) {
      lower_set(i == separators_ ? line_separators() : plain_beyond_ascii(), nfa.start, nfa.accept, false);
    } else {
      lower(is_expr ? id : builder_.rules()[id].body, nfa.start, nfa.accept);
    }
    lowered_[i].nfa = std::move(nfa);
  }
  return std::move(lowered_);
}

RuleId RuleLowering::called(RuleId rule) {
  const auto [it, is_new] = index_of_.try_emplace({false, rule}, static_cast<RuleId>(lowered_.size()));
  if (is_new) {
    lowered_.push_back({builder_.rules()[rule].name, {}});
    pending_.push_back({false, rule});
  }
  return it->second;
}

RuleId RuleLowering::outlined(ExprId body) {
  const auto [it, is_new] = index_of_.try_emplace({true, body}, static_cast<RuleId>(lowered_.size()));
  if (is_new) {
    lowered_.push_back({"(repeated)", {}});
    pending_.push_back({true, body});
  }
  return it->second;
}

RuleId RuleLowering::characters_rule(RuleId& rule, const char* name) {
  if (rule == kNoRule) {
    rule = static_cast<RuleId>(lowered_.size());
    lowered_.push_back({name, {}});
    pending_.push_back({true, kNoRule});
  }
  return rule;
}

uint32_t RuleLowering::new_state() {
  spend_work(4);
  if (++total_states_ > kMaxStates) {
    throw_error(ErrorCode::kUnsupported,
                "{}: takes more than {} states; repeat counts and lengths are too large", what_, kMaxStates);
  }
  nfa_->states.emplace_back();
  return static_cast<uint32_t>(nfa_->states.size() - 1);
}

void RuleLowering::add_edge(uint32_t from, Nfa::Edge edge) {
  spend_work(1);
  nfa_->states[from].push_back(edge);
}

void RuleLowering::lower(ExprId id, uint32_t from, uint32_t to) {
  const Expr& expr = builder_.exprs()[id];
  switch (expr.kind) {
    case Expr::Kind::kBytes: {
      const std::string& text = builder_.text_of(expr);
      for (size_t i = 0; i < text.size(); ++i) {
        const uint32_t next = i + 1 == text.size() ? to : new_state();
        const auto byte = static_cast<uint8_t>(text[i]);
        add_edge(from, {Nfa::Edge::Kind::kBytes, byte, byte, 0, next});
        from = next;
      }
      if (text.empty()) add_edge(from, {Nfa::Edge::Kind::kEmpty, 0, 0, 0, to});
      break;
    }
    case Expr::Kind::kSet:
      lower_set(builder_.set_of(expr), from, to, true);
      break;
    case Expr::Kind::kSequence: {
      const std::vector<ExprId>& parts = builder_.parts_of(expr);
      for (size_t i = 0; i < parts.size(); ++i) {
        const uint32_t next = i + 1 == parts.size() ? to : new_state();
        lower(parts[i], from, next);
        from = next;
      }
      break;
    }
    case Expr::Kind::kChoice:
      for (const ExprId part : builder_.parts_of(expr)) lower(part, from, to);
      break;
    case Expr::Kind::kRepeat:
      lower_repeat(expr, from, to);
      break;
    case Expr::Kind::kRule:
      if (is_inlined(expr.index)) {
        lower(builder_.rules()[expr.index].body, from, to);
      } else {
        add_edge(from, {Nfa::Edge::Kind::kCall, 0, 0, called(expr.index), to});
      }
      break;
    case Expr::Kind::kGraph:
      lower_graph(builder_.graph_of(expr), from, to);
      break;
  }
}

void RuleLowering::lower_set(const CodepointSet& set, uint32_t from, uint32_t to, bool may_call) {
  const auto call = [&](RuleId rule) { add_edge(from, {Nfa::Edge::Kind::kCall, 0, 0, rule, to}); };
  CodepointSet rest = set;
  if (may_call && set.contains(plain_beyond_ascii())) {
    call(characters_rule(non_ascii_, "(beyond ASCII)"));
    rest = set.intersection(plain_beyond_ascii().complement());
    if (set.contains(line_separators())) {
      call(characters_rule(separators_, "(line separators)"));
      rest = rest.intersection(line_separators().complement());
    }
  }
  std::vector<Utf8Sequence> sequences;
  for (const CodepointRange& range : rest.ranges()) append_utf8_sequences(range, sequences);
  for (const Utf8Sequence& sequence : sequences) {
    uint32_t target = to;
    std::vector<uint32_t> tail = {to};
    for (int i = sequence.length - 1; i > 0; --i) {
      tail.push_back(sequence.bytes[i].first << 8 | sequence.bytes[i].last);
      const auto [it, is_new] = tails_.try_emplace(tail, 0);
      if (is_new) {
        it->second = new_state();
        add_edge(it->second,
                 {Nfa::Edge::Kind::kBytes, sequence.bytes[i].first, sequence.bytes[i].last, 0, target});
      }
      target = it->second;
    }
    add_edge(from, {Nfa::Edge::Kind::kBytes, sequence.bytes[0].first, sequence.bytes[0].last, 0, target});
  }
}

void RuleLowering::lower_repeat(const Expr& expr, uint32_t from, uint32_t to) {
  const ExprId body = expr.index;
  const uint64_t copies = expr.max == kUnbounded ? uint64_t{expr.min} + 1 : expr.max;
  const bool outline = copies > 2 && size_of(body) > kRepeatInlineSize;
  const auto once = [&](uint32_t a, uint32_t b) {
    if (outline) {
      add_edge(a, {Nfa::Edge::Kind::kCall, 0, 0, outlined(body), b});
    } else {
      lower(body, a, b);
    }
  };
  for (uint32_t i = 0; i < expr.min; ++i) {
    const uint32_t next = new_state();
    once(from, next);
    from = next;
  }
  if (expr.max == kUnbounded) {
    const uint32_t loop = new_state();
    add_edge(from, {Nfa::Edge::Kind::kEmpty, 0, 0, 0, loop});
    const uint32_t back = new_state();
    once(loop, back);
    add_edge(back, {Nfa::Edge::Kind::kEmpty, 0, 0, 0, loop});
    add_edge(loop, {Nfa::Edge::Kind::kEmpty, 0, 0, 0, to});
    return;
  }
  for (uint32_t i = expr.min; i < expr.max; ++i) {
    const uint32_t next = new_state();
    add_edge(from, {Nfa::Edge::Kind::kEmpty, 0, 0, 0, to});
    once(from, next);
    from = next;
  }
  add_edge(from, {Nfa::Edge::Kind::kEmpty, 0, 0, 0, to});
}

void RuleLowering::lower_graph(const Graph& graph, uint32_t from, uint32_t to) {
  std::vector<uint32_t> state_of(graph.num_nodes);
  for (uint32_t& state : state_of) state = new_state();
  add_edge(from, {Nfa::Edge::Kind::kEmpty, 0, 0, 0, state_of[graph.start]});
  for (const GraphEdge& edge : graph.edges) lower(edge.expr, state_of[edge.from], state_of[edge.to]);
  for (const uint32_t node : graph.accepting) {
    add_edge(state_of[node], {Nfa::Edge::Kind::kEmpty, 0, 0, 0, to});
  }
}

}  // namespace millrace::grammar
