// Argument binding, the methods of containers, the tests after `is`, and the global functions.
#include "jinja/builtins.h"

#include <algorithm>

#include "jinja/python_text.h"

namespace millrace::jinja {

Bound::Bound(std::string_view function, const Arguments& arguments,
             std::initializer_list<std::string_view> parameters, size_t required)
    : values_(parameters.size(), nullptr) {
  if (arguments.positional.size() > parameters.size()) {
    fail("{}() takes at most {} arguments, {} given", function, parameters.size(),
         arguments.positional.size());
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.keyword) {
    auto it = std::find(parameters.begin(), parameters.end(), name);
    if (it == parameters.end()) fail("{}() got an unexpected keyword argument '{}'", function, name);
    const Value*& slot = values_[static_cast<size_t>(it - parameters.begin())];
    if (slot != nullptr) fail("{}() got multiple values for argument '{}'", function, name);
    slot = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (values_[i] == nullptr) fail("{}() missing the argument '{}'", function, *(parameters.begin() + i));
  }
}

namespace {

using Table = std::unordered_map<std::string_view, Native>;

Native look_up(const Table& table, std::string_view name) {
  auto it = table.find(name);
  return it == table.end() ? nullptr : it->second;
}

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
  static const Table kDict = {
      {"get", dict_get}, {"items", dict_items}, {"keys", dict_keys}, {"values", dict_values}, {"copy", copy}};
  static const Table kList = {{"count", list_count}, {"index", list_index}, {"copy", copy}};
  static const Table kTuple = {{"count", list_count}, {"index", list_index}};
  static const Table kLoop = {{"cycle", loop_cycle}, {"changed", loop_changed}};
  static const Table kFloat = {{"is_integer", float_is_integer}};
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

namespace {

// Tests. kTest<check> turns a predicate on one value into a Native.
template <bool (*kCheck)(const Value&)>
Value test(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("the test", arguments, {});
  return Value::boolean(kCheck(self));
}

template <bool (*kCheck)(const Value&, const Value&)>
Value test_with(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("the test", arguments, {"other"}, 1);
  return Value::boolean(kCheck(self, *args[0]));
}

bool is_defined(const Value& v) { return !v.is_undefined(); }
bool is_not_defined(const Value& v) { return v.is_undefined(); }
bool is_none(const Value& v) { return v.is_none(); }
bool is_bool(const Value& v) { return v.is(Kind::kBool); }
bool is_true(const Value& v) { return v.is(Kind::kBool) && v.as_int() != 0; }
bool is_false(const Value& v) { return v.is(Kind::kBool) && v.as_int() == 0; }
bool is_integer(const Value& v) { return v.is(Kind::kInt); }
bool is_float(const Value& v) { return v.is(Kind::kFloat); }
bool is_number(const Value& v) { return v.is_number(); }
bool is_text(const Value& v) { return v.is_string(); }
bool is_mapping(const Value& v) { return v.is(Kind::kDict); }
bool is_callable(const Value& v) {
  return v.is(Kind::kFunction) || v.is(Kind::kMacro) || v.is(Kind::kLoop) || v.is_undefined();
}
bool is_escaped(const Value& v) { return v.is_markup(); }
// Anything with a length and subscripts; Undefined has both.
bool is_sequence(const Value& v) { return length_of(v).has_value() && !v.is(Kind::kView); }
bool is_filter_name(const Value& v) { return v.is_string() && find_filter(v.text()) != nullptr; }
bool is_test_name(const Value& v) { return v.is_string() && find_test(v.text()) != nullptr; }
bool is_upper_text(const Value& v) {
  RenderState state;
  return truthy(find_text_method("isupper")(state, Value::string(to_text(v)), {}));
}
bool is_lower_text(const Value& v) {
  RenderState state;
  return truthy(find_text_method("islower")(state, Value::string(to_text(v)), {}));
}
bool leaves(const Value& v, int64_t divisor, int64_t rest) {
  return equal(binary_operator('%', v, Value::integer(divisor)), Value::integer(rest));
}
bool is_odd(const Value& v) { return leaves(v, 2, 1); }
bool is_even(const Value& v) { return leaves(v, 2, 0); }
bool is_divisible(const Value& v, const Value& by) {
  return equal(binary_operator('%', v, by), Value::integer(0));
}
bool is_equal(const Value& a, const Value& b) { return equal(a, b); }
bool is_unequal(const Value& a, const Value& b) { return !equal(a, b); }
bool is_less(const Value& a, const Value& b) { return less_than(a, b, "<"); }
bool is_less_equal(const Value& a, const Value& b) { return less_than(a, b, "<="); }
bool is_greater(const Value& a, const Value& b) { return less_than(b, a, ">"); }
bool is_greater_equal(const Value& a, const Value& b) { return less_than(b, a, ">="); }
bool is_in(const Value& a, const Value& b) { return contains(b, a); }
bool is_same(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  if (a.object() != nullptr || b.object() != nullptr) return a.object() == b.object();
  return a.is(Kind::kFloat) ? a.as_double() == b.as_double()
                            : a.is_undefined() || a.is_none() || a.as_int() == b.as_int();
}

}  // namespace

Native find_test(std::string_view name) {
  static const Table kTests = {{"defined", test<is_defined>},
                               {"undefined", test<is_not_defined>},
                               {"none", test<is_none>},
                               {"boolean", test<is_bool>},
                               {"true", test<is_true>},
                               {"false", test<is_false>},
                               {"integer", test<is_integer>},
                               {"float", test<is_float>},
                               {"number", test<is_number>},
                               {"string", test<is_text>},
                               {"mapping", test<is_mapping>},
                               {"iterable", test<is_iterable>},
                               {"sequence", test<is_sequence>},
                               {"callable", test<is_callable>},
                               {"escaped", test<is_escaped>},
                               {"upper", test<is_upper_text>},
                               {"lower", test<is_lower_text>},
                               {"odd", test<is_odd>},
                               {"even", test<is_even>},
                               {"filter", test<is_filter_name>},
                               {"test", test<is_test_name>},
                               {"divisibleby", test_with<is_divisible>},
                               {"==", test_with<is_equal>},
                               {"eq", test_with<is_equal>},
                               {"equalto", test_with<is_equal>},
                               {"!=", test_with<is_unequal>},
                               {"ne", test_with<is_unequal>},
                               {"<", test_with<is_less>},
                               {"lt", test_with<is_less>},
                               {"lessthan", test_with<is_less>},
                               {"<=", test_with<is_less_equal>},
                               {"le", test_with<is_less_equal>},
                               {">", test_with<is_greater>},
                               {"gt", test_with<is_greater>},
                               {"greaterthan", test_with<is_greater>},
                               {">=", test_with<is_greater_equal>},
                               {"ge", test_with<is_greater_equal>},
                               {"in", test_with<is_in>},
                               {"sameas", test_with<is_same>}};
  return look_up(kTests, name);
}

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
  fail_unsupported("the function lipsum, cycler or joiner");
}

}  // namespace

Native find_global(std::string_view name) {
  static const Table kGlobals = {{"range", global_range},
                                 {"dict", global_dict},
                                 {"namespace", global_namespace},
                                 {"raise_exception", global_raise_exception},
                                 {"strftime_now", global_strftime_now},
                                 {"lipsum", global_missing},
                                 {"cycler", global_missing},
                                 {"joiner", global_missing}};
  return look_up(kGlobals, name);
}

}  // namespace millrace::jinja
