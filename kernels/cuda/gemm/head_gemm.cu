// A matrix per head. Packed weights: a CTA has 64 or 128 outputs of a head, 16 of them a warp, for 8 to 64
// rows whose activations lie in shared memory as bf16; a lane reads its fragments of a K step straight from
// the tiles and multiplies them with all of the rows. Others: a warp has one output, dequantizes it eight
// weights per lane at a time and multiplies them with up to eight rows.
//
// Roofline: one row, the bytes of the weights / 4.3 TB/s (16 heads of 512 x 128: 2 MB, half a microsecond,
// beside a launch and one latency of memory: 8 us in all); a prompt, the bytes of x and y, 4 a value: 4,096
// rows of 16 heads, 168 MB, 39 us, measured 114 us (75 TFLOP/s; torch.bmm of bf16 rows 31 us).
#include "kernels/cuda/gemm/head_gemm.h"

#include "kernels/cuda/quant/dequantize.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {
namespace {

// ---------------------------------------------------------------- packed weights

constexpr int kWarpOutputs = 2 * kTileRows;                     // of a warp
constexpr int kStepsHeld = 8;                                   // K steps of activations in shared memory
constexpr int kRowBytes = kStepsHeld * kKStepColumns * 2 + 16;  // eight rows begin in different banks

// What a CTA has: few rows, or many. The same sums either way.
template <int kWarps_, int kProducts_>
struct HeadTile {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * kWarpLanes, kOutputs = kWarps * kWarpOutputs;
  static constexpr int kProducts = kProducts_, kRows = 8 * kProducts;
  static constexpr int kSharedBytes = kRows * kRowBytes;
};
using FewRows = HeadTile<4, 1>;
using SomeRows = HeadTile<4, 4>;
using ManyRows = HeadTile<8, 8>;

// A lane's weights of row g of a K step, columns as load_activations of all formats but kBf16 has them: 8t
// and on of each block of 32.
template <PackedFormat kFormat>
__device__ inline void load_weights(const uint8_t* step, int lane, uint32_t (&w)[4][2]) {
  if constexpr (kFormat == PackedFormat::kBf16) {
    const auto row = static_cast<uint32_t>(lane) / 4, t = static_cast<uint32_t>(lane) % 4;
#pragma unroll
    for (uint32_t odd = 0; odd < 2; ++odd) {
      store_two_steps(*reinterpret_cast<const uint4*>(step + bf16_chunk(row, 4 * odd + t)), w[2 * odd],
                      w[2 * odd + 1]);
    }
  } else {
    TileFormat<kFormat>::load(step, lane, w);
  }
}

// Columns [first, first + kStepsHeld K steps) of rows [row, row + kRows) as bf16, four at a time; what is not
// there is zeros. kAligned: a row's columns are whole aligned float4.
template <class Tile, bool kAligned>
__device__ inline void load_rows(const HeadGemm& op, int head, int64_t row, int64_t first, uint8_t* to) {
  const auto here = static_cast<int>(min(int64_t{Tile::kRows}, op.rows - row));
  const auto quads = static_cast<int>(
      min(int64_t{op.packed.k_steps} * kKStepColumns - first, int64_t{kStepsHeld} * kKStepColumns) / 4);
  const float* x = op.x + row * op.x_row + head * op.x_head + first;
  const int64_t cols = op.packed.cols - first;
#pragma unroll 4
  for (int i = threadIdx.x; i < (here + 7) / 8 * 8 * quads; i += Tile::kThreads) {
    const int r = i / quads, q = i % quads;
    float4 v{0, 0, 0, 0};
    if (r < here && 4 * q < cols) {
      const float* from = x + r * op.x_row + 4 * q;
      if constexpr (kAligned) {
        v = *reinterpret_cast<const float4*>(from);
      } else {
        v.x = from[0];
        if (4 * q + 1 < cols) v.y = from[1];
        if (4 * q + 2 < cols) v.z = from[2];
        if (4 * q + 3 < cols) v.w = from[3];
      }
    }
    *reinterpret_cast<uint2*>(to + r * kRowBytes + q * 8) = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
  }
}

// grid: outputs, rows, heads.
template <PackedFormat kFormat, class Tile, bool kAligned>
__global__ void __launch_bounds__(Tile::kThreads) head_gemm_kernel(const __grid_constant__ HeadGemm op) {
  constexpr int kRows = Tile::kRows, kProducts = Tile::kProducts, kOutputs = Tile::kOutputs;
  extern __shared__ __align__(16) uint8_t shared[];
  const int head = blockIdx.z, warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int64_t row = int64_t{blockIdx.y} * kRows;
  const auto here = static_cast<int>(min(int64_t{kRows}, op.rows - row));
  const int tile = static_cast<int>(blockIdx.x) * (kOutputs / kTileRows) + 2 * warp;
  const bool has_low = tile < op.packed.tiles_per_expert, has_high = tile + 1 < op.packed.tiles_per_expert;
  const uint8_t* low =
      op.packed.tiles + (int64_t{head} * op.packed.tiles_per_expert + tile) * op.packed.tile_bytes;
  const uint8_t* high = low + op.packed.tile_bytes;
  float sum[kProducts][4] = {};
  for (int first = 0; first < op.packed.k_steps; first += kStepsHeld) {
    __syncthreads();  // nobody reads the columns before
    load_rows<Tile, kAligned>(op, head, row, int64_t{first} * kKStepColumns, shared);
    __syncthreads();  // these are there
    const int steps = min(kStepsHeld, op.packed.k_steps - first);
#pragma unroll 4
    for (int j = 0; j < steps; ++j) {
      uint32_t a[4][2] = {}, c[4][2] = {};
      const int64_t at = int64_t{first + j} * k_step_bytes(kFormat);
      if (has_low) load_weights<kFormat>(low + at, lane, a);
      if (has_high) load_weights<kFormat>(high + at, lane, c);
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        if (8 * n >= here) break;  // the whole CTA alike
        uint32_t b[4][2];
        const uint8_t* x = shared + (8 * n + lane / 4) * kRowBytes + j * (kKStepColumns * 2);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          store_two_steps(*reinterpret_cast<const uint4*>(x + odd * 64 + lane % 4 * 16), b[2 * odd],
                          b[2 * odd + 1]);
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const uint32_t both[4] = {a[s][0], c[s][0], a[s][1], c[s][1]};
          ptx::mma_bf16(sum[n], both, b[s][0], b[s][1]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kProducts * 4; ++i) {
    const int r = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const int64_t output = int64_t{tile} * kTileRows + i % 4 / 2 * kTileRows + lane / 4;
    if (r >= here || output >= op.packed.rows) continue;
    op.y[(row + r) * op.y_row + head * op.y_head + output] =
        sum[i / 4][i % 4] * TileFormat<kFormat>::kUnscale;
  }
}

// ---------------------------------------------------------------- weights in the file's encoding

constexpr int kGenericRows = 8, kGenericWarps = 8;
constexpr int64_t kMaxGridY = 65535;  // CUDA's limit; beyond it a CTA takes several turns

// grid: outputs, eight rows, heads. A warp has one output.
template <class Decoder>
__global__ void __launch_bounds__(kGenericWarps* kWarpLanes)
    head_linear_kernel(const __grid_constant__ HeadGemm op) {
  const int head = blockIdx.z, lane = threadIdx.x % kWarpLanes;
  const int64_t output = int64_t{blockIdx.x} * kGenericWarps + threadIdx.x / kWarpLanes;
  if (output >= op.matrix.rows) return;  // a whole warp: nobody waits for it
  const int64_t cols = op.matrix.cols;
  for (int64_t row = int64_t{blockIdx.y} * kGenericRows; row < op.rows;
       row += int64_t{gridDim.y} * kGenericRows) {
    const auto here = static_cast<int>(min(int64_t{kGenericRows}, op.rows - row));
    const float* x = op.x + row * op.x_row + head * op.x_head;
    float sums[kGenericRows] = {};
    for (int64_t c = lane * 8; c < cols; c += kWarpLanes * 8) {
      const int n = static_cast<int>(min(int64_t{8}, cols - c));
      float w8[8];
      Decoder::decode8(op.matrix, head * op.matrix.rows + output, c, n, w8);
#pragma unroll
      for (int r = 0; r < kGenericRows; ++r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (r < here && i < n) sums[r] = fmaf(w8[i], x[r * op.x_row + c + i], sums[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kGenericRows; ++r) {
      const float sum = warp_sum(sums[r]);
      if (lane == r && r < here) op.y[(row + r) * op.y_row + head * op.y_head + output] = sum;
    }
  }
}

template <PackedFormat kFormat, class Tile, bool kAligned>
void launch_tile(const HeadGemm& op, const Launch& at) {
  const int64_t tiles = (op.rows + Tile::kRows - 1) / Tile::kRows;
  const dim3 grid(static_cast<unsigned>((op.packed.rows + Tile::kOutputs - 1) / Tile::kOutputs),
                  static_cast<unsigned>(tiles), static_cast<unsigned>(op.heads));
  allow_shared_memory(head_gemm_kernel<kFormat, Tile, kAligned>, Tile::kSharedBytes);
  head_gemm_kernel<kFormat, Tile, kAligned><<<grid, Tile::kThreads, Tile::kSharedBytes, at.stream>>>(op);
  check_launch("head_gemm_kernel");
}
template <PackedFormat kFormat>
void launch_packed(const HeadGemm& op, const Launch& at) {
  const bool aligned = op.packed.cols % 4 == 0 && op.x_row % 4 == 0 && op.x_head % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(op.x) % 16 == 0;
  if (!aligned) return launch_tile<kFormat, SomeRows, false>(op, at);
  if (op.rows <= FewRows::kRows) return launch_tile<kFormat, FewRows, true>(op, at);
  if (op.rows <= 4 * SomeRows::kRows) return launch_tile<kFormat, SomeRows, true>(op, at);
  launch_tile<kFormat, ManyRows, true>(op, at);
}

}  // namespace

void launch_head_gemm(const HeadGemm& op, const Launch& at) {
  if (op.rows == 0) return;
  switch (op.packed.format) {
    case PackedFormat::kQ8:
      return launch_packed<PackedFormat::kQ8>(op, at);
    case PackedFormat::kMxfp4:
      return launch_packed<PackedFormat::kMxfp4>(op, at);
    case PackedFormat::kBf16:
      return launch_packed<PackedFormat::kBf16>(op, at);
    case PackedFormat::kQ4:
      return launch_packed<PackedFormat::kQ4>(op, at);
    case PackedFormat::kQ5:
      return launch_packed<PackedFormat::kQ5>(op, at);
    case PackedFormat::kQ6:
      return launch_packed<PackedFormat::kQ6>(op, at);
    case PackedFormat::kNone:
      break;
  }
  const int64_t tiles = (op.rows + kGenericRows - 1) / kGenericRows;
  const dim3 grid(static_cast<unsigned>((op.matrix.rows + kGenericWarps - 1) / kGenericWarps),
                  static_cast<unsigned>(tiles < kMaxGridY ? tiles : kMaxGridY),
                  static_cast<unsigned>(op.heads));
  with_decoder(op.matrix.type, [&](auto decoder) {
    head_linear_kernel<decltype(decoder)><<<grid, kGenericWarps * kWarpLanes, 0, at.stream>>>(op);
  });
  check_launch("head_linear_kernel");
}

}  // namespace millrace::cuda
