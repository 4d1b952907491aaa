// 8-bit tiles dequantized (packed_tiles.h): the words that the products' lanes make of the codes, to the bit,
// and the weights those codes mean, each where a product of bf16 meets its activation. Needs a GPU.
#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/quant/dequantize.cuh"
#include "kernels/cuda/quant/packed_tiles.h"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {
namespace {

// words: [k_steps][lane][step][half]. A warp per k_step, out of shared memory as products do.
__global__ void load_kernel(const uint8_t* tiles, uint32_t* words) {
  __shared__ __align__(16) uint8_t k_step[kQ8KStepBytes];
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < kQ8KStepBytes; i += 32) k_step[i] = tiles[int64_t{blockIdx.x} * kQ8KStepBytes + i];
  __syncwarp();
  uint32_t w[4][2];
  TileFormat<PackedFormat::kQ8>::load(k_step, lane, w);
  for (int i = 0; i < 8; ++i) words[(int64_t{blockIdx.x} * 32 + lane) * 8 + i] = w[i / 2][i % 2];
}

template <class T>
std::vector<T> to_host(const DeviceBuffer& buffer, const Stream& stream) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  MILLRACE_CUDA_TRY(cudaMemcpyAsync(values.data(), buffer.as<void>(), buffer.bytes(), cudaMemcpyDeviceToHost,
                                    stream.get()));
  stream.synchronize();
  return values;
}

constexpr size_t kGuard = 4096;  // bytes behind the dequantized tiles, which nobody may touch

struct Dequantized {
  std::vector<uint8_t> blocks;  // [rows][cols / 32] of Q8_0: an f16 scale, 32 codes
  PackedMatrix packed;
  std::vector<uint32_t> words;  // as load_kernel has them
  std::vector<uint8_t> tiles;   // dequantized, and the guard

  Dequantized(const Device& device, int64_t rows, int64_t cols, uint32_t seed)
      : packed(packed_shape(DType::kQ8_0, rows, cols)) {
    std::mt19937 random(seed);
    blocks.resize(bytes_of(DType::kQ8_0, rows * cols));
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(random());
    for (size_t b = 0; b < blocks.size(); b += 34) {  // any exponent but that of what is not finite
      if ((blocks[b + 1] & 0x7cu) == 0x7cu) blocks[b + 1] ^= 0x40u;
    }
    const Stream stream;
    const DeviceBuffer raw(blocks.size(), "test");
    MILLRACE_CUDA_TRY(
        cudaMemcpyAsync(raw.as<void>(), blocks.data(), blocks.size(), cudaMemcpyHostToDevice, stream.get()));
    const size_t k_steps = static_cast<size_t>(packed.tiles_per_expert) * static_cast<size_t>(packed.k_steps);
    const DeviceBuffer codes(k_steps * kQ8KStepBytes, "test"), loaded(k_steps * 32 * 8 * 4, "test"),
        out(dequantized_bytes(packed) + kGuard, "test");
    DeviceMatrix from;
    from.data = raw.as<const uint8_t>();
    from.rows = rows;
    from.cols = cols;
    from.row_bytes = static_cast<int64_t>(bytes_of(DType::kQ8_0, cols));
    from.type = DType::kQ8_0;
    launch_repack(from, 0, packed, codes.as<uint8_t>(), {device, stream.get()});
    packed.tiles = codes.as<const uint8_t>();
    load_kernel<<<static_cast<unsigned>(k_steps), 32, 0, stream.get()>>>(packed.tiles, loaded.as<uint32_t>());
    check_launch("load_kernel");
    MILLRACE_CUDA_TRY(cudaMemsetAsync(out.as<void>(), 0xff, out.bytes(), stream.get()));
    launch_dequantize(packed, out.as<uint8_t>(), {device, stream.get()});
    words = to_host<uint32_t>(loaded, stream);
    tiles = to_host<uint8_t>(out, stream);
    packed.tiles = nullptr;
  }

  size_t k_step_at(int64_t row, int64_t k_step) const {
    return static_cast<size_t>(row / kTileRows * packed.k_steps + k_step);
  }
  // The bf16 at `position` of a k_step of a row.
  uint32_t at(int64_t row, int64_t k_step, uint32_t position) const {
    const uint8_t* from = tiles.data() + k_step_at(row, k_step) * kBf16KStepBytes +
                          bf16_chunk(static_cast<uint32_t>(row % kTileRows), position / 8) + position % 8 * 2;
    return from[0] | static_cast<uint32_t>(from[1]) << 8;
  }
  // What a product's lane has there.
  uint32_t loaded(int64_t row, int64_t k_step, uint32_t position) const {
    const uint32_t step = position / 16, half = position / 8 % 2, t = position % 8 / 2;
    const size_t lane = static_cast<size_t>(row % kTileRows) * 4 + t;
    return words[(k_step_at(row, k_step) * 32 + lane) * 8 + 2 * step + half] >> (16 * (position % 2)) &
           0xffffu;
  }
  // The weight of the file, rounded as packed_tiles.h says, times 2^-32.
  float expected(int64_t row, int64_t column) const {
    const uint8_t* block = blocks.data() + (row * packed.cols + column) / 32 * 34;
    const float scale = half_bits_to_float(static_cast<uint16_t>(block[0] | block[1] << 8));
    const float product = decode_q8_scale(encode_q8_scale(scale)) *
                          static_cast<float>(static_cast<int8_t>(block[2 + column % 32]));
    const auto bits = std::bit_cast<uint32_t>(product * 0x1p-32f);
    return std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 << 16);
  }
};

TEST(PackedDequantize, EveryWordIsWhatALaneLoads) {
  SKIP_WITHOUT_GPU("dequantized weights were not tested on one");
  const Device device = Device::open(0);
  // Rows that do not fill a tile, one block in the last k_step, and more k_steps than a grid has warps.
  const int64_t shapes[][2] = {{1, 32}, {7, 64}, {8, 96}, {9, 160}, {37, 2880}, {75, 2304}, {1027, 8224}};
  uint32_t seed = 1;
  for (const auto& [rows, cols] : shapes) {
    const Dequantized o(device, rows, cols, seed++);
    const int64_t padded = int64_t{o.packed.tiles_per_expert} * kTileRows;
    ASSERT_EQ(dequantized_bytes(o.packed),
              static_cast<size_t>(padded * o.packed.k_steps * kKStepColumns * 2));
    for (int64_t row = 0; row < padded; ++row) {
      for (int64_t k_step = 0; k_step < o.packed.k_steps; ++k_step) {
        for (uint32_t i = 0; i < kKStepColumns; ++i) {
          const uint32_t position = column_position(PackedFormat::kQ8, i),
                         found = o.at(row, k_step, position);
          ASSERT_EQ(found, o.loaded(row, k_step, position))
              << rows << " x " << cols << ": row " << row << ", k_step " << k_step << ", element " << i;
          const int64_t column = k_step * kKStepColumns + i;
          const float expected = row < rows && column < cols ? o.expected(row, column) : 0.0f;
          ASSERT_EQ(std::bit_cast<float>(found << 16), expected)
              << rows << " x " << cols << ": row " << row << ", column " << column;
        }
      }
    }
    for (size_t i = o.tiles.size() - kGuard; i < o.tiles.size(); ++i) ASSERT_EQ(o.tiles[i], 0xff);
  }
}

TEST(PackedDequantize, OnlyEightBitsAre) {
  EXPECT_EQ(dequantized_bytes(packed_shape(DType::kQ8_0, 9, 96)), 2u * 2 * 1024);
  EXPECT_EQ(dequantized_bytes(packed_shape(DType::kQ4_0, 8, 32)), 1024u);
  for (const DType type : {DType::kBF16, DType::kMXFP4, DType::kQ4_K, DType::kF32})
    EXPECT_EQ(dequantized_bytes(packed_shape(type, 256, 256)), 0u);
}

}  // namespace
}  // namespace millrace::cuda
