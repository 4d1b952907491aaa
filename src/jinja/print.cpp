// str() and repr() of values: what {{ }} prints.
#include "jinja/print.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "jinja/big_integer.h"
#include "jinja/python_text.h"
#include "jinja/render_state.h"

namespace millrace::jinja {
namespace {

void print(std::string& out, const Value& value);

void print_items(std::string& out, const std::vector<Value>& items) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += ", ";
    print(out, items[i]);
  }
}

template <class Pairs, class PrintKey>
void print_pairs(std::string& out, const Pairs& pairs, PrintKey print_key) {
  out += '{';
  bool first = true;
  for (const auto& [key, item] : pairs) {
    if (!first) out += ", ";
    first = false;
    print_key(key);
    out += ": ";
    print(out, item);
  }
  out += '}';
}

void print_object(std::string& out, const Value& value) {
  switch (value.kind()) {
    case Kind::kMacro:
      out += fmt::format("<Macro {}>", repr_string(macro_name(value)));
      break;
    case Kind::kLoop:
      out += loop_repr(value);
      break;
    case Kind::kFunction:
      out += fmt::format("<function {}>", value.function().name);
      break;
    default:
      out += fmt::format("<{} object>", type_name(value));
  }
}

// The only values that can hold themselves: their own printing is cut at a depth.
void print_namespace(std::string& out, const Value& value) {
  thread_local int nesting = 0;
  struct Level {
    Level() {
      if (++nesting > 20) {
        --nesting;
        fail("a namespace that holds itself cannot be printed");
      }
    }
    ~Level() { --nesting; }
  } level;
  out += "<Namespace ";
  print_pairs(out, value.as_namespace().attributes, [&](const std::string& key) { out += repr_string(key); });
  out += '>';
}

// repr()
void print(std::string& out, const Value& value) {
  Budget::spend(1);
  if (out.size() > Budget::kMaxText) Budget::check_text(out.size());
  switch (value.kind()) {
    case Kind::kUndefined:
      out += "Undefined";
      break;
    case Kind::kNone:
      out += "None";
      break;
    case Kind::kBool:
      out += value.as_int() != 0 ? "True" : "False";
      break;
    case Kind::kInt:
      out += std::to_string(value.as_int());
      break;
    case Kind::kBigInt:
      out += value.as_big().text();
      break;
    case Kind::kFloat:
      out += repr_float(value.as_double());
      break;
    case Kind::kString:
      Budget::spend(value.text().size() / 16);
      out += value.is_markup() ? "Markup(" + repr_string(value.text()) + ")" : repr_string(value.text());
      break;
    case Kind::kList:
      out += '[';
      print_items(out, value.items());
      out += ']';
      break;
    case Kind::kTuple:
      out += '(';
      print_items(out, value.items());
      out += value.items().size() == 1 ? ",)" : ")";
      break;
    case Kind::kRange:
      out += value.as_sequence().label;
      break;
    case Kind::kView:
      out += value.as_sequence().label + "([";
      print_items(out, value.items());
      out += "])";
      break;
    case Kind::kDict:
      print_pairs(out, value.dict().entries, [&](const Value& key) { print(out, key); });
      break;
    case Kind::kNamespace:
      print_namespace(out, value);
      break;
    default:
      print_object(out, value);
  }
}

}  // namespace

std::string repr(const Value& value) {
  std::string out;
  print(out, value);
  return out;
}

std::string to_text(const Value& value) {
  if (value.is_string()) return value.text();
  if (value.is_undefined()) return {};
  return repr(value);
}

std::string escaped_text(const Value& value) {
  return value.is_markup() ? value.text() : escape_html(to_text(value));
}

Value join_markup(std::string_view separator, const std::vector<Value>& items, bool separator_is_markup) {
  const bool markup = separator_is_markup ||
                      std::any_of(items.begin(), items.end(), [](const Value& v) { return v.is_markup(); });
  const std::string between =
      markup && !separator_is_markup ? escape_html(separator) : std::string(separator);
  std::string out;
  bool begin = true;
  for (const Value& item : items) {
    if (!begin) out += between;
    begin = false;
    out += markup ? escaped_text(item) : to_text(item);
    if (out.size() > Budget::kMaxText) Budget::check_text(out.size());
  }
  return Value::string(std::move(out), markup);
}

}  // namespace millrace::jinja
