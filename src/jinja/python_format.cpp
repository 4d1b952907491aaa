// Python's two ways to format: "%s" % x and "{}".format(x); and strftime.
#include "jinja/python_format.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "jinja/big_integer.h"
#include "jinja/lookup.h"
#include "jinja/print.h"
#include "jinja/python_text.h"

namespace millrace::jinja {
namespace {

// What stands between the marker and the type letter, in both languages.
struct Spec {
  std::string fill = " ";
  char align = 0;  // < > ^ =
  char sign = '-';
  bool alternate = false, comma = false;
  int64_t width = 0, precision = -1;
  char type = 0;
};

constexpr int64_t kMaxWidth = 100'000;  // of one field

std::string pad(std::string text, const Spec& spec, char default_align) {
  int64_t missing = spec.width - count_code_points(text);
  if (missing <= 0) return text;
  char align = spec.align != 0 ? spec.align : default_align;
  int64_t left = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
  std::string before, after;
  for (int64_t i = 0; i < missing; ++i) (i < left ? before : after) += spec.fill;
  if (align == '=' && !text.empty() && (text[0] == '-' || text[0] == '+' || text[0] == ' ')) {
    return text[0] + before + text.substr(1);
  }
  return before + text + after;
}

std::string with_sign(std::string digits, bool negative, const Spec& spec) {
  if (negative) return "-" + digits;
  return spec.sign == '-' ? digits : spec.sign + digits;
}

std::string group_digits(std::string digits) {
  size_t end = digits.find_first_not_of("0123456789");
  if (end == digits.npos) end = digits.size();
  for (size_t i = end; i > 3;) {
    i -= 3;
    digits.insert(i, ",");
  }
  return digits;
}

std::string format_integer(const Value& whole, const Spec& spec) {
  if (whole.is(Kind::kBigInt)) {
    const BigInteger big = whole.as_big();
    if (spec.type == 'x' || spec.type == 'X' || spec.type == 'o' || spec.type == 'b')
      fail_unsupported("an integer beyond 64 bits in another base");
    std::string digits = (big.negative() ? -big : big).text();
    return with_sign(spec.comma ? group_digits(std::move(digits)) : std::move(digits), big.negative(), spec);
  }
  const int64_t value = whole.as_int();
  uint64_t magnitude = value < 0 ? 0 - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
  std::string digits;
  switch (spec.type) {
    case 'x':
      digits = fmt::format("{}{:x}", spec.alternate ? "0x" : "", magnitude);
      break;
    case 'X':
      digits = fmt::format("{}{:X}", spec.alternate ? "0X" : "", magnitude);
      break;
    case 'o':
      digits = fmt::format("{}{:o}", spec.alternate ? "0o" : "", magnitude);
      break;
    case 'b':
      digits = fmt::format("{}{:b}", spec.alternate ? "0b" : "", magnitude);
      break;
    default:
      digits = std::to_string(magnitude);
  }
  if (spec.comma) digits = group_digits(std::move(digits));
  return with_sign(std::move(digits), value < 0, spec);
}

std::string format_float(double value, const Spec& spec) {
  double magnitude = std::fabs(value);
  int precision = static_cast<int>(spec.precision < 0 ? 6 : std::min<int64_t>(spec.precision, 1000));
  std::string digits;
  if (!std::isfinite(value)) {
    digits = std::isnan(value) ? "nan" : "inf";
  } else {
    switch (spec.type) {
      case 'e':
        digits = fmt::format("{:.{}e}", magnitude, precision);
        break;
      case 'E':
        digits = fmt::format("{:.{}E}", magnitude, precision);
        break;
      case 'g':
        digits = fmt::format("{:.{}g}", magnitude, std::max(precision, 1));
        break;
      case 'G':
        digits = fmt::format("{:.{}G}", magnitude, std::max(precision, 1));
        break;
      case '%':
        digits = fmt::format("{:.{}f}%", magnitude * 100, precision);
        break;
      case 0:
        digits = spec.precision < 0 ? repr_float(magnitude)
                                    : fmt::format("{:.{}g}", magnitude, std::max(precision, 1));
        break;
      default:
        digits = fmt::format("{:.{}f}", magnitude, precision);
    }
  }
  if (spec.comma) digits = group_digits(std::move(digits));
  return with_sign(std::move(digits), std::signbit(value) && !std::isnan(value), spec);
}

std::string clip(std::string text, int64_t precision) {
  if (precision >= 0 && precision < count_code_points(text)) text.resize(byte_offset(text, precision));
  return text;
}

int64_t parse_number(std::string_view format, size_t& i) {
  int64_t value = 0;
  while (i < format.size() && format[i] >= '0' && format[i] <= '9')
    value = std::min(value * 10 + (format[i++] - '0'), kMaxWidth + 1);
  if (value > kMaxWidth) fail("a format field wider than {}", kMaxWidth);
  return value;
}

// One "%..." conversion; i stands behind the '%'.
class PercentFormatter {
 public:
  PercentFormatter(const Value& format, const Value& arguments)
      : format_(format.text()), markup_(format.is_markup()), arguments_(arguments) {}

  std::string run() {
    std::string out;
    for (size_t i = 0; i < format_.size();) {
      if (format_[i] != '%') {
        out += format_[i++];
        continue;
      }
      ++i;
      out += conversion(i);
      if (out.size() > Budget::kMaxText) Budget::check_text(out.size());
    }
    bool all_used = !arguments_.is(Kind::kTuple) ? used_ > 0 || arguments_.is(Kind::kDict)
                                                 : used_ >= arguments_.items().size();
    if (!all_used && !named_) fail("not all arguments converted during string formatting");
    return out;
  }

 private:
  Value next_argument() {
    if (arguments_.is(Kind::kTuple)) {
      if (used_ >= arguments_.items().size()) fail("not enough arguments for format string");
      return arguments_.items()[used_++];
    }
    if (used_++ > 0) fail("not enough arguments for format string");
    return arguments_;
  }

  std::string conversion(size_t& i) {
    Value argument;
    bool named = i < format_.size() && format_[i] == '(';
    if (named) {
      size_t close = format_.find(')', i);
      if (close == std::string::npos) fail("incomplete format key");
      if (!arguments_.is(Kind::kDict)) fail("format requires a mapping");
      const Value* found = arguments_.dict().find(std::string_view(format_).substr(i + 1, close - i - 1));
      if (found == nullptr) fail("'{}'", format_.substr(i + 1, close - i - 1));
      argument = *found;
      i = close + 1;
      named_ = true;
    }
    Spec spec;
    for (; i < format_.size() && std::string_view("-+ #0").find(format_[i]) != std::string_view::npos; ++i) {
      char flag = format_[i];
      if (flag == '-') spec.align = '<';
      if (flag == '+' || (flag == ' ' && spec.sign != '+')) spec.sign = flag;
      if (flag == '#') spec.alternate = true;
      if (flag == '0' && spec.align == 0) {
        spec.fill = "0";
        spec.align = '=';
      }
    }
    spec.width = parse_number(format_, i);
    if (i < format_.size() && format_[i] == '.') spec.precision = parse_number(format_, ++i);
    if (i >= format_.size()) fail("incomplete format");
    spec.type = format_[i++];
    if (spec.align == '<') spec.fill = " ";
    if (spec.type == '%') return "%";
    if (!named) argument = next_argument();
    return convert(argument, spec);
  }

  std::string text_of(const Value& value, bool as_repr) const {
    if (!markup_) return as_repr ? repr(value) : to_text(value);
    return as_repr ? escape_html(repr(value)) : escaped_text(value);
  }

  std::string convert(const Value& value, Spec spec) const {
    switch (spec.type) {
      case 's':
      case 'r':
        if (spec.align == '=') spec.align = 0, spec.fill = " ";
        return pad(clip(text_of(value, spec.type == 'r'), spec.precision), spec, '>');
      case 'd':
      case 'i':
      case 'u':
        if (!value.is_number())
          fail("%{} format: a real number is required, not {}", spec.type, type_name(value));
        if (value.is(Kind::kFloat) && !std::isfinite(value.as_double()))
          fail("cannot convert float {} to integer", repr_float(value.as_double()));
        return pad(
            format_integer(
                value.is(Kind::kFloat) ? Value::whole(BigInteger::truncated(value.as_double())) : value,
                spec),
            spec, '>');
      case 'x':
      case 'X':
      case 'o':
        if (!value.is_whole())
          fail("%{} format: an integer is required, not {}", spec.type, type_name(value));
        return pad(format_integer(value, spec), spec, '>');
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
        if (!value.is_number()) fail("must be real number, not {}", type_name(value));
        return pad(format_float(value.as_double(), spec), spec, '>');
      case 'c':
        if (value.is_string() && value.text_length() == 1) return pad(value.text(), spec, '>');
        fail_unsupported("the conversion %c of a number");
      default:
        fail("unsupported format character '{}'", spec.type);
    }
  }

  const std::string& format_;
  const bool markup_;
  const Value& arguments_;
  size_t used_ = 0;
  bool named_ = false;
};

Spec parse_spec(std::string_view text) {
  Spec spec;
  auto is_align = [](char c) { return c == '<' || c == '>' || c == '^' || c == '='; };
  size_t i = 0, second = 0;
  if (!text.empty()) next_code_point(text, second);
  if (second < text.size() && is_align(text[second])) {
    spec.fill = text.substr(0, second);
    spec.align = text[second];
    i = second + 1;
  } else if (!text.empty() && is_align(text[0])) {
    spec.align = text[i++];
  }
  if (i < text.size() && (text[i] == '+' || text[i] == '-' || text[i] == ' ')) spec.sign = text[i++];
  if (i < text.size() && text[i] == '#') spec.alternate = (++i, true);
  if (i < text.size() && text[i] == '0' && spec.align == 0) spec.fill = "0", spec.align = '=', ++i;
  spec.width = parse_number(text, i);
  if (i < text.size() && text[i] == ',') spec.comma = (++i, true);
  if (i < text.size() && text[i] == '.') spec.precision = parse_number(text, ++i);
  if (i < text.size()) spec.type = text[i++];
  if (i != text.size()) fail("Invalid format specifier '{}'", text);
  return spec;
}

std::string format_value(const Value& value, std::string_view text) {
  if (text.empty()) return to_text(value);
  Spec spec = parse_spec(text);
  bool integer_type =
      spec.type == 'd' || spec.type == 'x' || spec.type == 'X' || spec.type == 'o' || spec.type == 'b';
  bool float_type = std::string_view("eEfFgG%").find(spec.type) != std::string_view::npos && spec.type != 0;
  if (value.is_number() && float_type) return pad(format_float(value.as_double(), spec), spec, '>');
  if (value.is_whole() && (integer_type || spec.type == 0)) {
    if (value.is(Kind::kBool) && spec.type == 0) return pad(std::to_string(value.as_int()), spec, '>');
    return pad(format_integer(value, spec), spec, '>');
  }
  if (value.is(Kind::kFloat) && spec.type == 0) return pad(format_float(value.as_double(), spec), spec, '>');
  if (!value.is_string() || (spec.type != 's' && spec.type != 0)) {
    fail("Unknown format code '{}' for object of type '{}'", spec.type, type_name(value));
  }
  if (spec.align == '=') spec.align = 0;
  return pad(clip(value.text(), spec.precision), spec, '<');
}

// "0.name[key]": the first part picks the argument.
Value field_value(std::string_view field, const Arguments& arguments, size_t& automatic) {
  size_t end = std::min(field.find_first_of(".["), field.size());
  std::string_view first = field.substr(0, end);
  Value value;
  if (first.find_first_not_of("0123456789") == first.npos) {
    size_t parsed = 0;
    size_t index = first.empty() ? automatic++ : static_cast<size_t>(parse_number(first, parsed));
    if (index >= arguments.positional.size())
      fail("Replacement index {} out of range for positional args tuple", index);
    value = arguments.positional[index];
  } else {
    auto it = std::find_if(arguments.keyword.begin(), arguments.keyword.end(),
                           [&](const auto& e) { return e.first == first; });
    if (it == arguments.keyword.end()) fail("'{}'", first);
    value = it->second;
  }
  for (std::string_view rest = field.substr(end); !rest.empty();) {
    bool item = rest[0] == '[';
    size_t stop = item ? rest.find(']') : std::min(rest.find_first_of(".[", 1), rest.size());
    if (stop == rest.npos) fail("Missing ']' in format string");
    std::string name(rest.substr(1, stop - 1));
    bool number =
        item && !name.empty() && name.size() < 18 && name.find_first_not_of("0123456789") == name.npos;
    value = item ? get_item(value, number ? Value::integer(std::stoll(name)) : Value::string(name))
                 : get_attribute(value, name);
    rest.remove_prefix(std::min(stop + (item ? 1 : 0), rest.size()));
  }
  return value;
}

}  // namespace

Value format_percent(const Value& format, const Value& arguments) {
  return Value::string(PercentFormatter(format, arguments).run(), format.is_markup());
}

Value format_braces(const Value& given, const Arguments& arguments) {
  const std::string_view format = given.text();
  std::string out;
  size_t automatic = 0;
  for (size_t i = 0; i < format.size();) {
    char c = format[i];
    if (c != '{' && c != '}') {
      out += c;
      ++i;
    } else if (i + 1 < format.size() && format[i + 1] == c) {
      out += c;
      i += 2;
    } else if (c == '}') {
      fail("Single '}}' encountered in format string");
    } else {
      size_t close = format.find('}', i);
      if (close == format.npos) fail("expected '}}' before end of string");
      std::string_view field = format.substr(i + 1, close - i - 1);
      if (field.find('{') != field.npos) fail_unsupported("a nested field in a format string");
      size_t colon = std::min(field.find(':'), field.size());
      size_t bang = std::min(field.find('!'), colon);
      Value value = field_value(field.substr(0, bang), arguments, automatic);
      if (bang + 1 < colon && field[bang + 1] == 'r')
        value = Value::string(repr(value));
      else if (bang < colon)
        value = Value::string(to_text(value));
      const std::string text =
          format_value(value, colon < field.size() ? field.substr(colon + 1) : std::string_view());
      out += given.is_markup() && !value.is_markup() ? escape_html(text) : text;
      i = close + 1;
    }
    if (out.size() > Budget::kMaxText) Budget::check_text(out.size());
  }
  return Value::string(std::move(out), given.is_markup());
}

std::string format_time(const std::string& format, std::time_t now) {
  if (format.size() > 1000) fail("strftime_now: a format of {} bytes, at most 1000 expected", format.size());
  std::tm local{};
  localtime_r(&now, &local);
  if (format.empty()) return {};
  std::vector<char> buffer(64 + format.size() * 64);
  size_t size = std::strftime(buffer.data(), buffer.size(), format.c_str(), &local);
  std::string text(buffer.data(), size);
  if (!is_valid_utf8(text)) fail("strftime_now: the result is not UTF-8");
  return text;
}

}  // namespace millrace::jinja
