// Operators, attribute and item lookup, slices: Python's rules as jinja2's sandbox applies them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "jinja/builtins.h"
#include "jinja/python_text.h"

namespace millrace::jinja {
namespace {

[[noreturn]] void fail_operands(std::string_view op, const Value& a, const Value& b) {
  fail("unsupported operand type(s) for {}: '{}' and '{}'", op, type_name(a), type_name(b));
}

[[noreturn]] void fail_overflow() { fail_unsupported("an integer beyond 64 bits"); }

int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) fail("integer division or modulo by zero");
  if (a == std::numeric_limits<int64_t>::min() && b == -1) fail_overflow();
  int64_t q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}

int64_t floor_modulo(int64_t a, int64_t b) {
  if (b == 0) fail("integer modulo by zero");
  if (b == -1) return 0;
  int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

Value power(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) fail("0.0 cannot be raised to a negative power");
    return Value::real(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  int64_t result = 1;
  while (exponent > 0) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) fail_overflow();
    exponent >>= 1;
    if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) fail_overflow();
  }
  return Value::integer(result);
}

Value integer_operator(char op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case '+':
      overflow = __builtin_add_overflow(a, b, &result);
      break;
    case '-':
      overflow = __builtin_sub_overflow(a, b, &result);
      break;
    case '*':
      overflow = __builtin_mul_overflow(a, b, &result);
      break;
    case 'F':
      result = floor_divide(a, b);
      break;
    case '%':
      result = floor_modulo(a, b);
      break;
    case 'P':
      return power(a, b);
    default:
      if (b == 0) fail("division by zero");
      return Value::real(static_cast<double>(a) / static_cast<double>(b));
  }
  if (overflow) fail_overflow();
  return Value::integer(result);
}

Value float_operator(char op, double a, double b) {
  switch (op) {
    case '+':
      return Value::real(a + b);
    case '-':
      return Value::real(a - b);
    case '*':
      return Value::real(a * b);
    case 'P':
      if (a == 0 && b < 0) fail("0.0 cannot be raised to a negative power");
      if (a < 0 && b != std::floor(b)) fail_unsupported("a complex number");
      return Value::real(std::pow(a, b));
    default:
      break;
  }
  if (b == 0)
    fail("{}", op == '/'   ? "float division by zero"
               : op == '%' ? "float modulo"
                           : "float floor division by zero");
  if (op == '/') return Value::real(a / b);
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (op == '%') return Value::real(remainder == 0 ? std::copysign(0.0, b) : remainder);
  double quotient = (a - remainder) / b;
  double floored = std::floor(quotient);
  return Value::real(quotient - floored > 0.5 ? floored + 1 : floored);
}

Value add_text(const Value& a, const Value& b) {
  Budget::check_text(a.text().size() + b.text().size());
  if (a.is_markup() == b.is_markup()) return Value::string(a.text() + b.text(), a.is_markup());
  auto escaped = [](const Value& v) { return v.is_markup() ? v.text() : escape_html(v.text()); };
  return Value::string(escaped(a) + escaped(b), true);
}

Value add_items(const Value& a, const Value& b) {
  std::vector<Value> items = a.items();
  items.insert(items.end(), b.items().begin(), b.items().end());
  return Value::sequence(a.kind(), std::move(items));
}

Value repeat(const Value& value, int64_t count) {
  auto times = static_cast<size_t>(std::max<int64_t>(count, 0));
  if (value.is_string()) {
    size_t size = value.text().size();
    if (size != 0 && times > Budget::kMaxText / size) Budget::check_text(Budget::kMaxText + 1);
    std::string text;
    text.reserve(size * times);
    for (size_t i = 0; i < times && size != 0; ++i) text += value.text();
    return Value::string(std::move(text), value.is_markup());
  }
  size_t size = value.items().size();
  if (size != 0 && times > Budget::kMaxSteps / size) Budget::spend(Budget::kMaxSteps + 1);
  Budget::spend(size * times);
  std::vector<Value> items;
  for (size_t i = 0; i < times && size != 0; ++i)
    items.insert(items.end(), value.items().begin(), value.items().end());
  return Value::sequence(value.kind(), std::move(items));
}

bool is_repeatable(const Value& v) { return v.is_string() || v.is(Kind::kList) || v.is(Kind::kTuple); }

}  // namespace

Value binary_operator(char op, const Value& a, const Value& b) {
  if (op == '%' && a.is_string()) return Value::string(format_percent(a.text(), b), a.is_markup());
  if (a.is_undefined()) fail_undefined(a);
  if (b.is_undefined()) fail_undefined(b);
  if (a.is_integral() && b.is_integral()) return integer_operator(op, a.as_int(), b.as_int());
  if (a.is_number() && b.is_number()) return float_operator(op, a.as_double(), b.as_double());
  if (op == '+') {
    if (a.is_string() && b.is_string()) return add_text(a, b);
    if (a.kind() == b.kind() && (a.is(Kind::kList) || a.is(Kind::kTuple))) return add_items(a, b);
    if (a.is_string()) fail("can only concatenate str (not \"{}\") to str", type_name(b));
    if (a.is(Kind::kList) || a.is(Kind::kTuple)) {
      fail("can only concatenate {} (not \"{}\") to {}", type_name(a), type_name(b), type_name(a));
    }
  }
  if (op == '*' && is_repeatable(a) && b.is_integral()) return repeat(a, b.as_int());
  if (op == '*' && is_repeatable(b) && a.is_integral()) return repeat(b, a.as_int());
  fail_operands(op == 'F' ? "//" : op == 'P' ? "** or pow()" : std::string_view(&op, 1), a, b);
}

Value unary_operator(char op, const Value& a) {
  if (op == '!') return Value::boolean(!truthy(a));
  if (a.is_undefined()) fail_undefined(a);
  if (a.is(Kind::kFloat)) return Value::real(op == '-' ? -a.as_double() : a.as_double());
  if (!a.is_integral()) fail("bad operand type for unary {}: '{}'", op, type_name(a));
  return op == '-' ? integer_operator('-', 0, a.as_int()) : Value::integer(a.as_int());
}

namespace {

std::string describe_object(const Value& object) {
  return object.is_none() ? "None" : type_name(object) + " object";
}

// What Python's getattr() finds; null where it raises AttributeError.
std::optional<Value> find_attribute(const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Kind::kNamespace: {
      const Value* value = object.as_namespace().find(name);
      return value == nullptr ? std::nullopt : std::optional<Value>(*value);
    }
    case Kind::kLoop:
      return loop_attribute(object, name);
    case Kind::kMacro:
      if (name == "name") return Value::string(macro_name(object));
      return std::nullopt;
    case Kind::kTuple:
      if (object.as_sequence().label == "group" && name == "grouper") return object.items()[0];
      if (object.as_sequence().label == "group" && name == "list") return object.items()[1];
      break;
    default:
      break;
  }
  if (is_mutating_method(object, name)) {
    return Value::undefined(
        fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(object)));
  }
  Native method = find_method(object, name);
  if (method == nullptr) return std::nullopt;
  return Value::object(Kind::kFunction, std::make_shared<FunctionObject>(std::string(name), method, object));
}

Value missing_attribute(const Value& object, std::string_view name) {
  return Value::undefined(fmt::format("'{}' has no attribute '{}'", describe_object(object), name));
}

bool is_key(const Value& key) {
  if (!key.is(Kind::kTuple)) return !key.is(Kind::kList) && !key.is(Kind::kDict) && !key.is(Kind::kView);
  for (const Value& part : key.items()) {
    if (!is_key(part)) return false;
  }
  return true;
}

std::optional<Value> find_index(const Value& object, int64_t index) {
  bool indexable =
      object.is_string() || object.is(Kind::kList) || object.is(Kind::kTuple) || object.is(Kind::kRange);
  if (!indexable) return std::nullopt;
  int64_t length = *length_of(object);
  if (index < 0) index += length;
  if (index < 0 || index >= length) return std::nullopt;
  if (!object.is_string()) return object.items()[static_cast<size_t>(index)];
  const std::string& text = object.text();
  Budget::spend(1 + static_cast<size_t>(index) / 64);
  bool ascii = static_cast<int64_t>(text.size()) == length;
  size_t begin = ascii ? static_cast<size_t>(index) : byte_offset(text, index);
  size_t end = begin;
  next_code_point(text, end);
  return Value::string(text.substr(begin, end - begin), object.is_markup());
}

}  // namespace

Value get_attribute(const Value& object, std::string_view name) {
  if (object.is_undefined()) fail_undefined(object);
  if (std::optional<Value> value = find_attribute(object, name)) return *value;
  if (object.is(Kind::kDict)) {
    if (const Value* value = object.dict().find(name)) return *value;
  }
  return missing_attribute(object, name);
}

Value get_item(const Value& object, const Value& key) {
  if (object.is_undefined()) fail_undefined(object);
  if (object.is(Kind::kDict)) {
    if (const Value* value = is_key(key) ? object.dict().find(key) : nullptr) return *value;
  } else if (key.is_integral()) {
    if (std::optional<Value> value = find_index(object, key.as_int())) return *value;
  }
  if (key.is_string()) {
    if (std::optional<Value> value = find_attribute(object, key.text())) return *value;
    return missing_attribute(object, key.text());
  }
  return Value::undefined(fmt::format("{} has no element {}", describe_object(object), repr(key)));
}

Value get_path(const Value& object, const Value& path) {
  if (!path.is_string()) return path.is_none() ? object : get_item(object, path);
  Value value = object;
  std::string_view rest = path.text();
  for (;;) {
    size_t dot = rest.find('.');
    std::string part(rest.substr(0, dot));
    bool number = !part.empty() && part.size() < 18 && part.find_first_not_of("0123456789") == part.npos;
    value = get_item(value, number ? Value::integer(std::stoll(part)) : Value::string(part));
    if (dot == rest.npos) return value;
    rest.remove_prefix(dot + 1);
  }
}

namespace {

// Python's slice.indices: the positions a slice takes from something of this length.
struct SliceRange {
  int64_t start, stop, step, count;
};

SliceRange slice_range(int64_t length, const Value& start, const Value& stop, const Value& step) {
  int64_t by = step.is_none() ? 1 : step.as_int();
  if (by == 0) fail("slice step cannot be zero");
  by = std::clamp<int64_t>(by, -length - 1, length + 1);  // a longer step takes the same items
  int64_t low = by < 0 ? -1 : 0, high = by < 0 ? length - 1 : length;
  auto clip = [&](const Value& bound, int64_t otherwise) {
    if (bound.is_none()) return otherwise;
    int64_t i = bound.as_int();
    return i < 0 ? std::max(i < -length ? low : i + length, low) : std::min(i, high);
  };
  int64_t from = clip(start, by < 0 ? high : low), to = clip(stop, by < 0 ? low : high);
  int64_t distance = by < 0 ? from - to : to - from;
  return {from, to, by, distance <= 0 ? 0 : (distance - 1) / std::abs(by) + 1};
}

}  // namespace

Value get_slice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is_undefined()) fail_undefined(object);
  bool sliceable =
      object.is_string() || object.is(Kind::kList) || object.is(Kind::kTuple) || object.is(Kind::kRange);
  for (const Value* bound : {&start, &stop, &step})
    sliceable = sliceable && (bound->is_none() || bound->is_integral());
  if (!sliceable) return Value::undefined(fmt::format("{} has no such slice", describe_object(object)));
  SliceRange range = slice_range(*length_of(object), start, stop, step);
  if (!object.is_string()) {
    std::vector<Value> items;
    items.reserve(static_cast<size_t>(range.count));
    for (int64_t i = 0; i < range.count; ++i)
      items.push_back(object.items()[static_cast<size_t>(range.start + i * range.step)]);
    if (object.is(Kind::kRange)) fail_unsupported("a slice of range(); range()|list has slices");
    return Value::sequence(object.kind(), std::move(items));
  }
  const std::string& text = object.text();
  Budget::spend(1 + text.size() / 64);
  if (range.step == 1) {
    size_t begin = byte_offset(text, range.start);
    size_t size = byte_offset(std::string_view(text).substr(begin), range.count);
    return Value::string(text.substr(begin, size), object.is_markup());
  }
  Budget::spend(text.size());
  std::vector<std::string_view> parts = split_code_points(text);
  std::string out;
  for (int64_t i = 0; i < range.count; ++i) out += parts[static_cast<size_t>(range.start + i * range.step)];
  return Value::string(std::move(out), object.is_markup());
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace millrace::jinja
