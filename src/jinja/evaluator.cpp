// Statements; expressions and calls are in evaluator_expr.cpp.
#include "jinja/evaluator.h"

#include <cstdint>
#include <utility>

#include "jinja/print.h"
#include "jinja/value.h"

namespace millrace::jinja {

Evaluator::~Evaluator() {
  for (const auto& scope : macro_scopes_) scope->variables.clear();
}

Evaluator::Depth::Depth(Evaluator& evaluator_in) : evaluator(evaluator_in) {
  if (evaluator.depth_ >= kMaxDepth) fail("the template recurses deeper than {} levels", kMaxDepth);
  ++evaluator.depth_;
}

std::string Evaluator::run(const Body& body) {
  Capture capture(*this);
  execute(body);
  return std::move(capture.text);
}

void Evaluator::write(std::string_view text) {
  Budget::check_text(out_->size() + text.size() > Budget::kMaxText ? Budget::kMaxText + 1 : text.size());
  *out_ += text;
}

Evaluator::Flow Evaluator::execute(const Body& body) {
  for (const auto& stmt : body) {
    Flow flow = execute(*stmt);
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Evaluator::Flow Evaluator::execute(const Stmt& stmt) {
  Depth depth(*this);
  Budget::spend(1);
  line_ = stmt.line;
  switch (stmt.kind) {
    case StmtKind::kText:
      write(stmt.text);
      break;
    case StmtKind::kOutput:
      for (const ExprPtr& value : stmt.values) {
        Value result = evaluate(*value);
        if (escapes(stmt.escaping))
          write(escaped_text(result));
        else if (result.is_string())
          write(result.text());
        else
          write(to_text(result));
      }
      break;
    case StmtKind::kIf:
      return execute_if(stmt);
    case StmtKind::kFor:
      return execute_for(stmt);
    case StmtKind::kSet:
      assign(*stmt.target, evaluate(*stmt.value));
      break;
    case StmtKind::kSetBlock:
    case StmtKind::kFilter:
      return execute_captured(stmt);
    case StmtKind::kMacro:
      define_macro(stmt);
      break;
    case StmtKind::kCall:
      execute_call(stmt);
      break;
    case StmtKind::kWith:
      return execute_with(stmt);
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
    case StmtKind::kGeneration: {
      Inner inner(*this, scope_);
      return execute(stmt.body);
    }
    case StmtKind::kAutoescape:
      return execute_autoescape(stmt);
  }
  return Flow::kNormal;
}

Evaluator::Flow Evaluator::execute_autoescape(const Stmt& stmt) {
  struct Until {
    ~Until() { state.autoescape = saved; }
    RenderState& state;
    bool saved;
  } until{state_, state_.autoescape};
  Inner inner(*this, scope_);
  state_.autoescape = truthy(evaluate(*stmt.value));
  return execute(stmt.body);
}

Evaluator::Flow Evaluator::execute_if(const Stmt& stmt) {
  for (const Branch& branch : stmt.branches) {
    if (branch.test == nullptr || truthy(evaluate(*branch.test))) return execute(branch.body);
  }
  return Flow::kNormal;
}

Evaluator::Flow Evaluator::execute_for(const Stmt& stmt) {
  run_loop(stmt, scope_, evaluate(*stmt.value), 0);
  return Flow::kNormal;
}

void Evaluator::run_loop(const Stmt& stmt, std::shared_ptr<Scope> outer, const Value& iterable,
                         int64_t depth0) {
  auto loop = std::make_shared<LoopObject>(*this, stmt, outer, iterate(iterable), depth0);
  struct End {
    ~End() { loop.end(); }
    LoopObject& loop;
  } end{*loop};
  bool completed = false;  // as in jinja2, an iteration that breaks or continues does not keep else away
  while (loop->advance()) {
    Inner inner(*this, outer);
    scope_->set("loop", Value::object(Kind::kLoop, loop));
    assign(*stmt.target, loop->current);
    Flow flow = execute(stmt.body);
    if (flow == Flow::kBreak) break;
    completed = completed || flow == Flow::kNormal;
  }
  if (!completed && !stmt.otherwise.empty()) {
    Inner inner(*this, std::move(outer));
    execute(stmt.otherwise);
  }
}

bool Evaluator::passes(const LoopObject& loop, const Value& item) {
  Inner inner(*this, loop.scope);
  assign(*loop.statement->target, item);
  return truthy(evaluate(*loop.statement->test));
}

Evaluator::Flow Evaluator::execute_with(const Stmt& stmt) {
  std::vector<Value> values = evaluate_all(stmt.values);
  Inner inner(*this, scope_);
  for (size_t i = 0; i < values.size(); ++i) assign(*stmt.targets[i], std::move(values[i]));
  return execute(stmt.body);
}

// {% set x %}...{% endset %} and {% filter f %}...{% endfilter %}.
Evaluator::Flow Evaluator::execute_captured(const Stmt& stmt) {
  Value text;
  {
    Inner inner(*this, scope_);
    Capture capture(*this);
    Flow flow = execute(stmt.body);
    if (flow != Flow::kNormal) return flow;  // a break drops what was captured, as in jinja2
    const bool markup = stmt.value != nullptr && escapes(stmt.escaping);  // what a filter is given
    text = Value::string(std::move(capture.text), markup);
  }
  if (stmt.value != nullptr) text = evaluate_filter(*stmt.value, &text);
  if (stmt.kind == StmtKind::kSetBlock && state_.autoescape) text = Value::string(to_text(text), true);
  if (stmt.kind == StmtKind::kSetBlock)
    assign(*stmt.target, std::move(text));
  else
    write(to_text(text));
  return Flow::kNormal;
}

void Evaluator::define_macro(const Stmt& stmt) {
  if (macro_scopes_.empty() || macro_scopes_.back() != scope_) macro_scopes_.push_back(scope_);
  scope_->set(stmt.text, Value::object(Kind::kMacro, std::make_shared<MacroObject>(stmt, scope_)));
}

void Evaluator::execute_call(const Stmt& stmt) {
  const Expr& expr = *stmt.value;
  Value callee = evaluate(*expr.args[0]);
  Arguments arguments = evaluate_arguments(expr);
  Value caller = Value::object(Kind::kMacro, std::make_shared<MacroObject>(stmt, scope_));
  arguments.keyword.emplace_back("caller", std::move(caller));
  write(to_text(call(callee, std::move(arguments))));
}

void Evaluator::assign(const Expr& target, Value value) {
  if (target.kind == ExprKind::kName) {
    scope_->set(target.name, std::move(value));
  } else if (target.kind == ExprKind::kTuple) {
    assign_tuple(target, value);
  } else {
    line_ = target.line;
    const Value* object = scope_->find(target.name);
    if (object == nullptr || !object->is(Kind::kNamespace)) {
      fail("cannot assign attribute '{}' on non-namespace object '{}'", target.attribute, target.name);
    }
    if (target.attribute.starts_with('_')) {
      fail("cannot store the underscore-prefixed attribute '{}' on a namespace", target.attribute);
    }
    object->as_namespace().set(target.attribute, std::move(value));
  }
}

void Evaluator::assign_tuple(const Expr& target, const Value& value) {
  if (!is_iterable(value)) fail("cannot unpack non-iterable {} object", type_name(value));
  std::vector<Value> items = iterate(value);
  size_t expected = target.args.size();
  if (items.size() > expected) fail("too many values to unpack (expected {})", expected);
  if (items.size() < expected)
    fail("not enough values to unpack (expected {}, got {})", expected, items.size());
  for (size_t i = 0; i < expected; ++i) assign(*target.args[i], std::move(items[i]));
}

const Value* Scope::find(std::string_view name) const {
  for (const Scope* scope = this; scope != nullptr; scope = scope->parent.get()) {
    for (const auto& [key, value] : scope->variables) {
      if (key == name) return &value;
    }
  }
  return nullptr;
}

void Scope::set(std::string_view name, Value value) {
  for (auto& [key, old] : variables) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  held += Budget::hold(sizeof(variables[0]));
  variables.emplace_back(name, std::move(value));
}

}  // namespace millrace::jinja
