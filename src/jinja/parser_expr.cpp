// Expressions; statements are in parser.cpp.
#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "jinja/ast.h"
#include "jinja/filters.h"
#include "jinja/is_tests.h"
#include "jinja/lexer.h"
#include "jinja/parser_impl.h"
#include "jinja/value.h"

namespace millrace::jinja {

ExprPtr Parser::make(ExprKind kind, int line) const {
  auto expr = std::make_unique<Expr>();
  expr->kind = kind;
  expr->line = line;
  return expr;
}

ExprPtr Parser::finish(ExprPtr expr) {
  uint32_t depth = 0;
  auto see = [&](const ExprPtr& child) {
    if (child) depth = std::max(depth, child->depth);
  };
  for (const ExprPtr& arg : expr->args) see(arg);
  for (const auto& entry : expr->keyword) see(entry.second);
  see(expr->star);
  see(expr->star_star);
  expr->depth = depth + 1;
  if (expr->depth > kMaxExprDepth) {
    throw SyntaxError{true, expr->line, fmt::format("an expression deeper than {} levels", kMaxExprDepth)};
  }
  return expr;
}

ExprPtr Parser::unary(char op, int line, ExprPtr operand) {
  auto expr = make(ExprKind::kUnary, line);
  expr->op = op;
  expr->args.push_back(std::move(operand));
  return finish(std::move(expr));
}

ExprPtr Parser::binary(ExprKind kind, char op, ExprPtr left, ExprPtr right) {
  auto expr = make(kind, left->line);
  expr->op = op;
  expr->args.push_back(std::move(left));
  expr->args.push_back(std::move(right));
  return finish(std::move(expr));
}

ExprPtr Parser::parse_tuple(bool with_condition, const char* end_name, bool parenthesized) {
  int line = current().line;
  auto tuple = make(ExprKind::kTuple, line);
  bool is_tuple = false;
  for (;;) {
    if (!tuple->args.empty()) expect_operator(",");
    if (at_end_of_code() || at_operator(")") || (end_name != nullptr && at_name(end_name))) break;
    tuple->args.push_back(parse_expression(with_condition));
    if (!at_operator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!tuple->args.empty()) return std::move(tuple->args[0]);
    if (!parenthesized) error(fmt::format("Expected an expression, got '{}'", describe(current())));
  }
  return finish(std::move(tuple));
}

ExprPtr Parser::parse_expression(bool with_condition) {
  Nesting nesting(*this);
  return with_condition ? parse_condition() : parse_or();
}

ExprPtr Parser::parse_condition() {
  size_t unknown = unknown_.size();
  ExprPtr value = parse_or();
  while (at_name("if")) {
    auto expr = make(ExprKind::kCondition, next().line);
    ++conditionals_;
    expr->args.push_back(std::move(value));
    expr->args.push_back(parse_or());
    expr->args.push_back(skip_name("else") ? parse_expression() : nullptr);
    --conditionals_;
    value = finish(std::move(expr));
    unknown_.resize(unknown);
  }
  return value;
}

ExprPtr Parser::parse_or() {
  ExprPtr left = parse_and();
  while (skip_name("or")) left = binary(ExprKind::kOr, 0, std::move(left), parse_and());
  return left;
}

ExprPtr Parser::parse_and() {
  ExprPtr left = parse_not();
  while (skip_name("and")) left = binary(ExprKind::kAnd, 0, std::move(left), parse_not());
  return left;
}

ExprPtr Parser::parse_not() {
  if (!at_name("not")) return parse_compare();
  Nesting nesting(*this);
  int line = next().line;
  return unary('!', line, parse_not());
}

ExprPtr Parser::parse_compare() {
  ExprPtr first = parse_sum();
  auto expr = make(ExprKind::kCompare, first->line);
  expr->args.push_back(std::move(first));
  static constexpr std::pair<std::string_view, CompareOp> kOps[] = {
      {"==", CompareOp::kEqual},     {"!=", CompareOp::kNotEqual}, {"<", CompareOp::kLess},
      {"<=", CompareOp::kLessEqual}, {">", CompareOp::kGreater},   {">=", CompareOp::kGreaterEqual}};
  for (;;) {
    auto it =
        std::find_if(std::begin(kOps), std::end(kOps), [&](const auto& op) { return at_operator(op.first); });
    if (it != std::end(kOps)) {
      next();
      expr->ops.push_back(it->second);
    } else if (skip_name("in")) {
      expr->ops.push_back(CompareOp::kIn);
    } else if (at_name("not") && look().kind == TokenKind::kName && look().text == "in") {
      next();
      next();
      expr->ops.push_back(CompareOp::kNotIn);
    } else {
      break;
    }
    expr->args.push_back(parse_sum());
  }
  return expr->ops.empty() ? std::move(expr->args[0]) : finish(std::move(expr));
}

ExprPtr Parser::parse_sum() {
  ExprPtr left = parse_concat();
  while (at_operator("+") || at_operator("-")) {
    char op = next().text[0];
    left = binary(ExprKind::kBinary, op, std::move(left), parse_concat());
  }
  return left;
}

ExprPtr Parser::parse_concat() {
  ExprPtr first = parse_product();
  if (!at_operator("~")) return first;
  auto expr = make(ExprKind::kConcat, first->line);
  expr->escaping = escaping_;
  expr->args.push_back(std::move(first));
  while (skip_operator("~")) expr->args.push_back(parse_product());
  return finish(std::move(expr));
}

ExprPtr Parser::parse_product() {
  ExprPtr left = parse_power();
  while (at_operator("*") || at_operator("/") || at_operator("//") || at_operator("%")) {
    const std::string& text = next().text;
    char op = text == "//" ? 'F' : text[0];
    left = binary(ExprKind::kBinary, op, std::move(left), parse_power());
  }
  return left;
}

ExprPtr Parser::parse_power() {
  ExprPtr left = parse_unary();
  while (skip_operator("**")) left = binary(ExprKind::kBinary, 'P', std::move(left), parse_unary());
  return left;
}

ExprPtr Parser::parse_unary(bool with_filter) {
  ExprPtr expr;
  if (at_operator("-") || at_operator("+")) {
    Nesting nesting(*this);
    const Token& token = next();
    expr = unary(token.text[0], token.line, parse_unary(false));
  } else {
    expr = parse_primary();
  }
  expr = parse_postfix(std::move(expr));
  return with_filter ? parse_filter_expr(std::move(expr)) : std::move(expr);
}

ExprPtr Parser::parse_name(bool with_namespace) {
  const Token& token = next();
  const std::string& name = token.text;
  auto expr = make(ExprKind::kConstant, token.line);
  if (name == "true" || name == "True" || name == "false" || name == "False") {
    expr->constant = Value::boolean(name == "true" || name == "True");
    return expr;
  }
  if (name == "none" || name == "None") {
    expr->constant = Value::none();
    return expr;
  }
  expr->kind = ExprKind::kName;
  expr->name = name;
  if (with_namespace && skip_operator(".")) {
    expr->kind = ExprKind::kNamespaceRef;
    expr->attribute = expect_any_name();
  }
  for (Signature* macro : macros_) {
    macro->uses_caller |= name == "caller";
    macro->uses_varargs |= name == "varargs";
    macro->uses_kwargs |= name == "kwargs";
  }
  return expr;
}

// Equal strings of a template are one object, as Python's compiler has it: `is sameas` tells.
Value Parser::shared_text(std::string text) {
  Value& shared = texts_[text];
  if (shared.is_undefined()) shared = Value::string(std::move(text));
  return shared;
}

ExprPtr Parser::parse_primary(bool with_namespace) {
  const Token& token = current();
  auto expr = make(ExprKind::kConstant, token.line);
  switch (token.kind) {
    case TokenKind::kName:
      return parse_name(with_namespace);
    case TokenKind::kString: {
      std::string text;
      while (current().kind == TokenKind::kString) text += next().text;
      expr->constant = shared_text(std::move(text));
      return expr;
    }
    case TokenKind::kInteger:
      expr->constant = next().integer;
      return expr;
    case TokenKind::kFloat:
      expr->constant = Value::real(next().real);
      return expr;
    default:
      break;
  }
  if (skip_operator("(")) {
    Nesting nesting(*this);
    ExprPtr inner = parse_tuple(true, nullptr, true);
    expect_operator(")");
    return inner;
  }
  if (at_operator("[")) return parse_list();
  if (at_operator("{")) return parse_dict();
  error(fmt::format("unexpected '{}'", describe(token)));
}

ExprPtr Parser::parse_list() {
  auto expr = make(ExprKind::kList, next().line);
  while (!at_operator("]")) {
    if (!expr->args.empty()) expect_operator(",");
    if (at_operator("]")) break;
    expr->args.push_back(parse_expression());
  }
  next();
  return finish(std::move(expr));
}

ExprPtr Parser::parse_dict() {
  auto expr = make(ExprKind::kDict, next().line);
  while (!at_operator("}")) {
    if (!expr->args.empty()) expect_operator(",");
    if (at_operator("}")) break;
    expr->args.push_back(parse_expression());
    expect_operator(":");
    expr->args.push_back(parse_expression());
  }
  next();
  return finish(std::move(expr));
}

ExprPtr Parser::parse_postfix(ExprPtr expr) {
  for (;;) {
    if (at_operator(".") || at_operator("["))
      expr = parse_subscript(std::move(expr));
    else if (at_operator("("))
      expr = parse_call(std::move(expr));
    else
      return expr;
  }
}

ExprPtr Parser::parse_filter_expr(ExprPtr expr) {
  for (;;) {
    if (at_operator("|"))
      expr = parse_filter(std::move(expr));
    else if (at_name("is"))
      expr = parse_test(std::move(expr));
    else if (at_operator("("))
      expr = parse_call(std::move(expr));
    else
      return expr;
  }
}

ExprPtr Parser::parse_subscript(ExprPtr object) {
  const Token& token = next();
  if (token.text == ".") {
    const Token& name = next();
    if (name.kind == TokenKind::kName) {
      auto expr = make(ExprKind::kAttribute, token.line);
      expr->attribute = name.text;
      expr->args.push_back(std::move(object));
      return finish(std::move(expr));
    }
    if (name.kind != TokenKind::kInteger) error_at(name.line, "expected name or number");
    auto index = make(ExprKind::kConstant, name.line);
    index->constant = name.integer;
    return binary(ExprKind::kItem, 0, std::move(object), std::move(index));
  }
  auto parts = make(ExprKind::kTuple, token.line);
  while (!at_operator("]")) {
    if (!parts->args.empty()) expect_operator(",");
    parts->args.push_back(parse_subscript_part());
  }
  next();
  ExprPtr index = parts->args.size() == 1 ? std::move(parts->args[0]) : finish(std::move(parts));
  return binary(ExprKind::kItem, 0, std::move(object), std::move(index));
}

ExprPtr Parser::parse_subscript_part() {
  auto slice = make(ExprKind::kSlice, current().line);
  if (!at_operator(":")) {
    ExprPtr start = parse_expression();
    if (!at_operator(":")) return start;
    slice->args.push_back(std::move(start));
  } else {
    slice->args.push_back(nullptr);
  }
  for (int part = 1; part < 3; ++part) {
    bool given = skip_operator(":") && !at_operator(":") && !at_operator("]") && !at_operator(",");
    slice->args.push_back(given ? parse_expression() : nullptr);
  }
  return finish(std::move(slice));
}

ExprPtr Parser::parse_call(ExprPtr callee) {
  auto expr = make(ExprKind::kCall, current().line);
  expr->args.push_back(std::move(callee));
  parse_arguments(*expr);
  return finish(std::move(expr));
}

void Parser::parse_arguments(Expr& call) {
  int line = next().line;  // (
  auto ensure = [&](bool ok) {
    if (!ok) error_at(line, "invalid syntax for function call expression");
  };
  bool first = true;
  while (!at_operator(")")) {
    if (!first) expect_operator(",");
    first = false;
    if (at_operator(")")) break;
    if (skip_operator("*")) {
      ensure(!call.star && !call.star_star);
      call.star = parse_expression();
    } else if (skip_operator("**")) {
      ensure(!call.star_star);
      call.star_star = parse_expression();
    } else if (current().kind == TokenKind::kName && look().kind == TokenKind::kOperator &&
               look().text == "=") {
      ensure(!call.star_star);
      std::string name = next().text;
      next();
      call.keyword.emplace_back(std::move(name), parse_expression());
    } else {
      ensure(!call.star && !call.star_star && call.keyword.empty());
      call.args.push_back(parse_expression());
    }
  }
  next();
}

std::string Parser::parse_dotted_name() {
  std::string name = expect_any_name();
  while (skip_operator(".")) name += "." + expect_any_name();
  return name;
}

ExprPtr Parser::parse_filter(ExprPtr input, bool inline_start) {
  while (inline_start || at_operator("|")) {
    if (!inline_start) next();
    inline_start = false;
    auto expr = make(ExprKind::kFilter, current().line);
    expr->name = parse_dotted_name();
    expr->native = find_filter(expr->name);
    // jinja2 too looks up a filter inside a condition only when it gets there.
    if (expr->native == nullptr && conditionals_ == 0) {
      unknown_.push_back({true, expr->line, fmt::format("the filter '{}'", expr->name)});
    }
    expr->args.push_back(std::move(input));
    if (at_operator("(")) parse_arguments(*expr);
    input = finish(std::move(expr));
  }
  return input;
}

ExprPtr Parser::parse_test(ExprPtr input) {
  int line = next().line;  // is
  bool negated = skip_name("not");
  auto expr = make(ExprKind::kTest, line);
  expr->name = parse_dotted_name();
  expr->native = find_test(expr->name);
  if (expr->native == nullptr && conditionals_ == 0) {
    unknown_.push_back({true, line, fmt::format("the test '{}'", expr->name)});
  }
  expr->args.push_back(std::move(input));
  TokenKind kind = current().kind;
  bool argument = kind == TokenKind::kName || kind == TokenKind::kString || kind == TokenKind::kInteger ||
                  kind == TokenKind::kFloat || at_operator("[") || at_operator("{");
  if (at_operator("(")) {
    parse_arguments(*expr);
  } else if (argument && !at_name("else") && !at_name("or") && !at_name("and")) {
    if (at_name("is")) error("You cannot chain multiple tests with is");
    Nesting nesting(*this);
    ExprPtr primary = parse_primary();
    expr->args.push_back(parse_postfix(std::move(primary)));
  }
  ExprPtr test = finish(std::move(expr));
  return negated ? unary('!', line, std::move(test)) : std::move(test);
}

}  // namespace millrace::jinja
