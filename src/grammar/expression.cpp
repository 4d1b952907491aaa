#include "grammar/expression.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/work_budget.h"

namespace millrace::grammar {
namespace {

constexpr size_t kMaxExprs = 1'000'000;  // an input this large has gone wrong somewhere

}  // namespace

GrammarBuilder::GrammarBuilder() {
  empty_ = bytes("");
  lists_.emplace_back();
  nothing_ = add(Expr::Kind::kChoice, lists_.size() - 1);
}

ExprId GrammarBuilder::add(Expr::Kind kind, size_t index, uint32_t min, uint32_t max) {
  spend_work(2);
  if (exprs_.size() >= kMaxExprs)
    throw_error(ErrorCode::kUnsupported, "grammar: more than {} expressions", kMaxExprs);
  exprs_.push_back({kind, static_cast<uint32_t>(index), min, max});
  return static_cast<ExprId>(exprs_.size() - 1);
}

ExprId GrammarBuilder::bytes(std::string_view text) {
  texts_.emplace_back(text);
  return add(Expr::Kind::kBytes, texts_.size() - 1);
}

ExprId GrammarBuilder::set(CodepointSet characters) {
  if (characters.empty()) return nothing_;
  sets_.push_back(std::move(characters));
  return add(Expr::Kind::kSet, sets_.size() - 1);
}

ExprId GrammarBuilder::sequence(std::vector<ExprId> parts) {
  if (parts.empty()) return empty_;
  if (parts.size() == 1) return parts[0];
  lists_.push_back(std::move(parts));
  return add(Expr::Kind::kSequence, lists_.size() - 1);
}

ExprId GrammarBuilder::choice(std::vector<ExprId> parts) {
  if (parts.empty()) return nothing_;
  if (parts.size() == 1) return parts[0];
  lists_.push_back(std::move(parts));
  return add(Expr::Kind::kChoice, lists_.size() - 1);
}

ExprId GrammarBuilder::repeat(ExprId body, uint32_t min, uint32_t max) {
  if (min == 1 && max == 1) return body;
  if (max == 0) return empty_;
  return add(Expr::Kind::kRepeat, body, min, max);
}

ExprId GrammarBuilder::rule(RuleId id) { return add(Expr::Kind::kRule, id); }

ExprId GrammarBuilder::graph(Graph graph) {
  graphs_.push_back(std::move(graph));
  return add(Expr::Kind::kGraph, graphs_.size() - 1);
}

RuleId GrammarBuilder::add_rule(std::string name, bool shared) {
  rules_.push_back({std::move(name), false, shared, nothing_});
  return static_cast<RuleId>(rules_.size() - 1);
}

void GrammarBuilder::define(RuleId id, ExprId body) {
  rules_[id].body = body;
  rules_[id].defined = true;
}

bool GrammarBuilder::is_productive(ExprId id, const std::vector<uint8_t>& rules) const {
  spend_work(2);
  const Expr& expr = exprs_[id];
  const auto part = [&](ExprId p) { return is_productive(p, rules); };
  switch (expr.kind) {
    case Expr::Kind::kBytes:
    case Expr::Kind::kSet:
      return true;
    case Expr::Kind::kSequence:
      return std::ranges::all_of(lists_[expr.index], part);
    case Expr::Kind::kChoice:
      return std::ranges::any_of(lists_[expr.index], part);
    case Expr::Kind::kRepeat:
      return expr.min == 0 || part(expr.index);
    case Expr::Kind::kRule:
      return rules[expr.index] != 0;
    case Expr::Kind::kGraph:
      break;
  }
  const Graph& graph = graphs_[expr.index];
  std::vector<uint8_t> reached(graph.num_nodes, 0);
  std::vector<std::vector<const GraphEdge*>> edges(graph.num_nodes);
  for (const GraphEdge& edge : graph.edges) edges[edge.from].push_back(&edge);
  std::vector<uint32_t> todo = {graph.start};
  reached[graph.start] = 1;
  while (!todo.empty()) {
    const uint32_t node = todo.back();
    todo.pop_back();
    for (const GraphEdge* edge : edges[node]) {
      if (reached[edge->to] != 0 || !part(edge->expr)) continue;
      reached[edge->to] = 1;
      todo.push_back(edge->to);
    }
  }
  return std::ranges::any_of(graph.accepting, [&](uint32_t node) { return reached[node] != 0; });
}

std::vector<uint8_t> GrammarBuilder::productive() const {
  std::vector<uint8_t> rules(rules_.size(), 0);
  // Callees are mostly defined after their callers: going backwards, two rounds usually do.
  for (bool grew = true; grew;) {
    grew = false;
    for (size_t r = rules_.size(); r-- > 0;) {
      if (rules[r] == 0 && is_productive(rules_[r].body, rules)) rules[r] = grew = true;
    }
  }
  return rules;
}

}  // namespace millrace::grammar
