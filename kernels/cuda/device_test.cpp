// Which kernels a binary takes on this machine's GPU, and what is said when memory runs out. Needs a GPU.
#include "kernels/cuda/device.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "base/error.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/gpu_test.h"

namespace millrace::cuda {
namespace {

// By what the code was compiled for, not by what the GPU could do: code for sm_80 that the driver has
// translated for an H200 must not ask for its bulk copies, whose kernels are empty in it.
// MILLRACE_EXPECT_KERNELS (of tests/gpu/run.sh) says what this build is for.
TEST(CudaDevice, TakesTheKernelsOfItsCode) {
  SKIP_WITHOUT_GPU("the device was not tested");
  const Device device = Device::open(0);
  const int code = device.code_architecture();
  const std::string kind = device.has_wgmma() ? "wgmma" : device.has_bulk_copies() ? "bulk" : "portable";
  std::printf("[  figure  ] cuda kernels: %s on %s, code for %d\n", kind.c_str(),
              device.info().architecture.c_str(), code);
  EXPECT_TRUE(!device.has_wgmma() || device.has_bulk_copies());
  EXPECT_TRUE(!device.has_bulk_copies() || code >= 90);
  EXPECT_TRUE(!fits_packed_attention(DType::kBF16, 8, 2, 64, device) || device.has_bulk_copies());
  if (const char* expected = std::getenv("MILLRACE_EXPECT_KERNELS")) {
    EXPECT_EQ(kind, expected);
  }
}

TEST(CudaDevice, NamesWhatDidNotFitAndGoesOn) {
  SKIP_WITHOUT_GPU("the device was not tested");
  const Device device = Device::open(0);
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
