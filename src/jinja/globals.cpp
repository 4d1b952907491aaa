// The global functions; those of jinja2 that no chat template calls are refused by name.
#include "jinja/globals.h"

#include <fmt/core.h>

#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "jinja/bound_arguments.h"
#include "jinja/native_table.h"
#include "jinja/print.h"
#include "jinja/python_format.h"
#include "jinja/render_state.h"

namespace millrace::jinja {

namespace {

// jinja2's sandbox allows ranges up to this long.
constexpr int64_t kMaxRange = 100'000;

Value global_range(RenderState&, const Value&, const Arguments& arguments) {
  if (arguments.positional.empty()) fail("range expected at least 1 argument, got 0");
  Bound args("range", arguments, {"start", "stop", "step"});
  int64_t start = args[1] == nullptr ? 0 : to_index(*args[0]);
  int64_t stop = to_index(args[1] == nullptr ? *args[0] : *args[1]);
  int64_t step = args[2] == nullptr ? 1 : to_index(*args[2]);
  if (step == 0) fail("range() arg 3 must not be zero");
  bool empty = step > 0 ? start >= stop : start <= stop;
  uint64_t distance = step > 0 ? static_cast<uint64_t>(stop) - static_cast<uint64_t>(start)
                               : static_cast<uint64_t>(start) - static_cast<uint64_t>(stop);
  uint64_t stride = step > 0 ? static_cast<uint64_t>(step) : 0 - static_cast<uint64_t>(step);
  uint64_t count = empty ? 0 : (distance - 1) / stride + 1;
  if (count > kMaxRange)
    fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({}).", kMaxRange);
  std::vector<Value> items;
  for (uint64_t i = 0; i < count; ++i) {
    items.push_back(
        Value::integer(static_cast<int64_t>(static_cast<uint64_t>(start) + i * static_cast<uint64_t>(step))));
  }
  std::string label = step == 1 ? fmt::format("range({}, {})", start, stop)
                                : fmt::format("range({}, {}, {})", start, stop, step);
  return Value::sequence(Kind::kRange, std::move(items), std::move(label));
}

// dict(mapping or pairs, key=value, ...)
std::shared_ptr<DictObject> make_dict(const Arguments& arguments) {
  auto dict = std::make_shared<DictObject>();
  if (arguments.positional.size() > 1)
    fail("dict expected at most 1 argument, got {}", arguments.positional.size());
  for (const Value& source : arguments.positional) {
    if (source.is(Kind::kDict)) {
      for (const auto& [key, value] : source.dict().entries) dict->insert(key, value);
      continue;
    }
    for (const Value& pair : iterate(source)) {
      std::vector<Value> parts = iterate(pair);
      if (parts.size() != 2)
        fail("dictionary update sequence element has length {}; 2 is required", parts.size());
      dict->insert(parts[0], parts[1]);
    }
  }
  for (const auto& [key, value] : arguments.keyword) dict->insert(Value::string(key), value);
  return dict;
}

Value global_dict(RenderState&, const Value&, const Arguments& arguments) {
  return Value::object(Kind::kDict, make_dict(arguments));
}

Value global_namespace(RenderState& state, const Value&, const Arguments& arguments) {
  auto space = std::make_shared<NamespaceObject>();
  const std::shared_ptr<DictObject> initial = make_dict(arguments);
  for (const auto& [key, value] : initial->entries) {
    std::string name = to_text(key);
    if (name.starts_with('_'))
      fail("cannot store the underscore-prefixed attribute '{}' on a namespace", name);
    space->set(name, value);
  }
  state.namespaces.push_back(space);
  return Value::object(Kind::kNamespace, space);
}

Value global_raise_exception(RenderState&, const Value&, const Arguments& arguments) {
  Bound args("raise_exception", arguments, {"message"}, 1);
  fail("{}", to_text(*args[0]));
}

Value global_strftime_now(RenderState& state, const Value&, const Arguments& arguments) {
  Bound args("strftime_now", arguments, {"format"}, 1);
  if (!args[0]->is_string()) fail("strftime_now() argument must be str, not {}", type_name(*args[0]));
  return Value::string(format_time(args[0]->text(), state.now.value_or(std::time(nullptr))));
}

Value global_missing(RenderState&, const Value&, const Arguments&) {
  fail_unsupported("the function lipsum");
}

// An object with state is a namespace, which its functions hold. They hold one another: emptied at the end.
std::shared_ptr<NamespaceObject> new_state(RenderState& state) {
  auto space = std::make_shared<NamespaceObject>();
  state.namespaces.push_back(space);
  return space;
}
Value bound_function(const char* name, Native native, const std::shared_ptr<NamespaceObject>& self) {
  return Value::object(Kind::kFunction,
                       std::make_shared<FunctionObject>(name, native, Value::object(Kind::kNamespace, self)));
}

// joiner(sep): nothing when it is called first, then the separator.
Value joiner_call(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("joiner", arguments, {});
  NamespaceObject& state = self.as_namespace();
  if (truthy(*state.find("used"))) return *state.find("sep");
  state.set("used", Value::boolean(true));
  return Value::string("");
}

Value global_joiner(RenderState& state, const Value&, const Arguments& arguments) {
  Bound args("joiner", arguments, {"sep"});
  const auto joiner = new_state(state);
  joiner->set("sep", args[0] == nullptr ? Value::string(", ") : *args[0]);
  joiner->set("used", Value::boolean(false));
  return bound_function("joiner", joiner_call, joiner);
}

// cycler(items...): current, next() and reset().
void cycle_to(NamespaceObject& state, size_t position) {
  const std::vector<Value>& items = state.find("items")->items();
  state.set("pos", Value::integer(static_cast<int64_t>(position % items.size())));
  state.set("current", items[position % items.size()]);
}

Value cycler_next(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("next", arguments, {});
  NamespaceObject& state = self.as_namespace();
  Value now = *state.find("current");
  cycle_to(state, static_cast<size_t>(state.find("pos")->as_int()) + 1);
  return now;
}

Value cycler_reset(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("reset", arguments, {});
  cycle_to(self.as_namespace(), 0);
  return Value::none();
}

Value global_cycler(RenderState& state, const Value&, const Arguments& arguments) {
  if (arguments.positional.empty()) fail("at least one item has to be provided");
  if (!arguments.keyword.empty())
    fail("Cycler.__init__() got an unexpected keyword argument '{}'", arguments.keyword[0].first);
  const auto cycler = new_state(state);
  cycler->set("items", Value::tuple(arguments.positional));
  cycle_to(*cycler, 0);
  cycler->set("next", bound_function("next", cycler_next, cycler));
  cycler->set("reset", bound_function("reset", cycler_reset, cycler));
  return Value::object(Kind::kNamespace, cycler);
}

}  // namespace

Native find_global(std::string_view name) {
  static const NativeTable kGlobals = {{"range", global_range},
                                       {"dict", global_dict},
                                       {"namespace", global_namespace},
                                       {"raise_exception", global_raise_exception},
                                       {"strftime_now", global_strftime_now},
                                       {"lipsum", global_missing},
                                       {"cycler", global_cycler},
                                       {"joiner", global_joiner}};
  return look_up(kGlobals, name);
}

}  // namespace millrace::jinja
