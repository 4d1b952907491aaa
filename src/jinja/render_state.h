// The stateful values of a running template: variable scopes, macros (closures over a scope) and the loop
// variable.
#pragma once

#include <ctime>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/ast.h"
#include "jinja/value.h"

namespace millrace::jinja {

class Evaluator;

// Names are views into the template's tree or the render's variables, which outlive every scope.
struct Scope : Object {
  explicit Scope(std::shared_ptr<Scope> parent_in) : Object(sizeof(Scope), 0), parent(std::move(parent_in)) {}
  const Value* find(std::string_view name) const;
  void set(std::string_view name, Value value);
  std::shared_ptr<Scope> parent;
  std::vector<std::pair<std::string_view, Value>> variables;
};

// The scope is held weakly: it holds the macro. The evaluator keeps the scopes of named macros to the end.
struct MacroObject : Object {
  MacroObject(const Stmt& definition_in, std::weak_ptr<Scope> scope_in)
      : Object(sizeof(MacroObject), 1), definition(&definition_in), scope(std::move(scope_in)) {}
  const Stmt* definition;
  std::weak_ptr<Scope> scope;
};

// One running for statement. Items that pass the loop's own test are found one ahead at most, as jinja2 does:
// the test may depend on what the body has done.
struct LoopObject : Object {
  LoopObject(Evaluator& evaluator_in, const Stmt& statement_in, std::shared_ptr<Scope> scope_in,
             std::vector<Value> source_in, int64_t depth0_in);
  bool advance();                // to the next item; false at the end
  bool has_next();               // looks one ahead
  int64_t length();              // looks at everything
  void end() { scope.reset(); }  // breaks the cycle scope -> loop -> scope

  Evaluator* evaluator;
  const Stmt* statement;
  std::shared_ptr<Scope> scope;  // where the for statement stands; null when it is over
  std::vector<Value> source;
  size_t source_position = 0;
  std::deque<Value> ahead;
  int64_t index0 = -1, depth0;
  Value current, before;
  std::vector<Value> last_changed;
  bool has_changed = false;

 private:
  bool pull();
};

// What lives as long as one render.
struct RenderState {
  RenderState() = default;
  ~RenderState();
  RenderState(const RenderState&) = delete;
  RenderState& operator=(const RenderState&) = delete;
  std::optional<std::time_t> now;  // what strftime_now says; the clock otherwise
  bool autoescape = false;         // as the autoescape statement that is being executed says
  // Namespaces and loop.changed() can hold themselves: they are emptied at the end.
  std::vector<std::shared_ptr<NamespaceObject>> namespaces;
  std::vector<Value> changed_loops;
};

std::string macro_name(const Value& macro);
std::string loop_repr(const Value& loop);
// loop.index and its like; null where there is no such attribute.
std::optional<Value> loop_attribute(const Value& loop, std::string_view name);

}  // namespace millrace::jinja
