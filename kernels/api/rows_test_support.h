// What the tests of operations on rows share: a matrix of any float type whose last row ends where nobody may
// read, comparison with double, and a call on every instruction set.
#pragma once

#include <cstdint>
#include <functional>

#include "base/float_bits.h"
#include "kernels/api/api_test_support.h"
#include "kernels/reference/naive_fused.h"

namespace millrace::api_test {

using reference::Row;
inline constexpr uint8_t kPoison = 0xa5;
inline constexpr mr_dtype kFloatTypes[] = {MR_F32, MR_F16, MR_BF16};

inline size_t bytes_of_type(mr_dtype type) { return type == MR_F32 ? 4 : 2; }
inline double read(const uint8_t* p, mr_dtype type) {
  if (type == MR_F32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return type == MR_F16 ? to_float(Half{bits}) : to_float(BFloat16{bits});
}
inline void write(uint8_t* p, mr_dtype type, float x) {
  if (type == MR_F32) {
    std::memcpy(p, &x, 4);
  } else {
    const uint16_t bits = type == MR_F16 ? to_half(x).bits : to_bfloat16(x).bits;
    std::memcpy(p, &bits, 2);
  }
}

// [rows, cols] with a gap behind every row but the last, which ends where nobody may read.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, mr_dtype type, int64_t gap)
      : rows_(rows),
        cols_(cols),
        stride_(cols + gap),
        type_(type),
        memory_(size(), bytes_of_type(type)),
        data_(static_cast<uint8_t*>(memory_.data())) {
    std::memset(data_, kPoison, size());
  }
  Matrix(int64_t rows, int64_t cols, mr_dtype type, int64_t gap, std::mt19937& random, float scale = 1.0f)
      : Matrix(rows, cols, type, gap) {
    const std::vector<float> x = random_floats(random, rows * cols, scale);
    for (int64_t i = 0; i < rows * cols; ++i) write(at(i / cols, i % cols), type, x[static_cast<size_t>(i)]);
  }

  mr_rows view() { return {data_, type_, stride_}; }
  mr_vector vector() { return {data_, type_}; }
  Row row(int64_t r) const {
    Row values;
    for (int64_t c = 0; c < cols_; ++c) values.push_back(read(at(r, c), type_));
    return values;
  }
  std::vector<uint8_t> bytes() const { return {data_, data_ + size()}; }
  void poison() { std::memset(data_, kPoison, size()); }
  bool gaps_are_poison() const {
    for (int64_t r = 0; r + 1 < rows_; ++r) {
      for (const uint8_t* p = at(r, cols_); p < at(r + 1, 0); ++p) {
        if (*p != kPoison) return false;
      }
    }
    return true;
  }
  uint8_t* at(int64_t r, int64_t c) const {
    return data_ + static_cast<size_t>(r * stride_ + c) * bytes_of_type(type_);
  }
  mr_dtype type() const { return type_; }

 private:
  size_t size() const {
    return rows_ == 0 ? 0 : static_cast<size_t>((rows_ - 1) * stride_ + cols_) * bytes_of_type(type_);
  }
  int64_t rows_, cols_, stride_;
  mr_dtype type_;
  Guarded memory_;
  uint8_t* data_;
};

// Of a result that is rounded once, relative to the largest of a row.
inline double rounding(mr_dtype type) { return type == MR_F32 ? 4e-6 : type == MR_F16 ? 6e-4 : 5e-3; }
inline void expect_close(const Row& got, const Row& want, mr_dtype type, const std::string& what) {
  double most = 1;
  for (const double v : want) most = std::max(most, std::abs(v));
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], rounding(type) * most) << what << ", column " << i;
  }
}

// Runs `call` on every instruction set and on one to three threads: the outputs' bits are scalar's, gaps stay
// poison.
inline void same_on_all(const std::vector<Matrix*>& outputs,
                        const std::function<mr_status(mr_device*)>& call) {
  std::vector<std::vector<uint8_t>> first;
  for (const std::string& isa : isas()) {
    for (const int threads : {1, 3}) {
      const DevicePtr device = open_cpu(isa.c_str(), threads);
      for (Matrix* out : outputs) out->poison();
      ASSERT_EQ(call(device.get()), MR_OK) << isa << ": " << mr_last_error();
      for (size_t i = 0; i < outputs.size(); ++i) {
        ASSERT_TRUE(outputs[i]->gaps_are_poison()) << isa << ", output " << i;
        if (first.size() == i) first.push_back(outputs[i]->bytes());
        ASSERT_EQ(first[i], outputs[i]->bytes()) << isa << ", " << threads << " threads, output " << i;
      }
    }
  }
}

}  // namespace millrace::api_test
