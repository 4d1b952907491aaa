// What the tests of linear attention on a GPU share: a device of the C API with arrays in memory that a CPU
// reads too, random values, comparing.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/resources.h"
#include "millrace/kernels.h"

namespace millrace::api::gpu {

// A device and arrays in its memory.
class LinearApi {
 public:
  explicit LinearApi(const char* name) {
    const mr_device_options options{2, nullptr};
    EXPECT_EQ(mr_device_open(name, &options, &device), MR_OK) << mr_last_error();
  }
  ~LinearApi() {
    memory_.clear();
    mr_device_close(device);
  }
  LinearApi(const LinearApi&) = delete;
  LinearApi& operator=(const LinearApi&) = delete;
  // Managed memory: a CPU reads it as well as a GPU.
  template <class T>
  T* put(const std::vector<T>& values) {
    void* to = nullptr;
    MILLRACE_CUDA_TRY(cudaMallocManaged(&to, std::max<size_t>(values.size(), 1) * sizeof(T)));
    memory_.push_back(std::unique_ptr<void, cudaError_t (*)(void*)>(to, cudaFree));
    std::copy(values.begin(), values.end(), static_cast<T*>(to));
    return static_cast<T*>(to);
  }
  std::vector<float> get(const float* from, size_t count) {
    EXPECT_EQ(mr_device_synchronize(device, nullptr), MR_OK) << mr_last_error();
    return {from, from + count};
  }
  mr_device* device = nullptr;

 private:
  std::vector<std::unique_ptr<void, cudaError_t (*)(void*)>> memory_;
};

inline std::vector<float> normal(uint32_t seed, int64_t count, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0.0f, scale);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = distribution(random);
  return x;
}

// Where what is wanted is a difference of equals (the decay of a state that was zero), the two are of some
// hundredths at least: sums of unit inputs.
inline void expect_close(const std::vector<float>& got, const std::vector<float>& want, double allowed,
                         const std::string& what) {
  double largest = 1e-2, worst = 0.0;
  for (const float x : want) largest = std::max(largest, std::fabs(static_cast<double>(x)));
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::fabs(static_cast<double>(got[i]) - want[i]);
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  EXPECT_LE(worst, allowed * largest) << what;
}

}  // namespace millrace::api::gpu
