// The rows of the fused operations (include/millrace/kernels/rows.h) as function pointers, a part of every
// KernelTable. Each call does one row, or a part of one; threads and blocks of rows are fused/fused.h's
// business. Types are values: a branch per sixteen elements is foreseen and costs nothing beside memory.
#pragma once

#include <stdint.h>

#include "kernels/quant/philox.h"
#include "millrace/kernels/activation.h"
#include "millrace/kernels/norm.h"

namespace millrace::cpu {

// [size] of MR_F32, MR_F16 or MR_BF16; data may be null where a comment says so. `next` of a kernel are rows
// of the same size that are prefetched on the way: those of its next call, or again its own.
struct FloatRow {
  void* data;
  mr_dtype type;
};

struct NormRow {
  mr_norm_kind kind;
  int64_t cols;
  FloatRow x, residual, sum, y;  // residual (and sum with it) and y may be absent
  FloatRow weight, bias;         // may be absent
  float weight_offset, eps;
  float *mean, *rstd;  // of this row, or null
  mr_norm_quantize quantize;
  uint8_t* codes;
  float* scales;
  FloatRow next[2];  // of x and residual
};

struct NormBackwardRow {
  mr_norm_kind kind;
  int64_t cols;
  FloatRow x, dy, dsum, dx, weight;  // dsum and weight may be absent
  float weight_offset, mean, rstd;
  float *dweight, *dbias;  // [cols], added to; or null
  FloatRow next[2];        // of x and dy
};

struct ActivationRow {
  mr_activation_kind kind;
  int64_t cols;
  FloatRow x, up, y;
  float alpha, limit;
};
struct ActivationBackwardRow {
  mr_activation_kind kind;
  int64_t cols;
  FloatRow x, up, dy, dx, dup;
  float alpha, limit;
};

// sum of exp(scale * x - max)
struct RowSum {
  float max, sum;
};

struct DropoutRow {
  FloatRow x, y;  // from column first_col on, a multiple of 4
  int64_t first_col, cols;
  uint32_t row, offset_low, offset_high, drop_below;
  float scale;
};

struct FusedKernels {
  void (*norm)(const NormRow& op);
  void (*norm_backward)(const NormBackwardRow& op);
  void (*activation)(const ActivationRow& op);
  void (*activation_backward)(const ActivationBackwardRow& op);
  // exps: exp(scale * x - max), [cols], for who needs them again; or null
  RowSum (*row_sum)(FloatRow x, int64_t cols, float scale, float* exps, FloatRow next);
  // y = exp(scale * x - max) * by
  void (*softmax)(FloatRow x, int64_t cols, float scale, float max, float by, FloatRow y);
  // dx = scale * y * (dy - sum(y dy)); next: of y and dy
  void (*softmax_backward)(FloatRow y, FloatRow dy, int64_t cols, float scale, FloatRow dx,
                           const FloatRow (&next)[2]);
  // y = x * by; with `add` y += x * by
  void (*scale)(FloatRow x, int64_t cols, float by, FloatRow y, bool add);
  // y = by * sum of x + rows[i] * stride elements, i < count in order; with `add` y += that
  void (*sum_rows)(FloatRow x, int64_t stride, const int32_t* rows, int64_t count, int64_t cols, float by,
                   FloatRow y, bool add);
  // cosines and sines, times magnitude, of position * inv_freq[i]
  void (*rotary_angles)(const float* inv_freq, int64_t half, int32_t position, float magnitude,
                        float* cosines, float* sines);
  // One head: pairs (i, i + half) or (2 i, 2 i + 1), the dimensions behind them copied
  void (*rotate)(FloatRow x, const float* cosines, const float* sines, int64_t half, bool interleaved,
                 int64_t head_dim, FloatRow y);
  void (*dropout)(const DropoutRow& op, const philox::Keys& keys);
};

}  // namespace millrace::cpu
