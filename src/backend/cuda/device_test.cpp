// Which kernels a binary takes on this machine's GPU. Needs a GPU.
#include "backend/cuda/device.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "backend/cuda/ops/ops.h"
#include "backend/cuda/ops/wide.h"

namespace millrace::cuda {
namespace {

// By what the code was compiled for, not by what the GPU could do: code for sm_80 that the driver has
// translated for an H200 must not ask for its bulk copies, whose kernels are empty in it.
// MILLRACE_EXPECT_KERNELS (of tests/gpu/run.sh) says what this build is for.
TEST(CudaDevice, TakesTheKernelsOfItsCode) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    GTEST_SKIP() << "*** no GPU: which kernels are taken was not tested ***";
  }
  const DeviceInfo device = open_device(0);
  const int code = code_architecture();
  const std::string kind = has_wgmma() ? "wgmma" : has_bulk_copies() ? "bulk" : "portable";
  std::printf("[  figure  ] cuda kernels: %s on %s, code for %d\n", kind.c_str(), device.architecture.c_str(),
              code);
  EXPECT_TRUE(!has_wgmma() || has_bulk_copies());
  EXPECT_TRUE(!has_bulk_copies() || code >= 90);
  EXPECT_TRUE(!fits_packed_attention(DType::kBF16, 8, 2, 64) || has_bulk_copies());
  if (const char* expected = std::getenv("MILLRACE_EXPECT_KERNELS")) {
    EXPECT_EQ(kind, expected);
  }
}

}  // namespace
}  // namespace millrace::cuda
