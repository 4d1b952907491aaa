// Filters on lists and dicts. What is a generator in jinja2 is an iterator here: it can be iterated once.
#include "jinja/sequence_filters.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "jinja/bound_arguments.h"
#include "jinja/filters.h"
#include "jinja/is_tests.h"
#include "jinja/lookup.h"
#include "jinja/methods.h"
#include "jinja/native_table.h"
#include "jinja/operators.h"
#include "jinja/print.h"
#include "jinja/python_text.h"
#include "jinja/render_state.h"

namespace millrace::jinja {
namespace {

Value generator(std::vector<Value> items) {
  return Value::sequence(Kind::kIterator, std::move(items), "generator");
}

// A key for sorting and grouping: the attribute, in lower case unless case matters.
Value key_of(const Value& item, const Value* attribute, bool case_sensitive) {
  Value key = attribute == nullptr ? item : get_path(item, *attribute);
  return key.is_string() && !case_sensitive ? Value::string(to_lower(key.text())) : key;
}

Value first(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("first", arguments, {});
  if (self.is(Kind::kIterator)) {
    SequenceObject& source = self.as_sequence();
    if (source.position < source.items.size()) return source.items[source.position++];
    return Value::undefined("No first item, sequence was empty.");
  }
  if (self.is_string() && !self.text().empty()) return get_item(self, Value::integer(0));
  std::vector<Value> items = iterate(self);
  return items.empty() ? Value::undefined("No first item, sequence was empty.") : items.front();
}

Value last(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("last", arguments, {});
  if (self.is(Kind::kIterator)) fail("'generator' object is not reversible");
  if (self.is_undefined()) fail("{}", self.undefined_reason());
  if (self.is_string() && !self.text().empty()) return get_item(self, Value::integer(-1));
  if (!is_iterable(self)) fail("'{}' object is not reversible", type_name(self));
  std::vector<Value> items = iterate(self);
  return items.empty() ? Value::undefined("No last item, sequence was empty.") : items.back();
}

Value join(RenderState& state, const Value& self, const Arguments& arguments) {
  Bound args("join", arguments, {"d", "attribute"});
  if (state.autoescape) {
    std::vector<Value> items = iterate(self);
    if (args.given(1)) {
      for (Value& item : items) item = get_path(item, *args[1]);
    }
    const bool markup = args[0] != nullptr && args[0]->is_markup();
    return join_markup(args[0] == nullptr ? "" : to_text(*args[0]), items, markup);
  }
  std::string separator = args[0] == nullptr ? "" : to_text(*args[0]), out;
  bool begin = true;
  for (const Value& item : iterate(self)) {
    if (!begin) out += separator;
    begin = false;
    out += to_text(args.given(1) ? get_path(item, *args[1]) : item);
    if (out.size() > Budget::kMaxText) Budget::check_text(out.size());
  }
  return Value::string(std::move(out));
}

Value list(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("list", arguments, {});
  return Value::list(iterate(self));
}

Value items(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("items", arguments, {});
  if (self.is_undefined()) return generator({});
  if (!self.is(Kind::kDict)) fail("Can only get item pairs from a mapping.");
  std::vector<Value> pairs;
  for (const auto& [key, value] : self.dict().entries) pairs.push_back(Value::tuple({key, value}));
  return generator(std::move(pairs));
}

const Value* keyword(const Arguments& arguments, std::string_view name) {
  for (const auto& [key, value] : arguments.keyword) {
    if (key == name) return &value;
  }
  return nullptr;
}

// The filter or test named by arguments[at], with the arguments behind it.
struct Named {
  Native native = nullptr;
  Arguments arguments;
};

Named named(const Arguments& arguments, size_t at, Native (*look_up)(std::string_view), const char* what) {
  Named result;
  std::string name = to_text(arguments.positional[at]);
  result.native = look_up(name);
  if (result.native == nullptr) fail_unsupported("the {} '{}'", what, name);
  result.arguments.positional.assign(arguments.positional.begin() + static_cast<ptrdiff_t>(at) + 1,
                                     arguments.positional.end());
  result.arguments.keyword = arguments.keyword;
  return result;
}

Value map(RenderState& state, const Value& self, const Arguments& arguments) {
  std::vector<Value> out;
  if (!truthy(self)) return generator({});
  const Value* attribute = keyword(arguments, "attribute");
  if (arguments.positional.empty() && attribute != nullptr) {
    Bound args("map", arguments, {"attribute", "default"});
    for (const Value& item : iterate(self)) {
      Value value = get_path(item, *attribute);
      out.push_back(value.is_undefined() && args.given(1) ? *args[1] : value);
    }
    return generator(std::move(out));
  }
  if (arguments.positional.empty()) fail("map requires a filter argument");
  Named filter = named(arguments, 0, find_filter, "filter");
  for (const Value& item : iterate(self)) out.push_back(filter.native(state, item, filter.arguments));
  return generator(std::move(out));
}

// select, reject, selectattr, rejectattr
template <bool kKeep, bool kAttribute>
Value choose(RenderState& state, const Value& self, const Arguments& arguments) {
  if (!truthy(self)) return generator({});
  constexpr size_t kTest = kAttribute ? 1 : 0;
  if (kAttribute && arguments.positional.empty()) fail("Missing parameter for attribute name");
  Named test;
  if (arguments.positional.size() > kTest) test = named(arguments, kTest, find_test, "test");
  std::vector<Value> out;
  for (Value& item : iterate(self)) {
    Value value = kAttribute ? get_path(item, arguments.positional[0]) : item;
    bool passes = truthy(test.native == nullptr ? value : test.native(state, value, test.arguments));
    if (passes == kKeep) out.push_back(std::move(item));
  }
  return generator(std::move(out));
}

Value reverse(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("reverse", arguments, {});
  if (self.is_string()) return get_slice(self, Value::none(), Value::none(), Value::integer(-1));
  if (!is_iterable(self)) fail("argument must be iterable");
  std::vector<Value> out = iterate(self);
  std::reverse(out.begin(), out.end());
  if (self.is(Kind::kIterator)) return Value::list(std::move(out));
  return Value::sequence(Kind::kIterator, std::move(out),
                         self.is(Kind::kList) ? "list_reverseiterator" : "reversed");
}

// Stable, as Python's sorted(); reverse keeps equal items in order too.
std::vector<Value> sorted(std::vector<Value> values, const std::vector<Value>& keys, bool reversed) {
  std::vector<size_t> order(values.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return reversed ? less_than(keys[b], keys[a]) : less_than(keys[a], keys[b]);
  });
  std::vector<Value> out;
  for (size_t i : order) out.push_back(std::move(values[i]));
  return out;
}

Value sort(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  std::vector<Value> values = iterate(self), keys;
  std::vector<Value> paths;
  if (args.given(2) && args[2]->is_string()) {
    std::string_view rest = args[2]->text();
    for (size_t comma = 0; comma != rest.npos;) {
      comma = rest.find(',');
      paths.push_back(Value::string(std::string(rest.substr(0, comma))));
      if (comma != rest.npos) rest.remove_prefix(comma + 1);
    }
  } else if (args.given(2)) {
    paths.push_back(*args[2]);
  }
  for (const Value& value : values) {
    std::vector<Value> key;
    if (paths.empty()) key.push_back(key_of(value, nullptr, args.flag(1)));
    for (const Value& path : paths) key.push_back(key_of(value, &path, args.flag(1)));
    keys.push_back(Value::list(std::move(key)));
  }
  return Value::list(sorted(std::move(values), keys, args.flag(0)));
}

Value dictsort(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  if (!self.is(Kind::kDict)) fail("'{}' object has no attribute 'items'", type_name(self));
  std::string by = args[1] == nullptr ? "key" : to_text(*args[1]);
  if (by != "key" && by != "value") fail("You can only sort by either \"key\" or \"value\"");
  std::vector<Value> pairs, keys;
  for (const auto& [key, value] : self.dict().entries) {
    pairs.push_back(Value::tuple({key, value}));
    keys.push_back(key_of(by == "key" ? key : value, nullptr, args.flag(0)));
  }
  return Value::list(sorted(std::move(pairs), keys, args.flag(2)));
}

Value unique(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("unique", arguments, {"case_sensitive", "attribute"});
  DictObject seen;
  std::vector<Value> out;
  for (Value& item : iterate(self)) {
    Value key = key_of(item, args.given(1) ? args[1] : nullptr, args.flag(0));
    if (seen.find(key) != nullptr) continue;
    seen.insert(key, Value::none());
    out.push_back(std::move(item));
  }
  return generator(std::move(out));
}

template <bool kMax>
Value extreme(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args(kMax ? "max" : "min", arguments, {"case_sensitive", "attribute"});
  std::vector<Value> values = iterate(self);
  if (values.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  const Value* attribute = args.given(1) ? args[1] : nullptr;
  size_t best = 0;
  Value best_key = key_of(values[0], attribute, args.flag(0));
  for (size_t i = 1; i < values.size(); ++i) {
    Value key = key_of(values[i], attribute, args.flag(0));
    if (kMax ? less_than(best_key, key, ">") : less_than(key, best_key)) {
      best = i;
      best_key = std::move(key);
    }
  }
  return values[best];
}

Value sum(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("sum", arguments, {"attribute", "start"});
  Value total = args[1] == nullptr ? Value::integer(0) : *args[1];
  if (total.is_string()) fail("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& item : iterate(self)) {
    total = binary_operator('+', total, args.given(0) ? get_path(item, *args[0]) : item);
  }
  return total;
}

Value groupby(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("groupby", arguments, {"attribute", "default", "case_sensitive"}, 1);
  std::vector<Value> values = iterate(self), keys;
  auto key_at = [&](const Value& item, bool case_sensitive) {
    Value key = key_of(item, args[0], true);
    if (key.is_undefined() && args.given(1)) key = *args[1];
    return key_of(key, nullptr, case_sensitive);
  };
  for (const Value& value : values) keys.push_back(key_at(value, args.flag(2)));
  std::vector<Value> groups, members;
  values = sorted(std::move(values), keys, false);
  auto flush = [&] {
    if (members.empty()) return;
    Value real_key = key_at(members[0], true);
    groups.push_back(Value::sequence(Kind::kTuple, {real_key, Value::list(std::move(members))}, "group"));
    members.clear();
  };
  Value current;
  for (Value& value : values) {
    Value key = key_at(value, args.flag(2));
    if (!members.empty() && !equal(key, current)) flush();
    current = std::move(key);
    members.push_back(std::move(value));
  }
  flush();
  return Value::list(std::move(groups));
}

Value batch(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("batch", arguments, {"linecount", "fill_with"}, 1);
  int64_t count = to_index(*args[0]);
  std::vector<Value> out, row;
  for (Value& item : iterate(self)) {
    if (static_cast<int64_t>(row.size()) == count) {
      out.push_back(Value::list(std::move(row)));
      row.clear();
    }
    row.push_back(std::move(item));
  }
  if (!row.empty()) {
    Budget::spend(static_cast<size_t>(std::clamp<int64_t>(count, 0, Budget::kMaxSteps + 1)));
    while (args.given(1) && static_cast<int64_t>(row.size()) < count) row.push_back(*args[1]);
    out.push_back(Value::list(std::move(row)));
  }
  return generator(std::move(out));
}

Value slice(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("slice", arguments, {"slices", "fill_with"}, 1);
  std::vector<Value> values = iterate(self), out;
  int64_t slices = to_index(*args[0]), length = static_cast<int64_t>(values.size());
  if (slices == 0) fail("integer division or modulo by zero");
  Budget::spend(static_cast<size_t>(std::clamp<int64_t>(slices, 0, Budget::kMaxSteps + 1)));
  int64_t per_slice = length / slices, extra = length % slices, at = 0;
  for (int64_t i = 0; i < slices; ++i) {
    int64_t size = per_slice + (i < extra ? 1 : 0);
    std::vector<Value> part(values.begin() + at, values.begin() + at + size);
    if (args.given(1) && i >= extra) part.push_back(*args[1]);
    out.push_back(Value::list(std::move(part)));
    at += size;
  }
  return generator(std::move(out));
}

// Attributes only: a dict's items are not its attributes.
Value attr(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("attr", arguments, {"name"}, 1);
  std::string name = to_text(*args[0]);
  if (self.is(Kind::kDict) && find_method(self, name) == nullptr && !is_mutating_method(self, name)) {
    return Value::undefined(fmt::format("'dict object' has no attribute '{}'", name));
  }
  return get_attribute(self, name);
}

}  // namespace

Native find_sequence_filter(std::string_view name) {
  static const NativeTable kFilters = {{"first", first},
                                       {"last", last},
                                       {"join", join},
                                       {"list", list},
                                       {"items", items},
                                       {"map", map},
                                       {"select", choose<true, false>},
                                       {"reject", choose<false, false>},
                                       {"selectattr", choose<true, true>},
                                       {"rejectattr", choose<false, true>},
                                       {"reverse", reverse},
                                       {"sort", sort},
                                       {"dictsort", dictsort},
                                       {"unique", unique},
                                       {"min", extreme<false>},
                                       {"max", extreme<true>},
                                       {"sum", sum},
                                       {"groupby", groupby},
                                       {"batch", batch},
                                       {"slice", slice},
                                       {"attr", attr}};
  return look_up(kFilters, name);
}

}  // namespace millrace::jinja
