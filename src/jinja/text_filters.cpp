// Filters on text and numbers.
#include "jinja/text_filters.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "jinja/big_integer.h"
#include "jinja/bound_arguments.h"
#include "jinja/native_table.h"
#include "jinja/operators.h"
#include "jinja/print.h"
#include "jinja/python_format.h"
#include "jinja/python_text.h"
#include "jinja/render_state.h"
#include "jinja/text_methods.h"
#include "jinja/tojson.h"

namespace millrace::jinja {
namespace {

Value as_text(const Value& value) { return value.is_string() ? value : Value::string(to_text(value)); }

template <std::string (*kConvert)(std::string_view)>
Value convert(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("the filter", arguments, {});
  Value text = as_text(self);
  Budget::spend(text.text().size() / 8);
  return Value::string(kConvert(text.text()), text.is_markup());
}

// jinja2's own title: words begin after white space, - ( { [ <; unlike str.title an apostrophe does not end
// one.
std::string title(std::string_view text) {
  std::string out;
  bool begin = true;
  for (size_t i = 0; i < text.size();) {
    size_t at = i;
    char32_t c = next_code_point(text, i);
    bool separator = c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || is_space(c);
    if (separator)
      out += text.substr(at, i - at);
    else if (begin)
      append_upper(out, c);
    else
      out += to_lower(text.substr(at, i - at));
    begin = separator;
  }
  return out;
}

Value call_method(RenderState& state, const char* name, const Value& self, const Arguments& arguments) {
  return find_text_method(name)(state, as_text(self), arguments);
}

Value trim(RenderState& state, const Value& self, const Arguments& arguments) {
  return call_method(state, "strip", self, arguments);
}

Value center(RenderState& state, const Value& self, const Arguments& arguments) {
  Bound args("center", arguments, {"width"});
  return call_method(state, "center", self, {{Value::integer(args.integer(0, 80))}, {}});
}

Value replace(RenderState& state, const Value& self, const Arguments& arguments) {
  Bound args("replace", arguments, {"old", "new", "count"}, 2);
  const bool markup = state.autoescape && (self.is_markup() || args[0]->is_markup() || args[1]->is_markup());
  if (markup) {  // markup stays what it is, and what is put into it becomes markup
    return Value::string(
        replace_text(escaped_text(self), to_text(*args[0]), escaped_text(*args[1]), args.integer(2, -1)),
        true);
  }
  return Value::string(
      replace_text(to_text(self), to_text(*args[0]), to_text(*args[1]), args.integer(2, -1)));
}

Value string(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("string", arguments, {});
  return as_text(self);
}

Value safe(RenderState&, const Value& self, const Arguments&) { return Value::string(to_text(self), true); }

Value escape(RenderState&, const Value& self, const Arguments&) {
  return Value::string(escaped_text(self), true);
}

Value indent(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("indent", arguments, {"width", "first", "blank"});
  if (!self.is_string()) {
    if (self.is_undefined()) fail_undefined(self);
    fail("unsupported operand type(s) for +=: '{}' and 'str'", type_name(self));
  }
  std::string margin = "    ";
  if (args[0] != nullptr && args[0]->is_string())
    margin = args[0]->text();
  else if (args[0] != nullptr)
    margin = std::string(static_cast<size_t>(std::clamp<int64_t>(to_index(*args[0]), 0, 10'000)), ' ');
  std::string text = self.text() + "\n", out;
  Budget::spend(text.size() / 16);
  bool first = true, blank = args.flag(2);
  for (std::string_view line : split_lines(text, false)) {
    if (!first) out += '\n';
    if (first ? args.flag(1) : blank || !line.empty()) out += margin;
    out += line;
    first = false;
    if (out.size() > Budget::kMaxText) Budget::check_text(out.size());
  }
  return Value::string(std::move(out), self.is_markup());
}

Value truncate(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("truncate", arguments, {"length", "killwords", "end", "leeway"});
  int64_t length = args.integer(0, 255), leeway = args.integer(3, 5);
  Value text = as_text(self);
  std::string end = args[2] == nullptr ? "..." : to_text(*args[2]);
  int64_t end_length = count_code_points(end);
  if (length < end_length) fail("expected length >= {}, got {}", end_length, length);
  if (leeway < 0) fail("expected leeway >= 0, got {}", leeway);
  if (text.text_length() <= length || text.text_length() - length <= leeway) return text;
  std::string kept = text.text().substr(0, byte_offset(text.text(), length - end_length));
  if (!args.flag(1)) kept = kept.substr(0, kept.rfind(' '));
  return Value::string(kept + end);
}

Value wordcount(RenderState&, const Value& self, const Arguments&) {
  Value text = as_text(self);
  Budget::spend(text.text().size() / 8);
  int64_t words = 0;
  bool in_word = false;
  for (size_t i = 0; i < text.text().size();) {
    char32_t c = next_code_point(text.text(), i);
    bool word = c == '_' || is_alpha(c) || is_numeric(c);
    words += word && !in_word;
    in_word = word;
  }
  return Value::integer(words);
}

Value format(RenderState&, const Value& self, const Arguments& arguments) {
  if (!arguments.positional.empty() && !arguments.keyword.empty()) {
    fail("can't handle positional and keyword arguments at the same time");
  }
  if (arguments.keyword.empty()) return format_percent(as_text(self), Value::tuple(arguments.positional));
  auto dict = std::make_shared<DictObject>();
  for (const auto& [key, value] : arguments.keyword) dict->insert(Value::string(key), value);
  return format_percent(as_text(self), Value::object(Kind::kDict, std::move(dict)));
}

std::string quote_url(std::string_view text, bool for_query) {
  std::string out;
  for (char c : text) {
    bool plain = (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || c == '_' || c == '.' ||
                 c == '-' || c == '~' || (c == '/' && !for_query);
    if (plain)
      out += c;
    else if (c == ' ' && for_query)
      out += '+';
    else
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

Value urlencode(RenderState&, const Value& self, const Arguments&) {
  if (self.is_string() || !is_iterable(self)) return Value::string(quote_url(to_text(self), false));
  std::string out;
  auto add = [&](const Value& key, const Value& value) {
    if (!out.empty()) out += '&';
    out += quote_url(to_text(key), true) + "=" + quote_url(to_text(value), true);
  };
  if (self.is(Kind::kDict)) {
    for (const auto& [key, value] : self.dict().entries) add(key, value);
  } else {
    for (const Value& pair : iterate(self)) {
      std::vector<Value> parts = iterate(pair);
      if (parts.size() != 2) fail("urlencode takes pairs, got {} values", parts.size());
      add(parts[0], parts[1]);
    }
  }
  return Value::string(std::move(out));
}

void erase_between(std::string& text, std::string_view begin, std::string_view end) {
  for (size_t at = 0; (at = text.find(begin, at)) != std::string::npos;) {
    const size_t stop = text.find(end, at);
    if (stop == std::string::npos) return;
    text.erase(at, stop + end.size() - at);
    Budget::spend(1 + text.size() / 64);
  }
}

// "#65", "#x41" or a name, as text; nothing where it is none of HTML's numbers. Of its two thousand names
// those that texts have.
std::optional<std::string> entity(std::string_view name) {
  static const std::unordered_map<std::string_view, const char*> kNamed = {
      {"amp", "&"}, {"lt", "<"}, {"gt", ">"}, {"quot", "\""}, {"apos", "'"}, {"nbsp", "\u00a0"}};
  if (!name.starts_with('#')) {
    const auto found = kNamed.find(name);
    if (found == kNamed.end()) fail_unsupported("the entity &{}; in striptags", name);
    return found->second;
  }
  const bool hex = name.size() > 1 && (name[1] | 0x20) == 'x';
  const std::string_view digits = name.substr(hex ? 2 : 1);
  uint32_t code = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), code, hex ? 16 : 10);
  if (digits.empty() || result.ptr != digits.data() + digits.size() || result.ec != std::errc())
    return std::nullopt;
  const bool changed = code < 0x20 || (code >= 0x7f && code < 0xa0) || code > 0x10ffff ||
                       (code >= 0xd800 && code < 0xe000) || (code & 0xfffe) == 0xfffe ||
                       (code >= 0xfdd0 && code < 0xfdf0);
  if (changed) fail_unsupported("the entity &{}; in striptags", name);  // HTML means others by these
  std::string out;
  append_utf8(out, code);
  return out;
}

std::string unescape_html(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t at = std::min(text.find('&'), text.size());
    out += text.substr(0, at);
    text.remove_prefix(at);
    if (text.empty()) break;
    const size_t end =
        text.find_first_not_of("#abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", 1);
    const bool closed = end != std::string_view::npos && end > 1 && text[end] == ';';
    const std::optional<std::string> meant = closed ? entity(text.substr(1, end - 1)) : std::nullopt;
    out += meant ? *meant : "&";
    text.remove_prefix(meant ? end + 1 : 1);
  }
  return out;
}

// Comments and tags out, white space to single spaces, entities to what they mean: markupsafe's striptags.
Value striptags(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("striptags", arguments, {});
  if (self.is_undefined()) return Value::string("");
  std::string text = to_text(self);
  erase_between(text, "<!--", "-->");
  erase_between(text, "<", ">");
  std::string out;
  bool space = false;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    if (is_space(next_code_point(text, i))) {
      space = !out.empty();
      continue;
    }
    if (space) out += ' ';
    space = false;
    out += std::string_view(text).substr(at, i - at);
  }
  return Value::string(unescape_html(out));
}

// int(text, base) and float(text): Python's spelling of numbers, white space around them allowed.
std::optional<Value> parse_int(std::string_view text, int64_t base) {
  text = strip_left(strip_right(text, nullptr), nullptr);
  bool negative = !text.empty() && text[0] == '-';
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) text.remove_prefix(1);
  auto prefix = [&](const char* lower, const char* upper) {
    return text.starts_with(lower) || text.starts_with(upper);
  };
  if ((base == 16 && prefix("0x", "0X")) || (base == 8 && prefix("0o", "0O")) ||
      (base == 2 && prefix("0b", "0B"))) {
    text.remove_prefix(2);
  }
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '_' && i > 0 && i + 1 < text.size() && text[i - 1] != '_') continue;
    digits += text[i];
  }
  if (digits.size() > BigInteger::kMaxDigits) return std::nullopt;
  const std::optional<BigInteger> value = BigInteger::parse(digits, static_cast<int>(base));
  if (!value) return std::nullopt;
  return Value::whole(negative ? -*value : *value);
}

std::optional<double> parse_float(std::string_view text) {
  text = strip_left(strip_right(text, nullptr), nullptr);
  bool negative = !text.empty() && text[0] == '-';
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) text.remove_prefix(1);
  if (text.empty() || text[0] == '-' || text[0] == '+') return std::nullopt;
  std::string digits(text);
  std::erase(digits, '_');
  double value = 0;
  auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  bool is_nan_payload = digits.find('(') != digits.npos;
  if (result.ptr != digits.data() + digits.size() || is_nan_payload) return std::nullopt;
  if (result.ec == std::errc::result_out_of_range) value = std::strtod(digits.c_str(), nullptr);
  return negative ? -value : value;
}

std::optional<Value> truncated(double value) {
  if (!std::isfinite(value)) return std::nullopt;
  return Value::whole(BigInteger::truncated(value));
}

Value filter_int(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("int", arguments, {"default", "base"});
  if (self.is_undefined()) fail_undefined(self);
  Value otherwise = args[0] == nullptr ? Value::integer(0) : *args[0];
  int64_t base = args.integer(1, 10);
  if (base < 2 || base > 36) fail("int() base must be >= 2 and <= 36");
  if (self.is_whole()) return Value::whole(self.as_big());
  if (self.is(Kind::kFloat)) return truncated(self.as_double()).value_or(otherwise);
  if (!self.is_string()) return otherwise;
  if (std::optional<Value> value = parse_int(self.text(), base)) return *value;
  if (std::optional<double> value = parse_float(self.text())) return truncated(*value).value_or(otherwise);
  return otherwise;
}

Value filter_float(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("float", arguments, {"default"});
  if (self.is_undefined()) fail_undefined(self);
  if (self.is_number()) return Value::real(self.as_double());
  std::optional<double> value = self.is_string() ? parse_float(self.text()) : std::nullopt;
  if (value) return Value::real(*value);
  return args[0] == nullptr ? Value::real(0) : *args[0];
}

// Python's round(): the decimal nearest to the exact binary value, ties to even.
double round_to(double value, int64_t digits) {
  if (!std::isfinite(value) || digits > 300) return value;
  if (digits >= 0) return std::strtod(fmt::format("{:.{}f}", value, digits).c_str(), nullptr);
  double scale = std::pow(10.0, static_cast<double>(-std::max<int64_t>(digits, -400)));
  return std::isinf(scale) ? 0.0 : std::nearbyint(value / scale) * scale;
}

Value filter_round(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("round", arguments, {"precision", "method"});
  if (self.is_undefined()) fail_undefined(self);
  if (!self.is_number()) fail("type {} doesn't define __round__ method", type_name(self));
  int64_t precision = args.integer(0, 0);
  std::string method = args[1] == nullptr ? "common" : to_text(*args[1]);
  if (method != "common" && method != "ceil" && method != "floor")
    fail("method must be common, ceil or floor");
  if (method == "common") {
    if (self.is_whole() && precision >= 0) return Value::whole(self.as_big());
    if (self.is(Kind::kBigInt)) fail_unsupported("to round an integer beyond 64 bits");
    double rounded = round_to(self.as_double(), precision);
    return self.is_integral() ? truncated(rounded).value_or(Value::integer(0)) : Value::real(rounded);
  }
  double scale = std::pow(10.0, static_cast<double>(precision));
  double scaled = self.as_double() * scale;
  return Value::real((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

Value filter_abs(RenderState&, const Value& self, const Arguments&) {
  if (self.is_undefined()) fail_undefined(self);
  if (!self.is_number()) fail("bad operand type for abs(): '{}'", type_name(self));
  if (self.is(Kind::kFloat)) return Value::real(std::fabs(self.as_double()));
  return unary_operator(self.as_big().negative() ? '-' : '+', self);
}

Value filter_default(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("default", arguments, {"default_value", "boolean"});
  bool use = self.is_undefined() || (args.flag(1) && !truthy(self));
  if (!use) return self;
  return args[0] == nullptr ? Value::string("") : *args[0];
}

Value filter_length(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("length", arguments, {});
  std::optional<int64_t> length = length_of(self);
  if (!length && self.is(Kind::kLoop)) length = self.as<LoopObject>().length();
  if (!length) fail("object of type '{}' has no len()", type_name(self));
  return Value::integer(*length);
}

}  // namespace

Native find_text_filter(std::string_view name) {
  static const NativeTable kFilters = {{"upper", convert<to_upper>},
                                       {"lower", convert<to_lower>},
                                       {"capitalize", convert<to_capitalized>},
                                       {"title", convert<title>},
                                       {"trim", trim},
                                       {"center", center},
                                       {"replace", replace},
                                       {"string", string},
                                       {"safe", safe},
                                       {"escape", escape},
                                       {"e", escape},
                                       {"forceescape", escape},
                                       {"indent", indent},
                                       {"truncate", truncate},
                                       {"wordcount", wordcount},
                                       {"format", format},
                                       {"urlencode", urlencode},
                                       {"striptags", striptags},
                                       {"int", filter_int},
                                       {"float", filter_float},
                                       {"round", filter_round},
                                       {"abs", filter_abs},
                                       {"default", filter_default},
                                       {"d", filter_default},
                                       {"length", filter_length},
                                       {"count", filter_length},
                                       {"tojson", filter_tojson}};
  return look_up(kFilters, name);
}

}  // namespace millrace::jinja
