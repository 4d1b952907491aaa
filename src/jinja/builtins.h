// What the evaluator calls: operators and lookups with Python's meaning, and the tables of filters, tests,
// methods and global functions.
#pragma once

#include <ctime>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/render_state.h"
#include "jinja/value.h"

namespace millrace::jinja {

// Tables; null where there is no such name.
Native find_filter(std::string_view name);
Native find_text_filter(std::string_view name);      // text_filters.cpp
Native find_sequence_filter(std::string_view name);  // sequence_filters.cpp
Native find_test(std::string_view name);
Native find_global(std::string_view name);
Native find_method(const Value& self, std::string_view name);
Native find_text_method(std::string_view name);
// list.append and its like, which the sandbox refuses.
bool is_mutating_method(const Value& self, std::string_view name);

// Python's binding of arguments to named parameters: values[i] is null where parameter i was not given.
class Bound {
 public:
  Bound(std::string_view function, const Arguments& arguments,
        std::initializer_list<std::string_view> parameters, size_t required = 0);
  const Value* operator[](size_t i) const { return values_[i]; }
  bool given(size_t i) const { return values_[i] != nullptr && !values_[i]->is_none(); }
  bool flag(size_t i) const { return values_[i] != nullptr && truthy(*values_[i]); }
  int64_t integer(size_t i, int64_t otherwise) const { return given(i) ? to_index(*values_[i]) : otherwise; }

 private:
  std::vector<const Value*> values_;
};

// Operators and lookups (operators.cpp).
Value binary_operator(char op, const Value& a, const Value& b);
Value unary_operator(char op, const Value& a);
Value get_attribute(const Value& object, std::string_view name);
Value get_item(const Value& object, const Value& key);
Value get_slice(const Value& object, const Value& start, const Value& stop, const Value& step);
// a.b.0 as the filters' attribute= arguments say it.
Value get_path(const Value& object, const Value& path);
std::string escape_html(std::string_view text);
// str.replace: at most `limit` times where that is not negative.
std::string replace_text(std::string_view text, std::string_view from, std::string_view to, int64_t limit);

// Text formats (python_format.cpp).
std::string format_percent(const std::string& format, const Value& arguments);
std::string format_braces(std::string_view format, const Arguments& arguments);
std::string format_time(const std::string& format, std::time_t now);

// JSON (tojson.cpp).
Value from_json(const nlohmann::ordered_json& json, int depth = 0);
Value filter_tojson(RenderState& state, const Value& self, const Arguments& arguments);

}  // namespace millrace::jinja
