// Which kernels a binary takes on this machine's GPU, and what is said when memory runs out. Needs a GPU.
#include "kernels/cuda/device.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "base/error.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// By what the code was compiled for, not by what the GPU could do: code for sm_80 that the driver has
// translated for an H200 must not ask for its bulk copies, whose kernels are empty in it.
// MILLRACE_EXPECT_KERNELS (of tests/gpu/run.sh) says what this build is for.
TEST(CudaDevice, TakesTheKernelsOfItsCode) {
  SKIP_WITHOUT_GPU("the device was not tested");
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

TEST(CudaDevice, NamesWhatDidNotFitAndGoesOn) {
  SKIP_WITHOUT_GPU("the device was not tested");
  open_device(0);
  try {
    const DeviceBuffer buffer(size_t{1} << 50, "a large test");
    FAIL() << "a petabyte";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNoMemory);
    EXPECT_EQ(std::string(error.what()).find("device cuda: a large test needs 1048576.00 GiB, found "), 0u)
        << error.what();
  }
  const DeviceBuffer small(1024, "a small test");
  MILLRACE_CUDA_TRY(cudaMemset(small.as<void>(), 0, small.bytes()));
  MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace millrace::cuda
