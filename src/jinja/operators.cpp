// Operators: Python's rules as jinja2's sandbox applies them.
#include "jinja/operators.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/big_integer.h"
#include "jinja/python_format.h"
#include "jinja/python_text.h"

namespace millrace::jinja {
namespace {

[[noreturn]] void fail_operands(std::string_view op, const Value& a, const Value& b) {
  fail("unsupported operand type(s) for {}: '{}' and '{}'", op, type_name(a), type_name(b));
}

int64_t floor_divide(int64_t a, int64_t b) {
  int64_t q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}

int64_t floor_modulo(int64_t a, int64_t b) {
  if (b == -1) return 0;
  int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

// Where both, and what comes out, fit into 64 bits.
std::optional<int64_t> small_operator(char op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case '+':
      return __builtin_add_overflow(a, b, &result) ? std::nullopt : std::optional(result);
    case '-':
      return __builtin_sub_overflow(a, b, &result) ? std::nullopt : std::optional(result);
    case '*':
      return __builtin_mul_overflow(a, b, &result) ? std::nullopt : std::optional(result);
    case 'F':
      if (a == std::numeric_limits<int64_t>::min() && b == -1) return std::nullopt;
      return floor_divide(a, b);
    case '%':
      return floor_modulo(a, b);
    default:
      return std::nullopt;
  }
}

Value power(const Value& base, const Value& exponent) {
  const BigInteger power = exponent.as_big();
  if (power.negative()) {
    if (!truthy(base)) fail("0.0 cannot be raised to a negative power");
    return Value::real(std::pow(base.as_double(), exponent.as_double()));
  }
  const std::optional<int64_t> small = power.as_int();
  if (!small && !(base.is_integral() && base.as_int() >= -1 && base.as_int() <= 1))
    fail_unsupported("a power beyond 64 bits");
  // Of 0, 1 and -1 the last bit of the exponent is all that counts.
  const uint64_t steps =
      small ? static_cast<uint64_t>(*small)
            : 2 + static_cast<uint64_t>(*BigInteger::floor_divide(power, BigInteger(2)).second.as_int());
  return Value::whole(BigInteger::power(base.as_big(), steps));
}

Value integer_operator(char op, const Value& a, const Value& b) {
  if (op != '+' && op != '-' && op != '*' && op != 'P' && !truthy(b)) {
    fail("{}", op == 'F'   ? "integer division or modulo by zero"
               : op == '%' ? "integer modulo by zero"
                           : "division by zero");
  }
  if (a.is_integral() && b.is_integral()) {
    if (const std::optional<int64_t> result = small_operator(op, a.as_int(), b.as_int()))
      return Value::integer(*result);
  }
  switch (op) {
    case '+':
      return Value::whole(a.as_big() + b.as_big());
    case '-':
      return Value::whole(a.as_big() - b.as_big());
    case '*':
      return Value::whole(a.as_big() * b.as_big());
    case 'F':
      return Value::whole(BigInteger::floor_divide(a.as_big(), b.as_big()).first);
    case '%':
      return Value::whole(BigInteger::floor_divide(a.as_big(), b.as_big()).second);
    case 'P':
      return power(a, b);
    default:
      return Value::real(BigInteger::true_divide(a.as_big(), b.as_big()));
  }
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
  if (op == '%' && a.is_string()) return format_percent(a, b);
  if (a.is_undefined()) fail_undefined(a);
  if (b.is_undefined()) fail_undefined(b);
  if (a.is_whole() && b.is_whole()) return integer_operator(op, a, b);
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
  if (!a.is_whole()) fail("bad operand type for unary {}: '{}'", op, type_name(a));
  return integer_operator(op, Value::integer(0), a);
}

}  // namespace millrace::jinja
