// Products of bf16 rows with four-bit weights in units (quant/lowbit_units.h), alone or of experts whose rows
// are sorted, forward and for the gradient of the rows. include/millrace/kernels/lowbit.h describes the
// arguments.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/dense.h"
#include "kernels/quant/lowbit_units.h"

namespace millrace::cuda {

struct LowbitGemm {
  mr_lowbit_format format = MR_LOWBIT_MXFP4;
  int32_t experts = 1;
  int64_t n = 0, k = 0;                  // of an expert's matrix
  const uint8_t* weights = nullptr;      // [experts][row tiles][column units][unit_bytes]
  const float* expert_scales = nullptr;  // [experts] or null
  bool backward = false;
  int64_t m = 0;
  const int32_t* offsets = nullptr;  // [experts + 1], or null: one expert
  const void* x = nullptr;           // bf16 [m, k], backward [m, n]
  int64_t ldx = 0;
  DenseOut out = DenseOut::kF32;
  void* y = nullptr;  // [m, n], backward [m, k]
  int64_t ldy = 0;
  float alpha = 1.0f;
  const float* bias = nullptr;  // [experts, n] or null
  float* workspace = nullptr;   // lowbit_workspace_bytes
  int32_t kernel = 0;           // 0: what fits; 1: generic, 2: warpgroups, 3: GEMV; for tests

  MILLRACE_HOST_DEVICE int64_t reduced() const { return backward ? n : k; }
  MILLRACE_HOST_DEVICE int64_t outputs() const { return backward ? k : n; }
};

inline constexpr int64_t kLowbitGemvRows = 8;

void launch_lowbit_repack(const mr_lowbit_matrix& from, uint8_t* to, const Launch& at);
// Of any GPU; the kernels below take part of it.
size_t lowbit_workspace_bytes(const LowbitGemm& op, const Device& device);
void launch_lowbit(const LowbitGemm& op, const Launch& at);

// Hopper, x and its rows aligned to 16 bytes. A file per format.
template <mr_lowbit_format kFormat>
void launch_lowbit_wgmma(const LowbitGemm& op, const Launch& at);
// Up to kLowbitGemvRows rows, forward, of one matrix: the same bits. sm_90 and later.
void launch_lowbit_gemv(const LowbitGemm& op, const Launch& at);
// Anything, slowly, in other segments.
void launch_lowbit_generic(const LowbitGemm& op, const Launch& at);

}  // namespace millrace::cuda
