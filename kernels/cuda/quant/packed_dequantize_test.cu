// Tiles of codes dequantized (packed_tiles.h): the words that the products' lanes make of the codes, to the
// bit, and the weights those codes mean, each where a product of bf16 meets its activation. Needs a GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/quant/dequantize.cuh"
#include "kernels/cuda/quant/packed_tiles.h"
#include "kernels/cuda/quant/random_rows.h"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {
namespace {

// words: [k_steps][lane][step][half]. A warp per k_step, out of shared memory as products do.
template <PackedFormat kFormat>
__global__ void load_kernel(const uint8_t* tiles, uint32_t* words) {
  constexpr int kBytes = TileFormat<kFormat>::kKStepBytes;
  __shared__ __align__(16) uint8_t k_step[kBytes];
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < kBytes; i += 32) k_step[i] = tiles[int64_t{blockIdx.x} * kBytes + i];
  __syncwarp();
  uint32_t w[4][2];
  TileFormat<kFormat>::load(k_step, lane, w);
  for (int i = 0; i < 8; ++i) words[(int64_t{blockIdx.x} * 32 + lane) * 8 + i] = w[i / 2][i % 2];
}
auto load_kernel_of(PackedFormat format) {
  return format == PackedFormat::kQ4   ? load_kernel<PackedFormat::kQ4>
         : format == PackedFormat::kQ5 ? load_kernel<PackedFormat::kQ5>
         : format == PackedFormat::kQ6 ? load_kernel<PackedFormat::kQ6>
                                       : load_kernel<PackedFormat::kQ8>;
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
  DType type;
  std::vector<uint8_t> blocks;  // [rows] in the file's encoding
  std::vector<float> values;    // [rows, cols] as the codec's decoder has them
  PackedMatrix packed;
  std::vector<uint32_t> words;  // as load_kernel has them
  std::vector<uint8_t> tiles;   // dequantized, and the guard

  Dequantized(const Device& device, DType of, int64_t rows, int64_t cols, uint32_t seed)
      : type(of), values(static_cast<size_t>(rows * cols)), packed(packed_shape(of, rows, cols)) {
    std::mt19937 random(seed);
    blocks = random_rows(type, rows, cols, random);
    DeviceMatrix from;
    from.data = blocks.data();
    from.rows = rows;
    from.cols = cols;
    from.row_bytes = static_cast<int64_t>(bytes_of(type, cols));
    from.type = type;
    with_decoder(type, [&](auto decoder) {
      for (int64_t at = 0; at < rows * cols; at += 8)
        decltype(decoder)::decode8(from, at / cols, at % cols, 8, values.data() + at);
    });
    const Stream stream;
    const DeviceBuffer raw(blocks.size(), "test");
    MILLRACE_CUDA_TRY(
        cudaMemcpyAsync(raw.as<void>(), blocks.data(), blocks.size(), cudaMemcpyHostToDevice, stream.get()));
    const size_t k_steps = static_cast<size_t>(packed.tiles_per_expert) * static_cast<size_t>(packed.k_steps);
    const DeviceBuffer codes(k_steps * k_step_bytes(packed.format), "test"),
        loaded(k_steps * 32 * 8 * 4, "test"), out(dequantized_bytes(packed) + kGuard, "test");
    from.data = raw.as<const uint8_t>();
    launch_repack(from, 0, packed, codes.as<uint8_t>(), {device, stream.get()});
    packed.tiles = codes.as<const uint8_t>();
    load_kernel_of(packed.format)<<<static_cast<unsigned>(k_steps), 32, 0, stream.get()>>>(
        packed.tiles, loaded.as<uint32_t>());
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
  // The weight of the file.
  float expected(int64_t row, int64_t column) const {
    return values[static_cast<size_t>(row * packed.cols + column)];
  }
  // How far it may be off: scale, minimum and weight are rounded to bf16 each, by 2^-8 at most. With
  // a minimum, code * scale is as large as the weight and the minimum together: no larger than the largest
  // of the block's and its spread.
  double bound(int64_t row, int64_t column) const {
    double most = 0;
    for (int64_t c = column / 32 * 32; c < column / 32 * 32 + 32; ++c)
      most = std::max(most, std::fabs(static_cast<double>(expected(row, c))));
    const bool shifts =
        type != DType::kQ8_0 && type != DType::kQ6_K && type != DType::kQ4_0 && type != DType::kQ5_0;
    const double value = std::fabs(static_cast<double>(expected(row, column)));
    return shifts ? 0x1p-8 * (2 * value + 3 * most) : 2.02 * 0x1p-8 * value;
  }
};

void check(const Device& device, DType type, int64_t rows, int64_t cols, uint32_t seed) {
  const Dequantized o(device, type, rows, cols, seed);
  const int64_t padded = int64_t{o.packed.tiles_per_expert} * kTileRows;
  ASSERT_EQ(dequantized_bytes(o.packed), static_cast<size_t>(padded * o.packed.k_steps * kKStepColumns * 2));
  for (int64_t row = 0; row < padded; ++row) {
    for (int64_t k_step = 0; k_step < o.packed.k_steps; ++k_step) {
      for (uint32_t i = 0; i < kKStepColumns; ++i) {
        const uint32_t position = column_position(o.packed.format, i), found = o.at(row, k_step, position);
        const int64_t column = k_step * kKStepColumns + i;
        ASSERT_EQ(found, o.loaded(row, k_step, position))
            << info(type).name << " " << rows << " x " << cols << ": row " << row << ", column " << column;
        const bool there = row < rows && column < cols;
        ASSERT_NEAR(std::bit_cast<float>(found << 16) * kPackedUnscale,
                    there ? o.expected(row, column) : 0.0f, there ? o.bound(row, column) : 0.0)
            << info(type).name << " " << rows << " x " << cols << ": row " << row << ", column " << column;
      }
    }
  }
  for (size_t i = o.tiles.size() - kGuard; i < o.tiles.size(); ++i) ASSERT_EQ(o.tiles[i], 0xff);
}

TEST(PackedDequantize, EveryWordIsWhatALaneLoads) {
  SKIP_WITHOUT_GPU("dequantized weights were not tested on one");
  const Device device = Device::open(0);
  uint32_t seed = 1;
  for (const DType type :
       {DType::kQ8_0, DType::kQ4_0, DType::kQ4_1, DType::kQ4_Z, DType::kQ5_0, DType::kQ5_1}) {
    // Rows that do not fill a tile, one block in the last k_step.
    const int64_t shapes[][2] = {{1, 32}, {7, 64}, {8, 96}, {9, 160}, {37, 2880}, {75, 2304}};
    for (const auto& [rows, cols] : shapes) check(device, type, rows, cols, seed++);
  }
  for (const DType type : {DType::kQ4_K, DType::kQ5_K, DType::kQ6_K}) {
    const int64_t shapes[][2] = {{1, 256}, {9, 512}, {37, 2816}};
    for (const auto& [rows, cols] : shapes) check(device, type, rows, cols, seed++);
  }
  check(device, DType::kQ8_0, 1027, 8224, seed);  // more k_steps than a grid has warps
}

TEST(PackedDequantize, OnlyCodesAre) {
  EXPECT_EQ(dequantized_bytes(packed_shape(DType::kQ8_0, 9, 96)), 2u * 2 * 1024);
  EXPECT_EQ(dequantized_bytes(packed_shape(DType::kQ4_0, 8, 32)), 1024u);
  EXPECT_EQ(dequantized_bytes(packed_shape(DType::kQ4_K, 256, 256)), 256u * 256 * 2);
  for (const DType type : {DType::kBF16, DType::kMXFP4, DType::kF32})
    EXPECT_EQ(dequantized_bytes(packed_shape(type, 256, 256)), 0u);
}

}  // namespace
}  // namespace millrace::cuda
