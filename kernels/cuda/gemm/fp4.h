// Products of two matrices of e2m1 codes with block scales. include/millrace/kernels/fp4_gemm.h describes the
// arguments.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {

struct Fp4Gemm {
  bool nvfp4 = false;
  int64_t m = 0, n = 0, k = 0;
  const uint8_t *a = nullptr, *a_scales = nullptr;  // [m][k / 2], [m][k / block]
  const uint8_t *b = nullptr, *b_scales = nullptr;  // [n][k / 2], [n][k / block]
  float alpha = 1.0f;
  DenseOut out = DenseOut::kF32;
  void* c = nullptr;  // [m, n]
  int64_t ldc = 0;
};

// Whether GPU and code have block-scaled products of sm_120a, and the operands fit.
bool supports_fp4_mma(const Fp4Gemm& op, const Device& device);
void launch_fp4(const Fp4Gemm& op, const Launch& at);

}  // namespace millrace::cuda
