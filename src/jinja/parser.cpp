// Statements; expressions are in parser_expr.cpp.
#include "jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "jinja/lexer.h"
#include "jinja/parser_impl.h"

namespace millrace::jinja {

namespace {

std::unique_ptr<Stmt> statement(StmtKind kind, int line) {
  auto stmt = std::make_unique<Stmt>();
  stmt->kind = kind;
  stmt->line = line;
  return stmt;
}

}  // namespace

Body parse_template(std::string_view source) { return Parser(tokenize(source)).parse(); }

Parser::Nesting::Nesting(Parser& parser_in) : parser(parser_in) {
  if (parser.nesting_ >= kMaxNesting) {
    throw SyntaxError{true, parser.current().line, fmt::format("nesting deeper than {} levels", kMaxNesting)};
  }
  ++parser.nesting_;
}

const Token& Parser::next() {
  const Token& token = tokens_[position_];
  if (token.kind != TokenKind::kEnd) ++position_;
  return token;
}

bool Parser::at_name(std::string_view name) const {
  return current().kind == TokenKind::kName && current().text == name;
}
bool Parser::at_operator(std::string_view op) const {
  return current().kind == TokenKind::kOperator && current().text == op;
}
bool Parser::at_end_of_code() const {
  return current().kind == TokenKind::kVariableEnd || current().kind == TokenKind::kBlockEnd;
}
bool Parser::skip_name(std::string_view name) {
  if (!at_name(name)) return false;
  next();
  return true;
}
bool Parser::skip_operator(std::string_view op) {
  if (!at_operator(op)) return false;
  next();
  return true;
}
void Parser::expect_operator(std::string_view op) {
  if (!skip_operator(op)) error(fmt::format("expected token '{}', got '{}'", op, describe(current())));
}
void Parser::expect_name(std::string_view name) {
  if (!skip_name(name)) error(fmt::format("expected token '{}', got '{}'", name, describe(current())));
}
std::string Parser::expect_any_name() {
  if (current().kind != TokenKind::kName)
    error(fmt::format("expected a name, got '{}'", describe(current())));
  return next().text;
}
void Parser::expect_block_end() {
  if (current().kind != TokenKind::kBlockEnd) {
    error(fmt::format("expected token 'end of statement block', got '{}'", describe(current())));
  }
  next();
}
void Parser::error(std::string message) const { error_at(current().line, std::move(message)); }
void Parser::error_at(int line, std::string message) const {
  throw SyntaxError{false, line, std::move(message)};
}

Body Parser::parse() {
  Body body = parse_until({});
  if (!unknown_.empty()) throw SyntaxError(unknown_.front());
  return body;
}

// Statements up to {% with one of `ends`, which stays the current token; without ends, up to the end of the
// template.
Body Parser::parse_until(Names ends) {
  Nesting nesting(*this);
  Body body;
  while (current().kind != TokenKind::kEnd) {
    int line = current().line;
    if (current().kind == TokenKind::kData) {
      body.push_back(statement(StmtKind::kText, line));
      body.back()->text = next().text;
    } else if (current().kind == TokenKind::kVariableBegin) {
      next();
      auto output = statement(StmtKind::kOutput, line);
      output->escaping = escaping_;
      output->values.push_back(parse_tuple(true));
      if (current().kind != TokenKind::kVariableEnd) {
        error(fmt::format("expected token 'end of print statement', got '{}'", describe(current())));
      }
      next();
      body.push_back(std::move(output));
    } else {
      next();  // {%
      if (std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return at_name(end); }))
        return body;
      body.push_back(parse_statement());
      expect_block_end();
    }
  }
  if (ends.size() > 0) {
    error(fmt::format("unexpected end of template, expected '{}'", fmt::join(ends, "' or '")));
  }
  return body;
}

Body Parser::parse_block_body(Names ends) {
  skip_operator(":");
  expect_block_end();
  return parse_until(ends);
}

std::unique_ptr<Stmt> Parser::parse_statement() {
  if (current().kind != TokenKind::kName) error("tag name expected");
  const std::string& name = current().text;
  if (name == "if") return parse_if();
  if (name == "for") return parse_for();
  if (name == "set") return parse_set();
  if (name == "macro") return parse_macro();
  if (name == "call") return parse_call_block();
  if (name == "filter") return parse_filter_block();
  if (name == "with") return parse_with();
  if (name == "print") return parse_print();
  if (name == "generation") return parse_generation();
  if (name == "autoescape") return parse_autoescape();
  if (name == "break") return parse_loop_control(StmtKind::kBreak);
  if (name == "continue") return parse_loop_control(StmtKind::kContinue);
  for (std::string_view known :
       {"block", "extends", "include", "import", "from", "do", "trans", "pluralize", "debug"}) {
    if (name == known) throw SyntaxError{true, current().line, fmt::format("the statement '{}'", name)};
  }
  error(fmt::format("Encountered unknown tag '{}'", name));
}

std::unique_ptr<Stmt> Parser::parse_if() {
  auto stmt = statement(StmtKind::kIf, next().line);
  ++conditionals_;
  for (;;) {
    ExprPtr test = parse_tuple(false);
    stmt->branches.push_back({std::move(test), parse_block_body({"elif", "else", "endif"})});
    std::string end = next().text;
    if (end == "elif") continue;
    if (end == "else") {
      stmt->branches.push_back({nullptr, parse_block_body({"endif"})});
      next();
    }
    --conditionals_;
    return stmt;
  }
}

std::unique_ptr<Stmt> Parser::parse_for() {
  auto stmt = statement(StmtKind::kFor, next().line);
  stmt->escaping = escaping_;
  stmt->target = parse_target(false, "in");
  expect_name("in");
  stmt->value = parse_tuple(false, "recursive");
  if (skip_name("if")) stmt->test = parse_expression();
  stmt->recursive = skip_name("recursive");
  ++loops_;
  stmt->body = parse_block_body({"endfor", "else"});
  --loops_;
  if (next().text == "else") {
    stmt->otherwise = parse_block_body({"endfor"});
    next();
  }
  return stmt;
}

std::unique_ptr<Stmt> Parser::parse_set() {
  auto stmt = statement(StmtKind::kSet, next().line);
  stmt->target = parse_target(true, nullptr);
  if (skip_operator("=")) {
    stmt->value = parse_tuple(true);
    return stmt;
  }
  stmt->kind = StmtKind::kSetBlock;
  stmt->escaping = escaping_;
  stmt->value = parse_filter(nullptr);
  stmt->body = parse_block_body({"endset"});
  next();
  return stmt;
}

std::unique_ptr<Stmt> Parser::parse_macro() {
  auto stmt = statement(StmtKind::kMacro, next().line);
  stmt->text = expect_any_name();
  parse_signature(stmt->signature);
  stmt->body = parse_macro_body(stmt->signature, "endmacro");
  return stmt;
}

void Parser::parse_signature(Signature& signature) {
  expect_operator("(");
  while (!at_operator(")")) {
    if (!signature.parameters.empty()) expect_operator(",");
    signature.parameters.push_back(expect_any_name());
    if (skip_operator("=")) {
      signature.defaults.push_back(parse_expression());
    } else if (!signature.defaults.empty()) {
      error("non-default argument follows default argument");
    }
  }
  next();
}

Body Parser::parse_macro_body(Signature& signature, std::string_view end) {
  int loops = std::exchange(loops_, 0);
  macros_.push_back(&signature);
  Body body = parse_block_body({end});
  next();
  macros_.pop_back();
  loops_ = loops;
  return body;
}

std::unique_ptr<Stmt> Parser::parse_call_block() {
  auto stmt = statement(StmtKind::kCall, next().line);
  if (at_operator("(")) parse_signature(stmt->signature);
  stmt->value = parse_expression();
  if (stmt->value->kind != ExprKind::kCall) error_at(stmt->line, "expected call");
  stmt->body = parse_macro_body(stmt->signature, "endcall");
  return stmt;
}

std::unique_ptr<Stmt> Parser::parse_filter_block() {
  auto stmt = statement(StmtKind::kFilter, next().line);
  stmt->escaping = escaping_;
  stmt->value = parse_filter(nullptr, true);
  stmt->body = parse_block_body({"endfilter"});
  next();
  return stmt;
}

std::unique_ptr<Stmt> Parser::parse_with() {
  auto stmt = statement(StmtKind::kWith, next().line);
  while (current().kind != TokenKind::kBlockEnd) {
    if (!stmt->targets.empty()) expect_operator(",");
    stmt->targets.push_back(parse_target(false, nullptr));
    expect_operator("=");
    stmt->values.push_back(parse_expression());
  }
  stmt->body = parse_block_body({"endwith"});
  next();
  return stmt;
}

std::unique_ptr<Stmt> Parser::parse_print() {
  auto stmt = statement(StmtKind::kOutput, next().line);
  stmt->escaping = escaping_;
  while (current().kind != TokenKind::kBlockEnd) {
    if (!stmt->values.empty()) expect_operator(",");
    stmt->values.push_back(parse_expression());
  }
  return stmt;
}

std::unique_ptr<Stmt> Parser::parse_generation() {
  auto stmt = statement(StmtKind::kGeneration, next().line);
  int loops = std::exchange(loops_, 0);  // its body is a function of its own in jinja2
  stmt->body = parse_block_body({"endgeneration"});
  next();
  loops_ = loops;
  return stmt;
}

std::unique_ptr<Stmt> Parser::parse_autoescape() {
  auto stmt = statement(StmtKind::kAutoescape, next().line);
  stmt->value = parse_expression();
  Escaping inside = Escaping::kAsNow;  // and so for all statements inside of one that is
  if (stmt->value->kind == ExprKind::kConstant && escaping_ != Escaping::kAsNow) {
    inside = truthy(stmt->value->constant) ? Escaping::kAlways : Escaping::kNever;
  }
  const Escaping around = std::exchange(escaping_, inside);
  stmt->body = parse_block_body({"endautoescape"});
  next();
  escaping_ = around;
  return stmt;
}

std::unique_ptr<Stmt> Parser::parse_loop_control(StmtKind kind) {
  if (loops_ == 0) error(fmt::format("'{}' outside a loop", current().text));
  return statement(kind, next().line);
}

// A name, ns.attribute or a tuple of them; the tuple ends before the name `end_name`.
ExprPtr Parser::parse_target(bool with_namespace, const char* end_name) {
  int line = current().line;
  auto tuple = make(ExprKind::kTuple, line);
  bool is_tuple = false;
  for (;;) {
    if (is_tuple && (at_end_of_code() || at_operator(")") || at_operator("=") ||
                     (end_name != nullptr && at_name(end_name)))) {
      break;
    }
    tuple->args.push_back(parse_primary(with_namespace));
    if (!skip_operator(",")) break;
    is_tuple = true;
  }
  ExprPtr target = is_tuple ? finish(std::move(tuple)) : std::move(tuple->args[0]);
  check_target(*target);
  return target;
}

void Parser::check_target(const Expr& target) {
  switch (target.kind) {
    case ExprKind::kName:
    case ExprKind::kNamespaceRef:
      return;
    case ExprKind::kTuple:
      for (const ExprPtr& part : target.args) check_target(*part);
      return;
    default:
      error_at(target.line,
               "can only assign to a name, to an attribute of a namespace or to a tuple of them");
  }
}

}  // namespace millrace::jinja
