// What the tests of the C API share: a device per instruction set, aligned memory that ends at a page nobody
// may touch, random numbers, and matrices of every type.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/normal_floats.h"
#include "kernels/cpu/tables/features.h"
#include "millrace/kernels.h"
#include "tensor/tensor_view.h"

namespace millrace::api_test {

struct CloseDevice {
  void operator()(mr_device* device) const { mr_device_close(device); }
};
using DevicePtr = std::unique_ptr<mr_device, CloseDevice>;

inline DevicePtr open_cpu(const char* isa = nullptr, int threads = 3) {
  const mr_device_options options{threads, isa};
  mr_device* device = nullptr;
  EXPECT_EQ(mr_device_open("cpu", &options, &device), MR_OK) << mr_last_error();
  return DevicePtr(device);
}

inline std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const cpu::KernelTable* table : cpu::runnable_tables()) names.emplace_back(table->name);
  return names;
}

// What AMX tiles make of a row a(i) and a column b(i) of bf16 numbers, i < k: over every 32 in order a sum of
// the even and one of the odd products, by fused multiply-adds in order, added to one another and then to
// the sum (docs/architecture.md#same-bits). Numbers below 2^-126, which count as zero, are not for this.
template <class A, class B>
float sum_of_tiles(int64_t k, const A& a, const B& b) {
  float sum = 0.0f;
  for (int64_t begin = 0; begin < k; begin += 32) {
    float part[2] = {0.0f, 0.0f};
    for (int64_t i = begin; i < std::min(begin + 32, k); ++i) {
      float& to = part[i % 2];
      to = std::fma(static_cast<float>(a(i)), static_cast<float>(b(i)), to);
    }
    sum += part[0] + part[1];
  }
  return sum;
}

// A call that must fail so, with a message that names the argument.
#define EXPECT_REFUSED(call, status, word)                                                    \
  do {                                                                                        \
    EXPECT_EQ(call, status);                                                                  \
    EXPECT_NE(std::string(mr_last_error()).find(word), std::string::npos) << mr_last_error(); \
  } while (false)

// Memory that ends where a page begins that faults: what reads or writes past it is found.
class Guarded {
 public:
  explicit Guarded(size_t bytes, size_t alignment = 256) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = (bytes + page - 1) / page * page;
    mapped_ = whole + page;
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(base_, MAP_FAILED);
    EXPECT_EQ(mprotect(base_ + whole, page, PROT_NONE), 0);
    data_ = base_ + (whole - bytes) / alignment * alignment;
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  void* data() const { return data_; }

 private:
  uint8_t *base_ = nullptr, *data_ = nullptr;
  size_t mapped_ = 0;
};

inline std::vector<float> random_floats(std::mt19937& random, int64_t count, float scale = 1.0f) {
  NormalFloats normal(scale);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = normal(random);
  return x;
}

// A random matrix of any type, as the C API and as the reference see it.
struct TestMatrix {
  std::vector<uint8_t> bytes, scales;
  mr_matrix matrix{};
  TensorView view;
};

inline TestMatrix random_matrix(mr_device* device, std::mt19937& random, mr_dtype type, int64_t experts,
                                int64_t rows, int64_t cols) {
  TestMatrix m;
  size_t row_bytes = 0;
  EXPECT_EQ(mr_row_bytes(type, cols, &row_bytes), MR_OK) << mr_last_error();
  const int64_t all_rows = experts * rows;
  m.bytes.resize(row_bytes * static_cast<size_t>(all_rows));
  m.matrix = {type, experts, rows, cols, m.bytes.data(), 0, nullptr, MR_F32, 0, 0, 0};
  if (type == MR_MXFP4_SPLIT) {
    for (uint8_t& b : m.bytes) b = static_cast<uint8_t>(random());
    m.scales.resize(static_cast<size_t>(all_rows * cols / 32));
    for (uint8_t& b : m.scales) b = static_cast<uint8_t>(122 + random() % 5);
    m.matrix.scales = m.scales.data();
    m.matrix.scales_per_row = cols / 32;
    m.view.scales = {reinterpret_cast<const std::byte*>(m.scales.data()), DType::kU8, 1, 32, cols / 32};
  } else if (type == MR_F8_E4M3) {
    for (uint8_t& b : m.bytes) b = static_cast<uint8_t>((random() % 2 << 7) | random() % 0x58);
    const int64_t per_row = (cols + 6) / 7;  // patches of 3 x 7: a grid that divides nothing
    const std::vector<float> grid = random_floats(random, (all_rows + 2) / 3 * per_row);
    m.scales.resize(grid.size() * sizeof(float));
    std::memcpy(m.scales.data(), grid.data(), m.scales.size());
    m.matrix.scales = m.scales.data();
    m.matrix.rows_per_scale = 3;
    m.matrix.cols_per_scale = 7;
    m.matrix.scales_per_row = per_row;
    m.view.scales = {reinterpret_cast<const std::byte*>(m.scales.data()), DType::kF32, 3, 7, per_row};
  } else {
    const std::vector<float> x = random_floats(random, all_rows * cols);
    EXPECT_EQ(mr_quantize(device, type, x.data(), all_rows, cols, nullptr, m.bytes.data()), MR_OK)
        << mr_last_error();
  }
  m.view.name = "random";
  m.view.type = static_cast<DType>(type);
  m.view.rank = 3;
  m.view.shape = {experts, rows, cols, 1};
  m.view.data = reinterpret_cast<const std::byte*>(m.bytes.data());
  m.view.row_stride_bytes = static_cast<int64_t>(row_bytes);
  return m;
}

struct DestroyWeight {
  void operator()(mr_weight* weight) const { mr_weight_destroy(weight); }
};
using WeightHandle = std::unique_ptr<mr_weight, DestroyWeight>;

// The weight and the memory that the device asked for.
struct MadeWeight {
  std::unique_ptr<Guarded> memory;
  WeightHandle handle;
};
inline MadeWeight make_weight(mr_device* device, const mr_matrix& matrix) {
  MadeWeight made;
  size_t bytes = 0;
  EXPECT_EQ(mr_weight_bytes(device, &matrix, &bytes), MR_OK) << mr_last_error();
  if (bytes > 0) made.memory = std::make_unique<Guarded>(bytes);
  mr_weight* weight = nullptr;
  EXPECT_EQ(mr_weight_create(device, &matrix, bytes > 0 ? made.memory->data() : nullptr, bytes, &weight),
            MR_OK)
      << mr_last_error();
  made.handle.reset(weight);
  return made;
}

// |a - b| over |b|, as lengths of vectors.
inline double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, total = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    total += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(error / std::max(total, 1e-30));
}

}  // namespace millrace::api_test
