// The methods of str that templates call.
#include "jinja/text_methods.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "jinja/bound_arguments.h"
#include "jinja/native_table.h"
#include "jinja/print.h"
#include "jinja/python_format.h"
#include "jinja/python_text.h"
#include "jinja/render_state.h"

namespace millrace::jinja {
namespace {

Value same_markup(const Value& self, std::string_view text) {
  return Value::string(std::string(text), self.is_markup());
}

const std::string& text_argument(const Value& value, std::string_view method) {
  if (!value.is_string()) fail("{}() argument must be str, not {}", method, type_name(value));
  return value.text();
}

Value strip_with(const Value& self, const Arguments& arguments, const char* name, bool left, bool right) {
  Bound args(name, arguments, {"chars"});
  std::string_view chars;
  const std::string_view* set = nullptr;
  if (args.given(0)) {
    chars = text_argument(*args[0], name);
    set = &chars;
  }
  std::string_view text = self.text();
  Budget::spend(text.size() / 64 * (1 + chars.size()));
  if (left) text = strip_left(text, set);
  if (right) text = strip_right(text, set);
  return text.size() == self.text().size() ? self : same_markup(self, text);
}

Value strip(RenderState&, const Value& self, const Arguments& a) {
  return strip_with(self, a, "strip", true, true);
}
Value lstrip(RenderState&, const Value& self, const Arguments& a) {
  return strip_with(self, a, "lstrip", true, false);
}
Value rstrip(RenderState&, const Value& self, const Arguments& a) {
  return strip_with(self, a, "rstrip", false, true);
}

std::vector<std::string_view> split_space(std::string_view text, int64_t limit) {
  std::vector<std::string_view> parts;
  for (text = strip_left(text, nullptr); !text.empty(); text = strip_left(text, nullptr)) {
    if (limit >= 0 && static_cast<int64_t>(parts.size()) >= limit) {
      parts.push_back(strip_right(text, nullptr));
      break;
    }
    size_t end = 0;
    for (size_t next = 0; end < text.size(); end = next) {
      if (is_space(next_code_point(text, next))) break;
    }
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return parts;
}

std::vector<std::string_view> rsplit_space(std::string_view text, int64_t limit) {
  std::vector<std::string_view> words = split_space(text, -1);
  if (limit < 0 || static_cast<int64_t>(words.size()) <= limit) return words;
  if (words.empty()) return words;
  size_t keep = static_cast<size_t>(limit), rest = words.size() - keep;
  const char* end = words[rest - 1].data() + words[rest - 1].size();
  std::vector<std::string_view> parts{text.substr(0, static_cast<size_t>(end - text.data()))};
  parts.insert(parts.end(), words.end() - static_cast<ptrdiff_t>(keep), words.end());
  return parts;
}

std::vector<std::string_view> split_on(std::string_view text, std::string_view separator, int64_t limit,
                                       bool right) {
  std::vector<std::string_view> parts;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    size_t at = right ? text.rfind(separator) : text.find(separator);
    if (at == text.npos) break;
    parts.push_back(right ? text.substr(at + separator.size()) : text.substr(0, at));
    text = right ? text.substr(0, at) : text.substr(at + separator.size());
  }
  parts.push_back(text);
  if (right) std::reverse(parts.begin(), parts.end());
  return parts;
}

Value to_list(const Value& self, const std::vector<std::string_view>& parts) {
  std::vector<Value> items;
  items.reserve(parts.size());
  for (std::string_view part : parts) items.push_back(same_markup(self, part));
  return Value::list(std::move(items));
}

Value split_with(const Value& self, const Arguments& arguments, const char* name, bool right) {
  Bound args(name, arguments, {"sep", "maxsplit"});
  int64_t limit = args.integer(1, -1);
  Budget::spend(1 + self.text().size() / 16);
  if (!args.given(0))
    return to_list(self, right ? rsplit_space(self.text(), limit) : split_space(self.text(), limit));
  const std::string& separator = text_argument(*args[0], name);
  if (separator.empty()) fail("empty separator");
  return to_list(self, split_on(self.text(), separator, limit, right));
}

Value split(RenderState&, const Value& self, const Arguments& a) {
  return split_with(self, a, "split", false);
}
Value rsplit(RenderState&, const Value& self, const Arguments& a) {
  return split_with(self, a, "rsplit", true);
}

Value splitlines(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("splitlines", arguments, {"keepends"});
  Budget::spend(self.text().size() / 16);
  return to_list(self, split_lines(self.text(), args.flag(0)));
}

Value partition_with(const Value& self, const Arguments& arguments, bool right) {
  Bound args("partition", arguments, {"sep"}, 1);
  const std::string& separator = text_argument(*args[0], "partition");
  if (separator.empty()) fail("empty separator");
  std::string_view text = self.text();
  Budget::spend(text.size() / 16);
  size_t at = right ? text.rfind(separator) : text.find(separator);
  Value none = same_markup(self, "");
  if (at == text.npos)
    return Value::tuple(right ? std::vector<Value>{none, none, self} : std::vector<Value>{self, none, none});
  return Value::tuple({same_markup(self, text.substr(0, at)), *args[0],
                       same_markup(self, text.substr(at + separator.size()))});
}

Value partition(RenderState&, const Value& self, const Arguments& a) {
  return partition_with(self, a, false);
}
Value rpartition(RenderState&, const Value& self, const Arguments& a) {
  return partition_with(self, a, true);
}

// self[start:stop] of find, count, startswith: as text.
std::string_view part_of(const Value& self, const Bound& args, int64_t* begin_index = nullptr) {
  int64_t length = self.text_length();
  auto clip = [&](int64_t i) {
    return std::clamp<int64_t>(i < 0 ? std::max<int64_t>(i, -length) + length : i, 0, length);
  };
  int64_t begin = args.integer(1, 0), end = clip(args.integer(2, length));
  if (begin_index != nullptr) *begin_index = clip(begin);
  if (begin > length || clip(begin) > end) return {};
  size_t from = byte_offset(self.text(), clip(begin));
  return std::string_view(self.text()).substr(from, byte_offset(self.text(), end) - from);
}

Value affix(const Value& self, const Arguments& arguments, const char* name, bool prefix) {
  Bound args(name, arguments, {"affix", "start", "end"}, 1);
  std::vector<Value> options;
  if (args[0]->is(Kind::kTuple))
    options = args[0]->items();
  else
    options.push_back(*args[0]);
  std::string_view text = args[1] == nullptr ? std::string_view(self.text()) : part_of(self, args);
  for (const Value& option : options) {
    if (!option.is_string())
      fail("{} first arg must be str or a tuple of str, not {}", name, type_name(option));
    if (prefix ? text.starts_with(option.text()) : text.ends_with(option.text())) return Value::boolean(true);
  }
  return Value::boolean(false);
}

Value startswith(RenderState&, const Value& self, const Arguments& a) {
  return affix(self, a, "startswith", true);
}
Value endswith(RenderState&, const Value& self, const Arguments& a) {
  return affix(self, a, "endswith", false);
}

int64_t find_text(const Value& self, const Arguments& arguments, const char* name, bool right) {
  Bound args(name, arguments, {"sub", "start", "end"}, 1);
  const std::string& needle = text_argument(*args[0], name);
  int64_t begin = 0;
  std::string_view text = part_of(self, args, &begin);
  Budget::spend(1 + text.size() / 16);
  size_t at = right ? text.rfind(needle) : text.find(needle);
  return at == text.npos ? -1 : begin + count_code_points(text.substr(0, at));
}

Value find(RenderState&, const Value& self, const Arguments& a) {
  return Value::integer(find_text(self, a, "find", false));
}
Value rfind(RenderState&, const Value& self, const Arguments& a) {
  return Value::integer(find_text(self, a, "rfind", true));
}
Value index(RenderState&, const Value& self, const Arguments& a) {
  int64_t at = find_text(self, a, "index", false);
  if (at < 0) fail("substring not found");
  return Value::integer(at);
}

Value count(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("count", arguments, {"sub", "start", "end"}, 1);
  const std::string& needle = text_argument(*args[0], "count");
  std::string_view text = part_of(self, args);
  Budget::spend(1 + text.size() / 16);
  if (needle.empty()) return Value::integer(count_code_points(text) + 1);
  int64_t found = 0;
  for (size_t at = text.find(needle); at != text.npos; at = text.find(needle, at + needle.size())) ++found;
  return Value::integer(found);
}

Value replace(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("replace", arguments, {"old", "new", "count"}, 2);
  const std::string& given = text_argument(*args[1], "replace");
  return Value::string(replace_text(self.text(), text_argument(*args[0], "replace"),
                                    self.is_markup() ? escaped_text(*args[1]) : given, args.integer(2, -1)),
                       self.is_markup());
}

Value remove_affix(const Value& self, const Arguments& arguments, bool prefix) {
  Bound args("removeprefix", arguments, {"affix"}, 1);
  const std::string& part = text_argument(*args[0], prefix ? "removeprefix" : "removesuffix");
  std::string_view text = self.text();
  if (prefix ? !text.starts_with(part) : !text.ends_with(part)) return self;
  return same_markup(self, prefix ? text.substr(part.size()) : text.substr(0, text.size() - part.size()));
}

Value removeprefix(RenderState&, const Value& self, const Arguments& a) {
  return remove_affix(self, a, true);
}
Value removesuffix(RenderState&, const Value& self, const Arguments& a) {
  return remove_affix(self, a, false);
}

template <std::string (*kConvert)(std::string_view)>
Value convert(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("a method of str", arguments, {});
  Budget::spend(self.text().size() / 8);
  return Value::string(kConvert(self.text()), self.is_markup());
}

// True when there is a code point and all of them are in the class.
template <bool (*kClass)(char32_t)>
Value all_are(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("a method of str", arguments, {});
  Budget::spend(self.text().size() / 8);
  for (size_t i = 0; i < self.text().size();) {
    if (!kClass(next_code_point(self.text(), i))) return Value::boolean(false);
  }
  return Value::boolean(!self.text().empty());
}

bool is_alnum(char32_t c) { return is_alpha(c) || is_digit(c) || is_numeric(c); }

template <bool kUpperCase>
Value cased(RenderState&, const Value& self, const Arguments&) {
  bool any = false;
  Budget::spend(self.text().size() / 8);
  for (size_t i = 0; i < self.text().size();) {
    char32_t c = next_code_point(self.text(), i);
    if (kUpperCase ? is_lower(c) : is_upper(c)) return Value::boolean(false);
    any = any || (kUpperCase ? is_upper(c) : is_lower(c));
  }
  return Value::boolean(any);
}

Value join(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("join", arguments, {"iterable"}, 1);
  if (!is_iterable(*args[0])) fail("can only join an iterable");
  std::string out;
  size_t i = 0;
  for (const Value& item : iterate(*args[0])) {
    if (!item.is_string() && !self.is_markup())
      fail("sequence item {}: expected str instance, {} found", i, type_name(item));
    if (i++ > 0) out += self.text();
    out += self.is_markup() ? escaped_text(item) : item.text();
    if (out.size() > Budget::kMaxText) Budget::check_text(out.size());
  }
  return Value::string(std::move(out), self.is_markup());
}

Value format(RenderState&, const Value& self, const Arguments& arguments) {
  return format_braces(self, arguments);
}

Value justify(const Value& self, const Arguments& arguments, const char* name, char side) {
  Bound args(name, arguments, {"width", "fillchar"}, 1);
  std::string fill = args[1] == nullptr ? " " : text_argument(*args[1], name);
  if (count_code_points(fill) != 1) fail("The fill character must be exactly one character long");
  int64_t missing = to_index(*args[0]) - self.text_length();
  if (missing <= 0) return self;
  if (missing > static_cast<int64_t>(Budget::kMaxText)) Budget::check_text(Budget::kMaxText + 1);
  int64_t width = missing + self.text_length();
  int64_t left = side == '<' ? 0 : side == '>' ? missing : missing / 2 + (missing & width & 1);
  Budget::check_text(static_cast<size_t>(missing) * fill.size() + self.text().size());
  std::string before, after;
  for (int64_t i = 0; i < missing; ++i) (i < left ? before : after) += fill;
  return Value::string(before + self.text() + after, self.is_markup());
}

Value ljust(RenderState&, const Value& self, const Arguments& a) { return justify(self, a, "ljust", '<'); }
Value rjust(RenderState&, const Value& self, const Arguments& a) { return justify(self, a, "rjust", '>'); }
Value center(RenderState&, const Value& self, const Arguments& a) { return justify(self, a, "center", '^'); }

Value zfill(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("zfill", arguments, {"width"}, 1);
  int64_t missing = to_index(*args[0]) - self.text_length();
  if (missing <= 0) return self;
  if (missing > static_cast<int64_t>(Budget::kMaxText)) Budget::check_text(Budget::kMaxText + 1);
  const std::string& text = self.text();
  size_t sign = !text.empty() && (text[0] == '-' || text[0] == '+') ? 1 : 0;
  return Value::string(text.substr(0, sign) + std::string(static_cast<size_t>(missing), '0') +
                       text.substr(sign));
}

}  // namespace

std::string replace_text(std::string_view text, std::string_view from, std::string_view to, int64_t limit) {
  std::string out;
  Budget::spend(1 + text.size() / 16);
  size_t begin = 0;
  for (int64_t done = 0; limit < 0 || done < limit; ++done) {
    size_t at = begin;
    if (!from.empty()) {
      at = text.find(from, begin);
      if (at == text.npos) break;
      out += text.substr(begin, at - begin);
      begin = at + from.size();
    } else if (done > 0) {  // an empty pattern stands before every code point, and at the end
      if (begin >= text.size()) break;
      next_code_point(text, begin);
      out += text.substr(at, begin - at);
    }
    out += to;
    if (out.size() > Budget::kMaxText) Budget::check_text(out.size());
  }
  return out += text.substr(begin);
}

namespace {

std::string swapped_case(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = next_code_point(text, i);
    const std::string_view one = text.substr(at, i - at);
    out += is_upper(c) ? to_lower(one) : is_lower(c) ? to_upper(one) : std::string(one);
  }
  return out;
}

}  // namespace

Native find_text_method(std::string_view name) {
  static const NativeTable kMethods = {{"strip", strip},
                                       {"lstrip", lstrip},
                                       {"rstrip", rstrip},
                                       {"split", split},
                                       {"rsplit", rsplit},
                                       {"splitlines", splitlines},
                                       {"partition", partition},
                                       {"rpartition", rpartition},
                                       {"startswith", startswith},
                                       {"endswith", endswith},
                                       {"find", find},
                                       {"rfind", rfind},
                                       {"index", index},
                                       {"count", count},
                                       {"replace", replace},
                                       {"removeprefix", removeprefix},
                                       {"removesuffix", removesuffix},
                                       {"upper", convert<to_upper>},
                                       {"lower", convert<to_lower>},
                                       {"casefold", convert<to_lower>},
                                       {"swapcase", convert<swapped_case>},
                                       {"title", convert<to_title>},
                                       {"capitalize", convert<to_capitalized>},
                                       {"isspace", all_are<is_space>},
                                       {"isalpha", all_are<is_alpha>},
                                       {"isdigit", all_are<is_digit>},
                                       {"isdecimal", all_are<is_decimal>},
                                       {"isnumeric", all_are<is_numeric>},
                                       {"isalnum", all_are<is_alnum>},
                                       {"isupper", cased<true>},
                                       {"islower", cased<false>},
                                       {"join", join},
                                       {"format", format},
                                       {"ljust", ljust},
                                       {"rjust", rjust},
                                       {"center", center},
                                       {"zfill", zfill}};
  return look_up(kMethods, name);
}

}  // namespace millrace::jinja
