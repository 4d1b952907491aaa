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
// The same of sm_100a's, by tensor memory (fp4_tcgen05.cu).
bool supports_fp4_tcgen05(const Fp4Gemm& op, const Device& device);
// tiled: fp4_tcgen05_workspace_bytes, 16-byte aligned, for the scales of both operands in tiles.
void launch_fp4_tcgen05(const Fp4Gemm& op, void* tiled, const Launch& at);
size_t fp4_tcgen05_workspace_bytes(const Fp4Gemm& op);
// scales [rows][blocks] to tiles (quant/fp4_tiles.h), `tiles` of them along K; zeros where there are none. On
// any GPU. to: the tiles of padded_rows, a multiple of 128.
void launch_tile_fp4_scales(const uint8_t* scales, int64_t rows, int64_t blocks, uint8_t* to,
                            int64_t padded_rows, int64_t tiles, const Launch& at);

// 0 but for sm_100a.
size_t fp4_workspace_bytes(const Fp4Gemm& op, const Device& device);
void launch_fp4(const Fp4Gemm& op, void* workspace, const Launch& at);

}  // namespace millrace::cuda
