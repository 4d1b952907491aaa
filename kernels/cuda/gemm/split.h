// Products whose operands are of different types, have scales in any grid, or are to keep float32's
// precision: dlogits with 16-bit weights, eight-bit floats for gradients, their experts. Each element is
// split into two TF32 numbers (22 bits of mantissa) for the tensor cores.
//
//     c[m, n] (+)= alpha * sum_k a(m, k) b(n, k)
//
// Sums are taken in blocks of 256 of k and added in order: with `accumulate` a sum that is continued at a
// whole block has the bits of one that was not cut.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {

enum class SplitType : int32_t { kF32, kF16, kBf16, kE4m3, kE5m2 };
constexpr int split_bytes(SplitType type) {
  return type == SplitType::kF32 ? 4 : type == SplitType::kF16 || type == SplitType::kBf16 ? 2 : 1;
}

// Element (outer, k) lies at outer * ld + k (k_major) or k * ld + outer; where scales are given it is
// multiplied with scales[outer / outer_group * outer_stride + k / k_group * k_stride].
struct SplitOperand {
  SplitType type = SplitType::kF32;
  const void* data = nullptr;
  int64_t ld = 0;
  bool k_major = true;
  const float* scales = nullptr;
  int32_t outer_group = 1, k_group = 128;  // each 1 or 128
  int64_t outer_stride = 0, k_stride = 1;
};

// Experts: kRows: rows offsets[e] to offsets[e + 1] - 1 of a and c (K-major) multiply b of expert e; kDepth:
// they are the k of expert e's own c, a and b MN-major.
enum class SplitGroups : int32_t { kNone, kRows, kDepth };

struct SplitGemm {
  SplitOperand a, b;
  int64_t m = 0, n = 0, k = 0;
  float alpha = 1.0f;
  DenseOut out = DenseOut::kF32;  // not kE4m3
  void* c = nullptr;              // [m, n], rows ldc apart; kDepth: [experts, m, n]
  int64_t ldc = 0;
  bool accumulate = false;  // out is kF32, alpha is 1
  SplitGroups groups = SplitGroups::kNone;
  int32_t experts = 1;
  const int32_t* offsets = nullptr;              // [experts + 1], of the device
  int64_t b_expert = 0, b_scales_of_expert = 0;  // kRows: elements and scales from an expert's to the next's
};

// With k of 0 (or experts without rows) c is zeros, or left as it is.
void launch_split(const SplitGemm& op, const Launch& at);

}  // namespace millrace::cuda
