// The methods of dict, list, tuple, float and the loop variable.
#include "jinja/methods.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "jinja/bound_arguments.h"
#include "jinja/native_table.h"
#include "jinja/print.h"
#include "jinja/render_state.h"
#include "jinja/text_methods.h"

namespace millrace::jinja {

namespace {

// Methods of dict.

Value dict_get(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("get", arguments, {"key", "default"}, 1);
  if (const Value* value = self.dict().find(*args[0])) return *value;
  return args[1] == nullptr ? Value::none() : *args[1];
}

Value dict_items(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("items", arguments, {});
  std::vector<Value> pairs;
  for (const auto& [key, value] : self.dict().entries) pairs.push_back(Value::tuple({key, value}));
  return Value::sequence(Kind::kView, std::move(pairs), "dict_items");
}

Value dict_keys(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("keys", arguments, {});
  return Value::sequence(Kind::kView, iterate(self), "dict_keys");
}

Value dict_values(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("values", arguments, {});
  std::vector<Value> values;
  for (const auto& entry : self.dict().entries) values.push_back(entry.second);
  return Value::sequence(Kind::kView, std::move(values), "dict_values");
}

Value copy(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("copy", arguments, {});
  return self;  // nothing can change it
}

// Methods of list and tuple.

Value list_count(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("count", arguments, {"value"}, 1);
  auto is_it = [&](const Value& item) { return equal(item, *args[0]); };
  return Value::integer(std::count_if(self.items().begin(), self.items().end(), is_it));
}

Value list_index(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("index", arguments, {"value"}, 1);
  for (size_t i = 0; i < self.items().size(); ++i) {
    if (equal(self.items()[i], *args[0])) return Value::integer(static_cast<int64_t>(i));
  }
  fail("{} is not in list", repr(*args[0]));
}

// Methods of the loop variable.

Value loop_cycle(RenderState&, const Value& self, const Arguments& arguments) {
  if (arguments.positional.empty()) fail("no items for cycling given");
  auto index = static_cast<size_t>(std::max<int64_t>(self.as<LoopObject>().index0, 0));
  return arguments.positional[index % arguments.positional.size()];
}

Value loop_changed(RenderState& state, const Value& self, const Arguments& arguments) {
  LoopObject& loop = self.as<LoopObject>();
  const auto &old = loop.last_changed, &now = arguments.positional;
  bool same =
      loop.has_changed && old.size() == now.size() && std::equal(old.begin(), old.end(), now.begin(), equal);
  if (same) return Value::boolean(false);
  if (!loop.has_changed) state.changed_loops.push_back(self);
  loop.last_changed = now;
  loop.has_changed = true;
  return Value::boolean(true);
}

Value float_is_integer(RenderState&, const Value& self, const Arguments&) {
  return Value::boolean(self.as_double() == static_cast<double>(static_cast<long long>(
                                                std::clamp(self.as_double(), -9e18, 9e18))));
}

}  // namespace

Native find_method(const Value& self, std::string_view name) {
  static const NativeTable kDict = {
      {"get", dict_get}, {"items", dict_items}, {"keys", dict_keys}, {"values", dict_values}, {"copy", copy}};
  static const NativeTable kList = {{"count", list_count}, {"index", list_index}, {"copy", copy}};
  static const NativeTable kTuple = {{"count", list_count}, {"index", list_index}};
  static const NativeTable kLoop = {{"cycle", loop_cycle}, {"changed", loop_changed}};
  static const NativeTable kFloat = {{"is_integer", float_is_integer}};
  switch (self.kind()) {
    case Kind::kString:
      return find_text_method(name);
    case Kind::kDict:
      return look_up(kDict, name);
    case Kind::kList:
      return look_up(kList, name);
    case Kind::kTuple:
      return look_up(kTuple, name);
    case Kind::kLoop:
      return look_up(kLoop, name);
    case Kind::kFloat:
      return look_up(kFloat, name);
    default:
      return nullptr;
  }
}

bool is_mutating_method(const Value& self, std::string_view name) {
  auto is_one_of = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (self.is(Kind::kList)) {
    return is_one_of({"append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"});
  }
  return self.is(Kind::kDict) && is_one_of({"clear", "pop", "popitem", "setdefault", "update"});
}

}  // namespace millrace::jinja
