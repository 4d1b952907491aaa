// Integers beyond 64 bits, for the rare template that counts so far: Python's have no end, these have 2^20
// bits.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace millrace::jinja {

class BigInteger {
 public:
  static constexpr size_t kMaxDigits = 4300;  // of a decimal text, as Python has it

  BigInteger() = default;
  explicit BigInteger(int64_t value);
  // The whole part of a finite number.
  static BigInteger truncated(double value);
  // Digits of `base` (2 to 36) and nothing else; nothing where there is another character, or none.
  static std::optional<BigInteger> parse(std::string_view digits, int base);

  bool negative() const { return negative_; }
  size_t num_bytes() const { return limbs_.size() * sizeof(uint32_t); }
  std::optional<int64_t> as_int() const;  // where 64 bits hold it
  // The nearest; fails where none is finite.
  double as_double() const;
  std::string text() const;  // decimal; fails where Python would, beyond kMaxDigits

  BigInteger operator-() const;
  friend BigInteger operator+(const BigInteger& a, const BigInteger& b);
  friend BigInteger operator-(const BigInteger& a, const BigInteger& b) { return a + -b; }
  friend BigInteger operator*(const BigInteger& a, const BigInteger& b);
  friend std::strong_ordering operator<=>(const BigInteger& a, const BigInteger& b);
  friend bool operator==(const BigInteger& a, const BigInteger& b) = default;
  // Quotient towards minus infinity and a remainder of the divisor's sign; b is not 0.
  static std::pair<BigInteger, BigInteger> floor_divide(const BigInteger& a, const BigInteger& b);
  // a / b, rounded once; b is not 0.
  static double true_divide(const BigInteger& a, const BigInteger& b);
  static BigInteger power(BigInteger base, uint64_t exponent);

 private:
  using Limbs = std::vector<uint32_t>;  // the least first, the last not 0
  BigInteger(Limbs limbs, bool negative);
  static int compare_limbs(const Limbs& a, const Limbs& b);
  static Limbs add_limbs(const Limbs& a, const Limbs& b);
  static Limbs subtract_limbs(const Limbs& a, const Limbs& b);  // a >= b
  static std::pair<Limbs, Limbs> divide_limbs(const Limbs& a, const Limbs& b);
  static Limbs shift_left(const Limbs& a, int64_t bits);
  int64_t num_bits() const;
  // |this| x 2^exponent, rounded to even; `more`: there is a little more than that.
  double scaled(int64_t exponent, bool more) const;

  Limbs limbs_;
  bool negative_ = false;
};

}  // namespace millrace::jinja
