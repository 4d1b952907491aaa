// Values of E4M3 codes for products whose depth is the keys: those of 8 bits take operands K-major alone, so
// values are transposed once, into the workspace. A tile is 128 keys of a sequence and KV head, from an
// absolute multiple on: a row of 128 bytes for each of kDimV dimensions, in the swizzle of wgmma.cuh, so that
// one bulk copy loads an operand. Of every 16 keys, byte 4t + 2b + i of a row is key 8b + 2t + i: the order
// in which a product before leaves probabilities in a lane. Keys and dimensions that do not exist are zeros.
//
// Roofline: a byte read and written for each code; at 16k keys, 16 heads of 128, 67 MB for 2.2 TFLOP.
#pragma once

#include "kernels/cuda/attention/flash_problem.cuh"

namespace millrace::cuda {

// [4 keys] words of 4 dimensions to [4 dimensions] words of 4 keys.
__device__ inline void flash_transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362);
  const uint32_t low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410), w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410), w[3] = __byte_perm(high01, high23, 0x7632);
}

// Grid: (sequence, KV head, tile). A thread has 16 keys of four dimensions.
template <int kDimV>
inline constexpr int kFlashValueThreads = kDimV / 4 * (kFlashScaleKeys / 16);
template <int kDimV>
__global__ void __launch_bounds__(kFlashValueThreads<kDimV>)
    flash_values_kernel(const __grid_constant__ FlashShape s, const uint8_t* values, FlashStrides strides,
                        int32_t value_dim, int32_t tiles, uint8_t* to) {
  const auto tile = static_cast<int32_t>(blockIdx.x % tiles), rest = static_cast<int32_t>(blockIdx.x / tiles);
  const int32_t head = rest % s.kv_heads, b = rest / s.kv_heads;
  const FlashSequence seq(s, b);
  // Keys that some query sees.
  const int32_t first_key = seq.first_key(s, 0),
                past_key = seq.q_len > 0 ? seq.past_key(s, seq.q_len - 1) : 0;
  if ((tile + 1) * kFlashScaleKeys <= first_key || tile * kFlashScaleKeys >= past_key) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t dim = thread % (kDimV / 4) * 4, chunk = thread / (kDimV / 4),
                key = tile * kFlashScaleKeys + chunk * 16;
  uint32_t words[16];
  const uint8_t* from = values + head * strides.head + dim;
  if (s.pages != nullptr && key < seq.k_len) {  // 16 keys are of one page
    from +=
        s.pages[b * s.pages_stride + key / s.page_tokens] * strides.batch + key % s.page_tokens * strides.seq;
  } else {
    from += b * strides.batch + (int64_t{seq.k_start} + key) * strides.seq;
  }
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    words[k] = key + k < seq.k_len && dim < value_dim
                   ? __ldg(reinterpret_cast<const uint32_t*>(from + k * strides.seq))
                   : 0u;
  }
  uint32_t rows[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    uint32_t four[4] = {words[2 * t], words[2 * t + 1], words[2 * t + 8], words[2 * t + 9]};
    flash_transpose_bytes(four);
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i][t] = four[i];
  }
  uint8_t* at = to + int64_t{blockIdx.x} * (kDimV * ptx::kSwizzleRowBytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(
        at + ptx::swizzled(static_cast<uint32_t>(dim + i), static_cast<uint32_t>(chunk * 16))) =
        uint4{rows[i][0], rows[i][1], rows[i][2], rows[i][3]};
  }
}

}  // namespace millrace::cuda
