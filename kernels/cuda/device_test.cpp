// Which kernels a binary takes on this machine's GPU, and what is said when memory runs out. Needs a GPU.
#include "kernels/cuda/device.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/error.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/quant/packed_tiles.h"

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
  EXPECT_TRUE(!supports_paged_attention(DType::kBF16, 8, 2, 64, device) || device.has_bulk_copies());
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

// What one Device is told is not the other's; but the GPU is one, and so is the claim on the whole of it.
TEST(CudaDevice, TwoOfOneGpuShareNothingButTheGpu) {
  SKIP_WITHOUT_GPU("two Devices of a GPU were not tested");
  Device first = Device::open(0);
  const Device second = Device::open(0);
  first.use_tuning(Tuning({{TunedKernel::kGemv, PackedFormat::kQ8, 64, 64, 4, 140000}}));
  EXPECT_FALSE(first.tuning().empty());
  EXPECT_TRUE(second.tuning().empty());
  EXPECT_EQ(first.sm_count(), second.sm_count());
  EXPECT_EQ(first.has_wgmma(), second.has_wgmma());
  {
    const GridClaim claim = first.claim_grid();
    EXPECT_TRUE(claim.held());
    EXPECT_FALSE(second.claim_grid().held());
    EXPECT_FALSE(first.claim_grid().held());
  }
  EXPECT_TRUE(second.claim_grid().held());
}

// A thread begins on GPU 0 whatever others use.
TEST(CudaDevice, IsCurrentOnTheThreadThatUsesIt) {
  SKIP_WITHOUT_GPU("threads were not tested");
  int gpus = 0;
  MILLRACE_CUDA_TRY(cudaGetDeviceCount(&gpus));
  const Device last = Device::open(gpus - 1);
  int found = -1;
  std::thread([&] {
    last.use();
    MILLRACE_CUDA_TRY(cudaGetDevice(&found));
  }).join();
  EXPECT_EQ(found, last.ordinal());
}

TEST(CudaDevice, NamesAGpuThatIsNotThere) {
  SKIP_WITHOUT_GPU("a GPU that is not there was not tested");
  int gpus = 0;
  MILLRACE_CUDA_TRY(cudaGetDeviceCount(&gpus));
  for (const int gpu : {gpus, -1}) {
    try {
      const Device none = Device::open(gpu);
      FAIL() << gpu;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_NE(std::string(error.what()).find("expected cuda:0 to cuda:"), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace millrace::cuda
