// The parser class, shared by its two files: parser.cpp (statements) and parser_expr.cpp.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "jinja/ast.h"
#include "jinja/lexer.h"

namespace millrace::jinja {

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
  Body parse();

 private:
  // Nested brackets and blocks, and the height of an expression tree: what real templates need many times
  // over.
  static constexpr int kMaxNesting = 100;
  static constexpr uint32_t kMaxExprDepth = 200;
  using Names = std::initializer_list<std::string_view>;

  // statements
  Body parse_until(Names ends);
  Body parse_block_body(Names ends);
  std::unique_ptr<Stmt> parse_statement();
  std::unique_ptr<Stmt> parse_if();
  std::unique_ptr<Stmt> parse_for();
  std::unique_ptr<Stmt> parse_set();
  std::unique_ptr<Stmt> parse_macro();
  std::unique_ptr<Stmt> parse_call_block();
  std::unique_ptr<Stmt> parse_filter_block();
  std::unique_ptr<Stmt> parse_with();
  std::unique_ptr<Stmt> parse_print();
  std::unique_ptr<Stmt> parse_generation();
  std::unique_ptr<Stmt> parse_autoescape();
  std::unique_ptr<Stmt> parse_loop_control(StmtKind kind);
  void parse_signature(Signature& signature);
  Body parse_macro_body(Signature& signature, std::string_view end);
  ExprPtr parse_target(bool with_namespace, const char* end_name);
  void check_target(const Expr& target);

  // expressions, loosest binding first
  ExprPtr parse_tuple(bool with_condition, const char* end_name = nullptr, bool parenthesized = false);
  ExprPtr parse_expression(bool with_condition = true);
  ExprPtr parse_condition();
  ExprPtr parse_or();
  ExprPtr parse_and();
  ExprPtr parse_not();
  ExprPtr parse_compare();
  ExprPtr parse_sum();
  ExprPtr parse_concat();
  ExprPtr parse_product();
  ExprPtr parse_power();
  ExprPtr parse_unary(bool with_filter = true);
  ExprPtr parse_primary(bool with_namespace = false);
  ExprPtr parse_name(bool with_namespace);
  ExprPtr parse_list();
  ExprPtr parse_dict();
  ExprPtr parse_postfix(ExprPtr expr);
  ExprPtr parse_filter_expr(ExprPtr expr);
  ExprPtr parse_subscript(ExprPtr expr);
  ExprPtr parse_subscript_part();
  ExprPtr parse_call(ExprPtr callee);
  ExprPtr parse_filter(ExprPtr input, bool inline_start = false);
  ExprPtr parse_test(ExprPtr input);
  void parse_arguments(Expr& call);
  std::string parse_dotted_name();

  Value shared_text(std::string text);
  ExprPtr make(ExprKind kind, int line) const;
  ExprPtr unary(char op, int line, ExprPtr operand);
  ExprPtr binary(ExprKind kind, char op, ExprPtr left, ExprPtr right);
  ExprPtr finish(ExprPtr expr);  // sets the depth

  // tokens
  const Token& current() const { return tokens_[position_]; }
  const Token& look() const { return tokens_[std::min(position_ + 1, tokens_.size() - 1)]; }
  const Token& next();
  bool at_name(std::string_view name) const;
  bool at_operator(std::string_view op) const;
  bool at_end_of_code() const;
  bool skip_name(std::string_view name);
  bool skip_operator(std::string_view op);
  void expect_operator(std::string_view op);
  void expect_name(std::string_view name);
  std::string expect_any_name();
  void expect_block_end();
  [[noreturn]] void error(std::string message) const;
  [[noreturn]] void error_at(int line, std::string message) const;

  struct Nesting {
    explicit Nesting(Parser& parser_in);
    ~Nesting() { --parser.nesting_; }
    Parser& parser;
  };

  std::vector<Token> tokens_;
  std::map<std::string, Value> texts_;  // the template's string constants
  size_t position_ = 0;
  int nesting_ = 0;
  int loops_ = 0;                         // for statements around this point, up to the nearest macro
  Escaping escaping_ = Escaping::kNever;  // by the autoescape statements around this point
  int conditionals_ = 0;                  // if statements and conditional expressions around this point
  std::vector<SyntaxError> unknown_;      // filters and tests that are not ours, outside every condition
  std::vector<Signature*> macros_;        // around this point: they learn which special names they use
};

}  // namespace millrace::jinja
