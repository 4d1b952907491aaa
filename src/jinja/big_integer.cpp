#include "jinja/big_integer.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "jinja/value.h"

namespace millrace::jinja {
namespace {

constexpr size_t kMaxLimbs = (size_t{1} << 20) / 32;
constexpr uint32_t kNineDigits = 1'000'000'000;  // nine digits at once

void trim(std::vector<uint32_t>& limbs) {
  while (!limbs.empty() && limbs.back() == 0) limbs.pop_back();
}

// limbs = limbs x factor + more.
void multiply_add(std::vector<uint32_t>& limbs, uint32_t factor, uint32_t more) {
  uint64_t carry = more;
  for (uint32_t& limb : limbs) {
    carry += uint64_t{limb} * factor;
    limb = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  if (carry != 0) limbs.push_back(static_cast<uint32_t>(carry));
}

// limbs = limbs / divisor; the remainder.
uint32_t divide_small(std::vector<uint32_t>& limbs, uint32_t divisor) {
  uint64_t rest = 0;
  for (size_t i = limbs.size(); i-- > 0;) {
    rest = rest << 32 | limbs[i];
    limbs[i] = static_cast<uint32_t>(rest / divisor);
    rest %= divisor;
  }
  trim(limbs);
  return static_cast<uint32_t>(rest);
}

}  // namespace

BigInteger::BigInteger(int64_t value) : negative_(value < 0) {
  uint64_t rest = negative_ ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
  for (; rest != 0; rest >>= 32) limbs_.push_back(static_cast<uint32_t>(rest));
}

BigInteger::BigInteger(Limbs limbs, bool negative) : limbs_(std::move(limbs)), negative_(negative) {
  trim(limbs_);
  if (limbs_.empty()) negative_ = false;
  if (limbs_.size() > kMaxLimbs) fail_unsupported("an integer beyond {} bits", 32 * kMaxLimbs);
}

BigInteger BigInteger::truncated(double value) {
  int exponent = 0;
  const double mantissa =
      std::frexp(std::fabs(std::trunc(value)), &exponent);  // 53 bits, then the rest is zeros
  const auto whole = static_cast<int64_t>(std::ldexp(mantissa, 53));
  if (exponent >= 53) return BigInteger(shift_left(BigInteger(whole).limbs_, exponent - 53), value < 0);
  return BigInteger(BigInteger(whole >> (53 - exponent)).limbs_, value < 0);
}

std::optional<BigInteger> BigInteger::parse(std::string_view digits, int base) {
  if (digits.empty()) return std::nullopt;
  Budget::spend(digits.size() * digits.size() / 4096);
  Limbs limbs;
  for (const char c : digits) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 10
                      : c >= 'A' && c <= 'Z' ? c - 'A' + 10
                                             : base;
    if (digit >= base) return std::nullopt;
    multiply_add(limbs, static_cast<uint32_t>(base), static_cast<uint32_t>(digit));
    if (limbs.size() > kMaxLimbs) fail_unsupported("an integer beyond {} bits", 32 * kMaxLimbs);
  }
  return BigInteger(std::move(limbs), false);
}

std::optional<int64_t> BigInteger::as_int() const {
  if (limbs_.size() > 2) return std::nullopt;
  uint64_t value = 0;
  for (size_t i = limbs_.size(); i-- > 0;) value = value << 32 | limbs_[i];
  const uint64_t most = uint64_t{1} << 63;
  if (value > most || (value == most && !negative_)) return std::nullopt;
  return static_cast<int64_t>(negative_ ? ~value + 1 : value);
}

int64_t BigInteger::num_bits() const {
  if (limbs_.empty()) return 0;
  return static_cast<int64_t>(32 * limbs_.size()) - std::countl_zero(limbs_.back());
}

double BigInteger::scaled(int64_t exponent, bool more) const {
  // The first 64 bits have the 53 of a double and those that decide how it is rounded: the last of them also
  // stands for everything behind it.
  const int64_t behind = num_bits() - 64;
  uint64_t bits = 0;
  for (int64_t i = num_bits() - 1; i >= std::max<int64_t>(0, behind); --i) {
    bits = bits << 1 | (limbs_[static_cast<size_t>(i / 32)] >> (i % 32) & 1);
  }
  if (behind < 0) bits <<= -behind;
  for (int64_t i = 0; i < behind && !more; ++i) {
    more = (limbs_[static_cast<size_t>(i / 32)] >> (i % 32) & 1) != 0;
  }
  if (more) bits |= 1;
  const double value = std::ldexp(static_cast<double>(bits), static_cast<int>(exponent + behind));
  return negative_ ? -value : value;
}

double BigInteger::as_double() const {
  if (limbs_.empty()) return 0.0;
  const double value = scaled(0, false);
  if (!std::isfinite(value)) fail("int too large to convert to float");
  return value;
}

std::string BigInteger::text() const {
  Budget::spend(limbs_.size() * limbs_.size() / 64);
  if (static_cast<double>(num_bits()) * 0.30103 > static_cast<double>(kMaxDigits))
    fail(
        "Exceeds the limit ({} digits) for integer string conversion; use sys.set_int_max_str_digits() to "
        "increase the limit",
        kMaxDigits);
  std::string out;
  for (Limbs rest = limbs_; !rest.empty();) {
    uint32_t nine = divide_small(rest, kNineDigits);
    for (int digit = 0; digit < 9 && (nine != 0 || !rest.empty()); ++digit, nine /= 10) {
      out += static_cast<char>('0' + nine % 10);
    }
  }
  if (out.empty()) out = "0";
  if (negative_) out += '-';
  std::reverse(out.begin(), out.end());
  return out;
}

int BigInteger::compare_limbs(const Limbs& a, const Limbs& b) {
  if (a.size() != b.size()) return a.size() < b.size() ? -1 : 1;
  for (size_t i = a.size(); i-- > 0;) {
    if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
  }
  return 0;
}

BigInteger::Limbs BigInteger::add_limbs(const Limbs& a, const Limbs& b) {
  Limbs sum = a.size() < b.size() ? b : a;
  const Limbs& less = a.size() < b.size() ? a : b;
  uint64_t carry = 0;
  for (size_t i = 0; i < sum.size(); ++i) {
    carry += uint64_t{sum[i]} + (i < less.size() ? less[i] : 0);
    sum[i] = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  if (carry != 0) sum.push_back(static_cast<uint32_t>(carry));
  return sum;
}

BigInteger::Limbs BigInteger::subtract_limbs(const Limbs& a, const Limbs& b) {
  Limbs rest = a;
  int64_t borrow = 0;
  for (size_t i = 0; i < rest.size(); ++i) {
    const int64_t value = int64_t{rest[i]} - (i < b.size() ? b[i] : 0) - borrow;
    borrow = value < 0 ? 1 : 0;
    rest[i] = static_cast<uint32_t>(value);
  }
  trim(rest);
  return rest;
}

BigInteger::Limbs BigInteger::shift_left(const Limbs& a, int64_t bits) {
  if (a.empty()) return a;
  Limbs out(static_cast<size_t>(bits / 32), 0);
  const auto by = static_cast<int>(bits % 32);
  uint64_t carry = 0;
  for (const uint32_t limb : a) {
    carry |= uint64_t{limb} << by;
    out.push_back(static_cast<uint32_t>(carry));
    carry >>= 32;
  }
  if (carry != 0) out.push_back(static_cast<uint32_t>(carry));
  return out;
}

// Knuth's algorithm D: a digit of the quotient is guessed from the first two of the divisor, which is shifted
// so that the guess is one too large at most, rarely.
std::pair<BigInteger::Limbs, BigInteger::Limbs> BigInteger::divide_limbs(const Limbs& a, const Limbs& b) {
  if (compare_limbs(a, b) < 0) return {{}, a};
  if (b.size() == 1) {
    Limbs quotient = a;
    const uint32_t rest = divide_small(quotient, b[0]);
    return {std::move(quotient), rest == 0 ? Limbs{} : Limbs{rest}};
  }
  Budget::spend(1 + (a.size() - b.size() + 1) * b.size() / 8);
  const int by = std::countl_zero(b.back());
  const Limbs divisor = shift_left(b, by);
  Limbs rest = shift_left(a, by);
  rest.resize(a.size() + 1, 0);
  const size_t n = divisor.size();
  Limbs quotient(rest.size() - n, 0);
  for (size_t j = quotient.size(); j-- > 0;) {
    const uint64_t top = uint64_t{rest[j + n]} << 32 | rest[j + n - 1];
    uint64_t guess = top / divisor[n - 1], left = top % divisor[n - 1];
    while (guess >> 32 != 0 || guess * divisor[n - 2] > (left << 32 | rest[j + n - 2])) {
      --guess;
      left += divisor[n - 1];
      if (left >> 32 != 0) break;
    }
    uint64_t carry = 0;
    int64_t borrow = 0;
    for (size_t i = 0; i < n; ++i) {
      carry += guess * divisor[i];
      const int64_t value = int64_t{rest[j + i]} - static_cast<uint32_t>(carry) - borrow;
      rest[j + i] = static_cast<uint32_t>(value);
      borrow = value < 0 ? 1 : 0;
      carry >>= 32;
    }
    const int64_t value = int64_t{rest[j + n]} - static_cast<int64_t>(carry) - borrow;
    rest[j + n] = static_cast<uint32_t>(value);
    if (value < 0) {  // one too large after all
      --guess;
      uint64_t again = 0;
      for (size_t i = 0; i < n; ++i) {
        again += uint64_t{rest[j + i]} + divisor[i];
        rest[j + i] = static_cast<uint32_t>(again);
        again >>= 32;
      }
      rest[j + n] += static_cast<uint32_t>(again);
    }
    quotient[j] = static_cast<uint32_t>(guess);
  }
  trim(quotient);
  // The remainder is shifted as the divisor was.
  for (size_t i = 0; i < n && by > 0; ++i) {
    rest[i] = rest[i] >> by | (i + 1 < n ? rest[i + 1] << (32 - by) : 0);
  }
  rest.resize(n);
  trim(rest);
  return {std::move(quotient), std::move(rest)};
}

BigInteger BigInteger::operator-() const { return BigInteger(limbs_, !negative_); }

BigInteger operator+(const BigInteger& a, const BigInteger& b) {
  Budget::spend(1 + std::max(a.limbs_.size(), b.limbs_.size()) / 16);
  if (a.negative_ == b.negative_) return {BigInteger::add_limbs(a.limbs_, b.limbs_), a.negative_};
  if (BigInteger::compare_limbs(a.limbs_, b.limbs_) >= 0)
    return {BigInteger::subtract_limbs(a.limbs_, b.limbs_), a.negative_};
  return {BigInteger::subtract_limbs(b.limbs_, a.limbs_), b.negative_};
}

BigInteger operator*(const BigInteger& a, const BigInteger& b) {
  if (a.limbs_.size() + b.limbs_.size() > kMaxLimbs + 1)
    fail_unsupported("an integer beyond {} bits", 32 * kMaxLimbs);
  Budget::spend(1 + a.limbs_.size() * b.limbs_.size() / 8);
  BigInteger::Limbs product(a.limbs_.size() + b.limbs_.size(), 0);
  for (size_t i = 0; i < a.limbs_.size(); ++i) {
    uint64_t carry = 0;
    for (size_t j = 0; j < b.limbs_.size(); ++j) {
      carry += uint64_t{a.limbs_[i]} * b.limbs_[j] + product[i + j];
      product[i + j] = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
    product[i + b.limbs_.size()] = static_cast<uint32_t>(carry);
  }
  return {std::move(product), a.negative_ != b.negative_};
}

std::strong_ordering operator<=>(const BigInteger& a, const BigInteger& b) {
  if (a.negative_ != b.negative_)
    return a.negative_ ? std::strong_ordering::less : std::strong_ordering::greater;
  const int order = BigInteger::compare_limbs(a.limbs_, b.limbs_);
  return (a.negative_ ? -order : order) <=> 0;
}

std::pair<BigInteger, BigInteger> BigInteger::floor_divide(const BigInteger& a, const BigInteger& b) {
  auto [limbs, rest] = divide_limbs(a.limbs_, b.limbs_);
  BigInteger quotient(std::move(limbs), a.negative_ != b.negative_), remainder(std::move(rest), a.negative_);
  if (!remainder.limbs_.empty() && a.negative_ != b.negative_) {
    quotient = quotient - BigInteger(1);
    remainder = remainder + b;
  }
  return {std::move(quotient), std::move(remainder)};
}

double BigInteger::true_divide(const BigInteger& a, const BigInteger& b) {
  if (a.limbs_.empty()) return 0.0;
  const int64_t by = std::max<int64_t>(0, 66 - (a.num_bits() - b.num_bits()));
  auto [limbs, rest] = divide_limbs(shift_left(a.limbs_, by), b.limbs_);
  const double value = BigInteger(std::move(limbs), a.negative_ != b.negative_).scaled(-by, !rest.empty());
  if (!std::isfinite(value)) fail("integer division result too large for a float");
  return value;
}

BigInteger BigInteger::power(BigInteger base, uint64_t exponent) {
  BigInteger result(1);
  while (exponent > 0) {
    if ((exponent & 1) != 0) result = result * base;
    exponent >>= 1;
    if (exponent > 0) base = base * base;
  }
  return result;
}

}  // namespace millrace::jinja
