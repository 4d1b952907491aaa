// A task is 64 x 64 outputs; 128 columns of both operands at a time are widened to floats, every value of
// which is exact, and multiplied as in dense_gemm.cpp.
#include "kernels/cpu/matmul/fp4_gemm.h"

#include <algorithm>

#include "base/float_bits.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kFp4Rows = 64, kFp4Depth = 128;

struct Fp4Scratch {
  float *a, *b, *row, *sums;
};
Fp4Scratch take_fp4_scratch(Arena& arena) {
  Fp4Scratch s{};
  s.a = arena.take<float>(kFp4Rows * kFp4Depth);
  s.b = arena.take<float>(kFp4Depth * kDenseLanes);
  s.row = arena.take<float>(kFp4Depth);
  s.sums = arena.take<float>(kFp4Rows * kDenseLanes);
  return s;
}

// Columns k to k + count of a row, both multiples of 16.
void widen_fp4(const mr_fp4_gemm_args& args, const void* codes, const void* scales, int64_t row, int64_t k,
               int64_t count, float* to) {
  constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const int64_t block = args.format == MR_LOWBIT_NVFP4 ? 16 : 32;
  const uint8_t* code = static_cast<const uint8_t*>(codes) + row * (args.k / 2) + k / 2;
  const uint8_t* scale = static_cast<const uint8_t*>(scales) + row * (args.k / block);
  for (int64_t i = 0; i < count; i += 2) {
    const uint8_t stored = scale[(k + i) / block];
    const float s = block == 16 ? to_float(Fp8E4M3{stored}) : to_float(E8M0{stored});
    to[i] = kValues[code[i / 2] & 15u] * s;
    to[i + 1] = kValues[code[i / 2] >> 4] * s;
  }
}

}  // namespace

size_t fp4_gemm_workspace_bytes(int threads) {
  Arena arena(nullptr);
  for (int t = 0; t < threads; ++t) take_fp4_scratch(arena);
  return arena.used();
}

void fp4_gemm(const Context& on, const mr_fp4_gemm_args& args, void* workspace) {
  Arena one(nullptr);
  take_fp4_scratch(one);
  const int64_t across = (args.n + kDenseLanes - 1) / kDenseLanes, down = (args.m + kFp4Rows - 1) / kFp4Rows;
  on.pool.parallel_for(down * across, 1, [&](int64_t begin, int64_t end, int thread) {
    Arena arena(static_cast<uint8_t*>(workspace) + static_cast<size_t>(thread) * one.used());
    const Fp4Scratch scratch = take_fp4_scratch(arena);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across * kFp4Rows, column = i % across * kDenseLanes;
      const int64_t rows = std::min(kFp4Rows, args.m - row);
      const int64_t columns = std::min<int64_t>(kDenseLanes, args.n - column);
      std::fill_n(scratch.sums, rows * kDenseLanes, 0.0f);
      std::fill_n(scratch.b, kFp4Depth * kDenseLanes, 0.0f);
      for (int64_t k = 0; k < args.k; k += kFp4Depth) {
        const int64_t depth = std::min(kFp4Depth, args.k - k);
        for (int64_t r = 0; r < rows; ++r)
          widen_fp4(args, args.a, args.a_scales, row + r, k, depth, scratch.a + r * kFp4Depth);
        for (int64_t c = 0; c < columns; ++c) {
          widen_fp4(args, args.b, args.b_scales, column + c, k, depth, scratch.row);
          for (int64_t j = 0; j < depth; ++j) scratch.b[j * kDenseLanes + c] = scratch.row[j];
        }
        on.kernels.dense_panel(
            {scratch.a, kFp4Depth, 1, scratch.b, scratch.sums, rows, depth, kDenseLanes, k > 0});
      }
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          const float y = args.alpha * scratch.sums[r * kDenseLanes + c];
          const int64_t at = (row + r) * args.ldc + column + c;
          if (args.out_type == MR_F32) {
            static_cast<float*>(args.c)[at] = y;
          } else {
            static_cast<uint16_t*>(args.c)[at] =
                args.out_type == MR_BF16 ? to_bfloat16(y).bits : to_half(y).bits;
          }
        }
      }
    }
  });
}

}  // namespace millrace::cpu
