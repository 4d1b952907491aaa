// What the front ends (GBNF, regular expressions, JSON Schema) write: expressions over characters and rules.
// compile_automaton turns them into the tables that are run.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/codepoint_set.h"

namespace millrace::grammar {

using ExprId = uint32_t;
using RuleId = uint32_t;

constexpr uint32_t kUnbounded = std::numeric_limits<uint32_t>::max();
constexpr uint32_t kMaxRepeat = 100'000;  // of a bounded repetition; the states it takes are limited too

// A small automaton whose edges are expressions: objects, arrays and patterns are easiest said so.
struct GraphEdge {
  uint32_t from = 0, to = 0;
  ExprId expr = 0;
};
struct Graph {
  uint32_t num_nodes = 0, start = 0;
  std::vector<GraphEdge> edges = {};
  std::vector<uint32_t> accepting = {};
};

struct Expr {
  enum class Kind : uint8_t { kBytes, kSet, kSequence, kChoice, kRepeat, kRule, kGraph };
  Kind kind = Kind::kBytes;
  uint32_t index = 0;  // into the builder's table of this kind; for kRule the rule
  uint32_t min = 0, max = 0;
};

struct Rule {
  std::string name = {};
  bool defined = false;
  bool shared = false;  // never copied into its callers: masks inside it are worth having once
  ExprId body = 0;
};

class GrammarBuilder {
 public:
  GrammarBuilder();
  ExprId empty() const { return empty_; }      // matches nothing but the empty text
  ExprId nothing() const { return nothing_; }  // matches no text at all
  ExprId bytes(std::string_view text);
  ExprId set(CodepointSet characters);
  ExprId sequence(std::vector<ExprId> parts);
  ExprId choice(std::vector<ExprId> parts);
  ExprId repeat(ExprId body, uint32_t min, uint32_t max);  // max may be kUnbounded
  ExprId optional(ExprId body) { return repeat(body, 0, 1); }
  ExprId rule(RuleId id);
  ExprId graph(Graph graph);

  RuleId add_rule(std::string name, bool shared = false);
  void define(RuleId id, ExprId body);

  // [rule] whether any text matches it.
  std::vector<uint8_t> productive() const;

  const std::vector<Expr>& exprs() const { return exprs_; }
  const std::vector<Rule>& rules() const { return rules_; }
  const std::string& text_of(const Expr& e) const { return texts_[e.index]; }
  const CodepointSet& set_of(const Expr& e) const { return sets_[e.index]; }
  const std::vector<ExprId>& parts_of(const Expr& e) const { return lists_[e.index]; }
  const Graph& graph_of(const Expr& e) const { return graphs_[e.index]; }

 private:
  bool is_productive(ExprId id, const std::vector<uint8_t>& rules) const;
  ExprId add(Expr::Kind kind, size_t index, uint32_t min = 0, uint32_t max = 0);

  std::vector<Expr> exprs_;
  std::vector<Rule> rules_;
  std::vector<std::string> texts_;
  std::vector<CodepointSet> sets_;
  std::vector<std::vector<ExprId>> lists_;
  std::vector<Graph> graphs_;
  ExprId empty_ = 0, nothing_ = 0;
};

}  // namespace millrace::grammar
