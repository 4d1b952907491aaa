// For tests that need a GPU: without one they say what they did not test, and are skipped.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace millrace::cuda {

inline bool no_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) != cudaSuccess || count == 0;
}

}  // namespace millrace::cuda

#define SKIP_WITHOUT_GPU(what) \
  if (millrace::cuda::no_gpu()) GTEST_SKIP() << "*** no GPU: " what " ***"
