// Expressions, calls and macros; statements are in evaluator.cpp.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/ast.h"
#include "jinja/evaluator.h"
#include "jinja/globals.h"
#include "jinja/lookup.h"
#include "jinja/methods.h"
#include "jinja/operators.h"
#include "jinja/print.h"
#include "jinja/render_state.h"
#include "jinja/value.h"

namespace millrace::jinja {

Value Evaluator::evaluate(const Expr& expr) {
  if (expr.kind == ExprKind::kConstant) return expr.constant;
  Depth depth(*this);
  Budget::spend(1);
  line_ = expr.line;
  return evaluate_node(expr);
}

Value Evaluator::evaluate_node(const Expr& expr) {
  switch (expr.kind) {
    case ExprKind::kConstant:
      return expr.constant;
    case ExprKind::kName:
      return evaluate_name(expr);
    case ExprKind::kList:
      return Value::list(evaluate_all(expr.args));
    case ExprKind::kTuple:
      return Value::tuple(evaluate_all(expr.args));
    case ExprKind::kDict:
      return evaluate_dict(expr);
    case ExprKind::kAttribute:
      return get_attribute(evaluate(*expr.args[0]), expr.attribute);
    case ExprKind::kItem:
      return evaluate_item(expr);
    case ExprKind::kCall:
      return evaluate_call(expr);
    case ExprKind::kFilter:
      return evaluate_filter(expr);
    case ExprKind::kTest:
      return evaluate_test(expr);
    case ExprKind::kUnary:
      return unary_operator(expr.op, evaluate(*expr.args[0]));
    case ExprKind::kBinary: {
      Value left = evaluate(*expr.args[0]);
      Value right = evaluate(*expr.args[1]);
      line_ = expr.line;
      return binary_operator(expr.op, left, right);
    }
    case ExprKind::kAnd: {
      Value left = evaluate(*expr.args[0]);
      return truthy(left) ? evaluate(*expr.args[1]) : left;
    }
    case ExprKind::kOr: {
      Value left = evaluate(*expr.args[0]);
      return truthy(left) ? left : evaluate(*expr.args[1]);
    }
    case ExprKind::kCompare:
      return evaluate_compare(expr);
    case ExprKind::kConcat:
      return evaluate_concat(expr);
    case ExprKind::kCondition:
      if (truthy(evaluate(*expr.args[1]))) return evaluate(*expr.args[0]);
      if (expr.args[2] != nullptr) return evaluate(*expr.args[2]);
      return Value::undefined("the inline if-expression evaluated to false and no else section was defined.");
    case ExprKind::kSlice:
      fail_unsupported("a slice inside a tuple of subscripts");
    case ExprKind::kNamespaceRef:
      break;
  }
  fail("an attribute of a namespace can only be the target of set");
}

Value Evaluator::evaluate_name(const Expr& expr) {
  if (const Value* value = scope_->find(expr.name)) return *value;
  if (Native global = find_global(expr.name)) {
    return Value::object(Kind::kFunction, std::make_shared<FunctionObject>(expr.name, global, Value()));
  }
  return Value::undefined("'" + expr.name + "' is undefined");
}

std::vector<Value> Evaluator::evaluate_all(const std::vector<ExprPtr>& exprs, size_t from) {
  std::vector<Value> values;
  values.reserve(exprs.size() - std::min(from, exprs.size()));
  for (size_t i = from; i < exprs.size(); ++i) values.push_back(evaluate(*exprs[i]));
  return values;
}

Value Evaluator::evaluate_dict(const Expr& expr) {
  auto dict = std::make_shared<DictObject>();
  for (size_t i = 0; i + 1 < expr.args.size(); i += 2) {
    Value key = evaluate(*expr.args[i]);
    dict->insert(std::move(key), evaluate(*expr.args[i + 1]));
  }
  return Value::object(Kind::kDict, std::move(dict));
}

Value Evaluator::evaluate_item(const Expr& expr) {
  Value object = evaluate(*expr.args[0]);
  const Expr& index = *expr.args[1];
  if (index.kind != ExprKind::kSlice) return get_item(object, evaluate(index));
  auto bound = [&](size_t i) { return index.args[i] == nullptr ? Value::none() : evaluate(*index.args[i]); };
  Value start = bound(0), stop = bound(1), step = bound(2);
  return get_slice(object, start, stop, step);
}

namespace {

bool compare(CompareOp op, const Value& a, const Value& b) {
  switch (op) {
    case CompareOp::kEqual:
      return equal(a, b);
    case CompareOp::kNotEqual:
      return !equal(a, b);
    case CompareOp::kLess:
      return less_than(a, b, "<");
    case CompareOp::kLessEqual:
      return less_than(a, b, "<=");
    case CompareOp::kGreater:
      return less_than(b, a, ">");
    case CompareOp::kGreaterEqual:
      return less_than(b, a, ">=");
    case CompareOp::kIn:
      return contains(b, a);
    case CompareOp::kNotIn:
      return !contains(b, a);
  }
  return false;
}

}  // namespace

Value Evaluator::evaluate_compare(const Expr& expr) {
  Value left = evaluate(*expr.args[0]);
  for (size_t i = 0; i < expr.ops.size(); ++i) {
    Value right = evaluate(*expr.args[i + 1]);
    if (!compare(expr.ops[i], left, right)) return Value::boolean(false);
    left = std::move(right);
  }
  return Value::boolean(true);
}

Value Evaluator::evaluate_concat(const Expr& expr) {
  if (expr.escaping == Escaping::kAlways) return join_markup("", evaluate_all(expr.args), false);
  std::string text;
  for (const ExprPtr& arg : expr.args) {
    Value value = evaluate(*arg);
    if (value.is_string())
      text += value.text();
    else
      text += to_text(value);
    if (text.size() > Budget::kMaxText) Budget::check_text(text.size());
  }
  return Value::string(std::move(text));
}

Arguments Evaluator::evaluate_arguments(const Expr& call) {
  Arguments arguments;
  arguments.positional = evaluate_all(call.args, 1);
  for (const auto& [name, value] : call.keyword) arguments.keyword.emplace_back(name, evaluate(*value));
  if (call.star != nullptr) {
    for (Value& value : iterate(evaluate(*call.star))) arguments.positional.push_back(std::move(value));
  }
  if (call.star_star != nullptr) {
    Value extra = evaluate(*call.star_star);
    if (!extra.is(Kind::kDict)) fail("argument after ** must be a mapping, not {}", type_name(extra));
    for (const auto& [key, value] : extra.dict().entries) {
      if (!key.is_string()) fail("keywords must be strings");
      arguments.keyword.emplace_back(key.text(), value);
    }
  }
  return arguments;
}

Value Evaluator::evaluate_call(const Expr& expr) {
  const Expr& callee = *expr.args[0];
  if (callee.kind == ExprKind::kAttribute) {  // a method call needs no bound method
    Value object = evaluate(*callee.args[0]);
    if (Native method = find_method(object, callee.attribute)) {
      Arguments arguments = evaluate_arguments(expr);
      line_ = expr.line;
      return method(state_, object, arguments);
    }
    Value function = get_attribute(object, callee.attribute);
    Arguments arguments = evaluate_arguments(expr);
    line_ = expr.line;
    return call(function, std::move(arguments));
  }
  Value function = evaluate(callee);
  Arguments arguments = evaluate_arguments(expr);
  line_ = expr.line;
  return call(function, std::move(arguments));
}

Value Evaluator::evaluate_filter(const Expr& expr, const Value* block_text) {
  Depth depth(*this);
  Value input;
  if (expr.args[0] == nullptr) {
    if (block_text != nullptr) input = *block_text;
  } else if (block_text != nullptr) {
    input = evaluate_filter(*expr.args[0], block_text);
  } else {
    input = evaluate(*expr.args[0]);
  }
  Arguments arguments = evaluate_arguments(expr);
  line_ = expr.line;
  if (expr.native == nullptr) fail_unsupported("the filter '{}'", expr.name);
  return expr.native(state_, input, arguments);
}

Value Evaluator::evaluate_test(const Expr& expr) {
  Value input = evaluate(*expr.args[0]);
  Arguments arguments = evaluate_arguments(expr);
  line_ = expr.line;
  if (expr.native == nullptr) fail_unsupported("the test '{}'", expr.name);
  return expr.native(state_, input, arguments);
}

Value Evaluator::call(const Value& callee, Arguments arguments) {
  Depth depth(*this);
  switch (callee.kind()) {
    case Kind::kFunction:
      return callee.function().native(state_, callee.function().self, arguments);
    case Kind::kMacro:
      return call_macro(callee.as<MacroObject>(), std::move(arguments));
    case Kind::kLoop: {
      LoopObject& loop = callee.as<LoopObject>();
      if (!loop.statement->recursive)
        fail("The loop must have the 'recursive' marker to be called recursively.");
      if (arguments.positional.size() != 1 || loop.scope == nullptr)
        fail("loop() takes one argument, inside its loop");
      Capture capture(*this);
      run_loop(*loop.statement, loop.scope, arguments.positional[0], loop.depth0 + 1);
      return Value::string(std::move(capture.text), escapes(loop.statement->escaping));
    }
    case Kind::kUndefined:
      fail_undefined(callee);
    default:
      fail("'{}' object is not callable", type_name(callee));
  }
}

Value Evaluator::call_macro(const MacroObject& macro, Arguments arguments) {
  const Stmt& definition = *macro.definition;
  std::shared_ptr<Scope> parent = macro.scope.lock();
  if (parent == nullptr) fail("a caller() is called after its call block has ended");
  int line = line_;
  Inner inner(*this, std::move(parent));
  Capture capture(*this);
  bind_macro(definition, arguments);
  execute(definition.body);
  line_ = line;
  return Value::string(std::move(capture.text), state_.autoescape);  // as it is where it is called
}

namespace {

std::optional<Value> take_keyword(Arguments& arguments, std::string_view name) {
  auto& keyword = arguments.keyword;
  auto it =
      std::find_if(keyword.begin(), keyword.end(), [&](const auto& entry) { return entry.first == name; });
  if (it == keyword.end()) return std::nullopt;
  Value value = std::move(it->second);
  keyword.erase(it);
  return value;
}

std::string macro_title(const Stmt& definition) {
  return definition.kind == StmtKind::kMacro ? "'" + definition.text + "'" : "None";
}

}  // namespace

// Parameters into the macro's own scope, which is the current one.
void Evaluator::bind_macro(const Stmt& definition, Arguments& arguments) {
  const Signature& signature = definition.signature;
  size_t count = signature.parameters.size(), first_default = count - signature.defaults.size();
  for (size_t i = 0; i < count; ++i) {
    const std::string& name = signature.parameters[i];
    if (i < arguments.positional.size()) {
      scope_->set(name, arguments.positional[i]);
    } else if (std::optional<Value> value = take_keyword(arguments, name)) {
      scope_->set(name, std::move(*value));
    } else if (i >= first_default) {
      scope_->set(name, evaluate(*signature.defaults[i - first_default]));
    } else {
      scope_->set(name, Value::undefined("parameter '" + name + "' was not provided"));
    }
  }
  bind_specials(definition, arguments);
}

void Evaluator::bind_specials(const Stmt& definition, Arguments& arguments) {
  const Signature& signature = definition.signature;
  size_t count = signature.parameters.size();
  bool explicit_caller = std::find(signature.parameters.begin(), signature.parameters.end(), "caller") !=
                         signature.parameters.end();
  if (signature.uses_caller && !explicit_caller) {
    std::optional<Value> caller = take_keyword(arguments, "caller");
    scope_->set("caller", caller ? std::move(*caller) : Value::undefined("No caller defined"));
  }
  if (signature.uses_kwargs) {
    auto dict = std::make_shared<DictObject>();
    for (auto& [key, value] : arguments.keyword) dict->insert(Value::string(key), value);
    scope_->set("kwargs", Value::object(Kind::kDict, std::move(dict)));
  } else if (!arguments.keyword.empty()) {
    fail("macro {} takes no keyword argument '{}'", macro_title(definition), arguments.keyword[0].first);
  }
  if (signature.uses_varargs) {
    auto from =
        arguments.positional.begin() + static_cast<ptrdiff_t>(std::min(count, arguments.positional.size()));
    scope_->set("varargs", Value::tuple({from, arguments.positional.end()}));
  } else if (arguments.positional.size() > count) {
    fail("macro {} takes not more than {} argument(s)", macro_title(definition), count);
  }
}

}  // namespace millrace::jinja
