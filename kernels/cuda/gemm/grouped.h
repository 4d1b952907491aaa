// Products of experts' matrices with rows that are sorted by expert (grouped GEMM), of plain bf16, f16 and
// e4m3 matrices. include/millrace/kernels/grouped_gemm.h describes the arguments.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {

enum class GroupedOp : int32_t { kForward, kDgrad, kWgrad };

struct GroupedDense {
  GroupedOp op = GroupedOp::kForward;
  DenseType type = DenseType::kBf16;
  int32_t experts = 0;
  int64_t m = 0, n = 0, k = 0;
  const int32_t* offsets = nullptr;       // [experts + 1], of the device
  const void *a = nullptr, *b = nullptr;  // forward: x, w; dgrad: dy, w; wgrad: dy, x
  int64_t lda = 0, ldb = 0;               // w [experts, n, k]: ldb is k
  void* c = nullptr;                      // y [m, n]; dx [m, k]; dw [experts, n, k], ldc k
  int64_t ldc = 0;
  DenseOut out = DenseOut::kF32;
  float alpha = 1.0f;
  const float *a_scales = nullptr, *b_scales = nullptr;  // e4m3: [m][k / 128], [experts][n / 128][k / 128]
  int64_t a_scale_stride = 0;
  int32_t kernel = 0;  // 0: what fits; 1: generic; for tests
};

bool supports_grouped_wgmma(const GroupedDense& op, const Device& device);
void launch_grouped_wgmma(const GroupedDense& op, const Launch& at);    // bf16, f16
void launch_grouped_fp8(const GroupedDense& op, const Launch& at);      // e4m3, forward
void launch_grouped_generic(const GroupedDense& op, const Launch& at);  // any strides, any GPU
void launch_grouped_dense(const GroupedDense& op, const Launch& at);    // the one that fits

}  // namespace millrace::cuda
