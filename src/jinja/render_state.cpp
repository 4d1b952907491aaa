// The loop variable and what else keeps state; see render_state.h.
#include "jinja/render_state.h"

#include <fmt/core.h>

#include <cstdint>
#include <optional>

#include "jinja/evaluator.h"

namespace millrace::jinja {

LoopObject::LoopObject(Evaluator& evaluator_in, const Stmt& statement_in, std::shared_ptr<Scope> scope_in,
                       std::vector<Value> source_in, int64_t depth0_in)
    : Object(sizeof(LoopObject) + source_in.size() * sizeof(Value), max_depth(source_in) + 1),
      evaluator(&evaluator_in),
      statement(&statement_in),
      scope(std::move(scope_in)),
      source(std::move(source_in)),
      depth0(depth0_in) {}

// The next item that passes the test goes to `ahead`.
bool LoopObject::pull() {
  if (scope == nullptr) return false;
  while (source_position < source.size()) {
    Budget::spend(1);
    Value item = source[source_position++];
    if (statement->test != nullptr && !evaluator->passes(*this, item)) continue;
    ahead.push_back(std::move(item));
    return true;
  }
  return false;
}

bool LoopObject::has_next() { return !ahead.empty() || pull(); }

bool LoopObject::advance() {
  if (!has_next()) return false;
  before = std::move(current);
  current = std::move(ahead.front());
  ahead.pop_front();
  ++index0;
  return true;
}

int64_t LoopObject::length() {
  if (statement->test == nullptr) return static_cast<int64_t>(source.size());
  while (pull()) {
  }
  return index0 + 1 + static_cast<int64_t>(ahead.size());
}

RenderState::~RenderState() {
  for (const auto& space : namespaces) space->attributes.clear();
  for (const Value& loop : changed_loops) loop.as<LoopObject>().last_changed.clear();
}

std::string macro_name(const Value& macro) {
  const Stmt& definition = *macro.as<MacroObject>().definition;
  return definition.kind == StmtKind::kMacro ? definition.text : "caller";
}

std::string loop_repr(const Value& loop) {
  LoopObject& object = loop.as<LoopObject>();
  return fmt::format("<LoopContext {}/{}>", object.index0 + 1, object.length());
}

std::optional<Value> loop_attribute(const Value& value, std::string_view name) {
  LoopObject& loop = value.as<LoopObject>();
  if (name == "index") return Value::integer(loop.index0 + 1);
  if (name == "index0") return Value::integer(loop.index0);
  if (name == "first") return Value::boolean(loop.index0 == 0);
  if (name == "last") return Value::boolean(!loop.has_next());
  if (name == "length") return Value::integer(loop.length());
  if (name == "revindex") return Value::integer(loop.length() - loop.index0);
  if (name == "revindex0") return Value::integer(loop.length() - loop.index0 - 1);
  if (name == "depth") return Value::integer(loop.depth0 + 1);
  if (name == "depth0") return Value::integer(loop.depth0);
  if (name == "previtem")
    return loop.index0 == 0 ? Value::undefined("there is no previous item") : loop.before;
  if (name == "nextitem")
    return loop.has_next() ? loop.ahead.front() : Value::undefined("there is no next item");
  return std::nullopt;
}

}  // namespace millrace::jinja
