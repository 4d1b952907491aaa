// Products of plain matrices as they lie in memory (no repacked tiles): c = epilogue(alpha * op(a) op(b)),
// for training and for callers of the C API. include/millrace/kernels/gemm.h describes the arguments.
//
//     a     [m, k] (K-major) or [k, m] (MN-major), rows lda elements apart
//     b     [n, k] (K-major) or [k, n] (MN-major), rows ldb elements apart
//     c     [m, n], rows ldc elements apart; of gated activations [m, n / 2]
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

enum class DenseType : int32_t { kBf16, kF16, kE4m3, kS8, kF32 };  // kF32: launch_dense_generic alone
inline int dense_bytes(DenseType type) {
  return type == DenseType::kF32 ? 4 : type == DenseType::kBf16 || type == DenseType::kF16 ? 2 : 1;
}
enum class DenseOut : int32_t { kF32, kBf16, kF16, kE4m3 };
enum class DenseActivation : int32_t { kNone, kGelu, kGeluTanh, kSilu, kSwiglu, kClampedSwiglu };

// Of n columns the first half are gates, the others what they multiply: outputs are n / 2.
constexpr bool is_gated(DenseActivation activation) { return activation >= DenseActivation::kSwiglu; }
constexpr int dense_out_bytes(DenseOut out) {
  return out == DenseOut::kF32 ? 4 : out == DenseOut::kE4m3 ? 1 : 2;
}

struct DenseEpilogue {
  float alpha = 1.0f;
  const float* row_scales = nullptr;     // [m] (kS8)
  const float* column_scales = nullptr;  // [n] (kS8)
  const float* bias = nullptr;           // [n]
  DenseActivation activation = DenseActivation::kNone;
  const void* residual = nullptr;  // [m, n] of c's type, added last; may be c
  int64_t residual_stride = 0;
  DenseOut out = DenseOut::kF32;
  float gate_alpha = 1.0f, gate_limit = 0.0f;  // kClampedSwiglu: its sigmoid's factor, and where both are cut
  float* out_scales = nullptr;                 // kE4m3: [m][ceil(outputs / 128)], rows out_scale_stride apart
  int64_t out_scale_stride = 0;

  // Whether more happens to the sums than a factor and rounding.
  constexpr bool plain() const {
    return row_scales == nullptr && column_scales == nullptr && bias == nullptr &&
           activation == DenseActivation::kNone && residual == nullptr && out != DenseOut::kE4m3;
  }
};

struct DenseGemm {
  DenseType type = DenseType::kBf16;
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;
  int64_t m = 0, n = 0, k = 0, lda = 0, ldb = 0, ldc = 0;
  bool mn_major_a = false, mn_major_b = false;
  // kE4m3: float32 scales of 1 x 128 elements of a, [m][ceil(k / 128)], and of 128 x 128 of b,
  // [ceil(n / 128)][ceil(k / 128)], rows so many elements apart.
  const float *a_scales = nullptr, *b_scales = nullptr;
  int64_t a_scale_stride = 0, b_scale_stride = 0;
  DenseEpilogue epilogue;
  int32_t tile = 0;  // 0: chosen by shape; 1: 128 x 256 by clusters; 2: 128 x 128; 3: 64 x 128 (not e4m3);
                     // of 16 bits, not e4m3: 5: 128 x 192; 6: 64 x 64 (not TN); NT: 4: 192 x 128, and by
                     // clusters 7: 64 x 96, 8: 128 x 320. 5, 7 and 8 without an epilogue by rows
  bool split_k = false;  // few rows may have K in parts, whose sums are added in their order
};

// Outputs of a row.
inline int64_t dense_outputs(const DenseGemm& op) {
  return is_gated(op.epilogue.activation) ? op.n / 2 : op.n;
}
// Whether the warpgroup kernels take it: Hopper, operands and c 16-byte aligned, rows too; 8-bit types
// K-major; gates of all types but e4m3, whose scales are those of 128 columns.
bool supports_dense_wgmma(const DenseGemm& op, const Device& device);
void launch_dense_wgmma(const DenseGemm& op, const Launch& at);  // bf16, f16, s8
void launch_dense_fp8(const DenseGemm& op, const Launch& at);    // e4m3 with scales, promoted every 128 of k
// Any strides, any GPU: float32 sums (int32 of s8) in the order of k. Neither gates nor e4m3 outputs.
void launch_dense_generic(const DenseGemm& op, const Launch& at);
// c from sums [m][n] that lie in memory: the epilogue alone, from the bias on.
void launch_dense_finish(const float* sums, const DenseGemm& op, const Launch& at);
// The one of these that fits; `workspace`: as many bytes as dense_workspace_bytes says.
size_t dense_workspace_bytes(const DenseGemm& op, const Device& device);
void launch_dense(const DenseGemm& op, const Launch& at, void* workspace = nullptr);

}  // namespace millrace::cuda
