// Scales of FP4 matrices in the tiles that sm_100a reads (the kernel that makes them runs anywhere), against
// the function that a test on the host walks (kernels/quant/fp4_tiles_test.cpp). Needs a GPU.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/fp4.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/resources.h"
#include "kernels/quant/fp4_tiles.h"

namespace millrace::cuda {
namespace {

TEST(CudaFp4Tiles, ScalesGoToTheirTilesAndZerosToTheRest) {
  SKIP_WITHOUT_GPU("tiles of scales were not tested on one");
  const Device device = Device::open(0);
  const Stream stream;
  // K of two stages and a part of one, and a row that needs a tile of its own.
  for (const bool nvfp4 : {false, true}) {
    constexpr int64_t kRows = 257, kDepth = 544;
    const int64_t blocks = kDepth / (nvfp4 ? 16 : 32), tiles = quant::fp4_scale_tiles(kDepth, nvfp4);
    const int64_t bytes = quant::fp4_tiled_scale_bytes(kRows, kDepth, nvfp4, quant::kFp4TileColumns);
    std::vector<uint8_t> scales(static_cast<size_t>(kRows * blocks)), want(static_cast<size_t>(bytes), 0);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t b = 0; b < blocks; ++b) {
        const auto scale = static_cast<uint8_t>(1 + (row * 131 + b * 7) % 255);
        scales[static_cast<size_t>(row * blocks + b)] = scale;
        want[static_cast<size_t>(quant::fp4_scale_byte(row, b, tiles))] = scale;
      }
    }
    DeviceBuffer from(scales.size(), "test"), to(want.size(), "test");
    MILLRACE_CUDA_TRY(cudaMemcpy(from.as<void>(), scales.data(), scales.size(), cudaMemcpyHostToDevice));
    MILLRACE_CUDA_TRY(cudaMemset(to.as<void>(), 0xff, want.size()));
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
    launch_tile_fp4_scales(from.as<uint8_t>(), kRows, blocks, to.as<uint8_t>(), 512, tiles,
                           {device, stream.get()});
    stream.synchronize();
    std::vector<uint8_t> got(want.size());
    MILLRACE_CUDA_TRY(cudaMemcpy(got.data(), to.as<void>(), got.size(), cudaMemcpyDeviceToHost));
    EXPECT_EQ(got, want) << (nvfp4 ? "nvfp4" : "mxfp4");
  }
}

}  // namespace
}  // namespace millrace::cuda
