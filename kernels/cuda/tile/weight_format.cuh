// A lane's weights of one K step (a pair of blocks, 64 columns), dequantized out of a packed tile into the
// fragments of bf16 products, for each format (quant/packed_tiles.h); and the activations that are multiplied
// with them.
//
// K is cut into segments, as in split-K: the sum of a segment is a chain of tensor core products of 16
// columns in float32, segments are added in order. Warp and warpgroup products give the same bits for the
// same chain, in whatever order the 16 columns come (tested on Hopper by same_bits_decode_test.cpp): that is
// what makes a row's result independent of the kernel that computed it.
#pragma once

#include "kernels/cuda/quant/mxfp4.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"
#include "millrace/kernels/tile/ptx/permute.cuh"

namespace millrace::cuda {

// load: words of row g for lane (g, t), [step][columns 2t, 2t + 1; 2t + 8, 2t + 9]; `pair` is in shared
// memory. kUnscale: what sums have to be multiplied by.
template <PackedFormat kFormat>
struct TileFormat;

template <>
struct TileFormat<PackedFormat::kMxfp4> {
  static constexpr int kKStepBytes = kMxfp4KStepBytes;
  static constexpr float kUnscale = kPackedUnscale;
  __device__ static void load(const uint8_t* pair, int lane, uint32_t (&w)[4][2]) {
    const uint2 words = reinterpret_cast<const uint2*>(pair)[lane];
    const uint32_t scales = *reinterpret_cast<const uint16_t*>(pair + kMxfp4ScalesAt + lane / 4 * 2);
    const uint4 even = mxfp4_weights(words.x, mxfp4_scale(scales & 255u)),
                odd = mxfp4_weights(words.y, mxfp4_scale(scales >> 8));
    w[0][0] = even.x, w[0][1] = even.y, w[1][0] = even.z, w[1][1] = even.w;
    w[2][0] = odd.x, w[2][1] = odd.y, w[3][0] = odd.z, w[3][1] = odd.w;
  }
};

__device__ inline uint32_t bf16_fma(uint32_t a, uint32_t b, uint32_t c) {
  const __nv_bfloat162 v =
      __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b),
              *reinterpret_cast<const __nv_bfloat162*>(&c));
  return *reinterpret_cast<const uint32_t*>(&v);
}

template <>
struct TileFormat<PackedFormat::kQ8> {
  static constexpr int kKStepBytes = kQ8KStepBytes;
  static constexpr float kUnscale = kPackedUnscale;
  __device__ static void load(const uint8_t* pair, int lane, uint32_t (&w)[4][2]) {
    constexpr uint32_t kMinusTwoToMinus126 = 0x80808080u;  // twice
    const uint4 words = reinterpret_cast<const uint4*>(pair)[lane];
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(pair + kQ8ScalesAt + lane / 4 * 4);
    const uint32_t code[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t scale = ptx::permute(scales, 0u, odd ? 0x3232u : 0x1010u);
      const uint32_t offset = bf16_product(scale, kMinusTwoToMinus126);  // -128 * 2^-133 * scale
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint32_t four = code[2 * odd + s];
        w[2 * odd + s][0] = bf16_fma(ptx::permute(four, 0u, 0x4140u), scale, offset);
        w[2 * odd + s][1] = bf16_fma(ptx::permute(four, 0u, 0x4342u), scale, offset);
      }
    }
  }
};

// A lane's eight words out of its codes of kBits bits. scale, offset: of the even and the odd block, twice
// each; scale times the code (times 2^(8 - kBits) where a pair is odd) plus offset is the weight.
template <int kBits>
__device__ inline void affine_weights(const uint2& words, uint32_t rest, const uint32_t (&scale)[2],
                                      const uint32_t (&offset)[2], uint32_t (&w)[4][2]) {
  constexpr uint32_t kDown = (127u - (8 - kBits)) << 7, kDownTwice = kDown | kDown << 16;  // 2^(kBits - 8)
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const uint32_t word = odd ? words.y : words.x, lowered = bf16_product(scale[odd], kDownTwice);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      w[2 * odd + p / 2][p % 2] =
          bf16_fma(affine_pair<kBits>(word, rest, odd, p), p % 2 == 0 ? scale[odd] : lowered, offset[odd]);
    }
  }
}
// [even, odd] of two 16-bit values in a word, each twice.
__device__ inline void spread(uint32_t both, uint32_t (&to)[2]) {
  to[0] = ptx::permute(both, 0u, 0x1010u);
  to[1] = ptx::permute(both, 0u, 0x3232u);
}

template <>
struct TileFormat<PackedFormat::kQ4> {
  static constexpr int kKStepBytes = kQ4KStepBytes;
  static constexpr float kUnscale = kPackedUnscale;
  __device__ static void load(const uint8_t* pair, int lane, uint32_t (&w)[4][2]) {
    const uint2 words = reinterpret_cast<const uint2*>(pair)[lane];
    const uint2 both = *reinterpret_cast<const uint2*>(pair + kQ4ScalesAt + lane / 4 * 8);
    uint32_t scale[2], offset[2];
    spread(both.x, scale);
    spread(both.y, offset);
    affine_weights<4>(words, 0, scale, offset, w);
  }
};

template <>
struct TileFormat<PackedFormat::kQ5> {
  static constexpr int kKStepBytes = kQ5KStepBytes;
  static constexpr float kUnscale = kPackedUnscale;
  __device__ static void load(const uint8_t* pair, int lane, uint32_t (&w)[4][2]) {
    const uint2 words = reinterpret_cast<const uint2*>(pair)[lane];
    const uint32_t fifth = reinterpret_cast<const uint16_t*>(pair + kAffineRestAt)[lane];
    const uint2 both = *reinterpret_cast<const uint2*>(pair + kQ5ScalesAt + lane / 4 * 8);
    uint32_t scale[2], offset[2];
    spread(both.x, scale);
    spread(both.y, offset);
    affine_weights<5>(words, ptx::permute(fifth, 0u, 0x4140u), scale, offset, w);
  }
};

template <>
struct TileFormat<PackedFormat::kQ6> {
  static constexpr int kKStepBytes = kQ6KStepBytes;
  static constexpr float kUnscale = kPackedUnscale;
  __device__ static void load(const uint8_t* pair, int lane, uint32_t (&w)[4][2]) {
    constexpr uint32_t kMinusTwoToMinus128 = 0x80208020u;  // -32 * 2^-133, twice
    const uint2 words = reinterpret_cast<const uint2*>(pair)[lane];
    const uint32_t rest = reinterpret_cast<const uint32_t*>(pair + kAffineRestAt)[lane];
    uint32_t scale[2], offset[2];
    spread(reinterpret_cast<const uint32_t*>(pair + kQ6ScalesAt)[lane / 2], scale);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) offset[odd] = bf16_product(scale[odd], kMinusTwoToMinus128);
    affine_weights<6>(words, rest, scale, offset, w);
  }
};

// Four words are the fragments of two products of 16 columns.
__device__ inline void store_two_steps(const uint4& words, uint32_t (&first)[2], uint32_t (&second)[2]) {
  first[0] = words.x, first[1] = words.y;
  second[0] = words.z, second[1] = words.w;
}

template <>
struct TileFormat<PackedFormat::kBf16> {
  static constexpr int kKStepBytes = kBf16KStepBytes;
  static constexpr float kUnscale = 1.0f;
  __device__ static void load(const uint8_t* pair, int lane, uint32_t (&w)[4][2]) {
    const uint32_t row = static_cast<uint32_t>(lane) % 8, chunk = static_cast<uint32_t>(lane) / 8;
#pragma unroll
    for (uint32_t odd = 0; odd < 2; ++odd)
      store_two_steps(ptx::ldmatrix_x4(pair + bf16_chunk(row, 4 * odd + chunk)), w[2 * odd], w[2 * odd + 1]);
  }
};

// The row of activations, of up to eight, that this lane reads for the product's columns.
template <PackedFormat kFormat>
__device__ inline int activation_row(int lane) {
  return kFormat == PackedFormat::kBf16 ? lane % 8 : lane / 4;
}
// A lane's activations of one pair: [step][rows 2t, 2t + 1; 2t + 8, 2t + 9] of column g. x: 64 bf16 in shared
// memory, as they lie, of row activation_row.
template <PackedFormat kFormat>
__device__ inline void load_activations(const uint8_t* x, int lane, uint32_t (&b)[4][2]) {
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    if constexpr (kFormat == PackedFormat::kBf16) {
      store_two_steps(ptx::ldmatrix_x4(x + odd * 64 + lane / 8 * 16), b[2 * odd], b[2 * odd + 1]);
    } else {
      const uint4 words = *reinterpret_cast<const uint4*>(x + odd * 64 + lane % 4 * 16);
      store_two_steps(words, b[2 * odd], b[2 * odd + 1]);
    }
  }
}

// sum += rows 0-7 of the tile `low` and, where there is one, 8-15 of `high`, times the activations at x, over
// `count` K steps; most often kKSteps, unless that is 0. The tiles begin with the first of them.
template <PackedFormat kFormat, int kKSteps, bool kTwo>
__device__ inline void multiply_segment(const uint8_t* low, const uint8_t* high, const uint8_t* x, int count,
                                        int lane, float (&sum)[4]) {
  using Format = TileFormat<kFormat>;
  const auto multiply = [&](int j) {
    uint32_t a[4][2], c[4][2] = {}, b[4][2];
    Format::load(low + j * Format::kKStepBytes, lane, a);
    if constexpr (kTwo) Format::load(high + j * Format::kKStepBytes, lane, c);
    load_activations<kFormat>(x + j * (kKStepColumns * 2), lane, b);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint32_t both[4] = {a[s][0], c[s][0], a[s][1], c[s][1]};
      ptx::mma_bf16(sum, both, b[s][0], b[s][1]);
    }
  };
  if (kKSteps > 0 &&
      count == kKSteps) {  // without a branch, so that one K step's loads overlap another's products
#pragma unroll
    for (int j = 0; j < kKSteps; ++j) multiply(j);
  } else {
#pragma unroll 1
    for (int j = 0; j < count; ++j) multiply(j);
  }
}

// The segment of the columns that a warp owns: pairs [first, first + count).
struct WarpSegment {
  int first, count;
  __device__ WarpSegment(int pairs, int warp) {
    const int per = k_steps_per_segment(pairs);
    first = min(warp * per, pairs);
    count = min(per, pairs - first);
  }
};

}  // namespace millrace::cuda
