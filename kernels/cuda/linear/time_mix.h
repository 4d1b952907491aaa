// What RWKV 7 does to rows around its products and its recurrence (replayed_scan.h): the token shift, keys,
// decays and values of a row, and what becomes of what was read. A row's bits depend on the row and the one
// before it alone. Pointers are device memory; launches are asynchronous on the stream and take counts of
// zero. B = 4.3 TB/s, the measured copy of an H200.
#pragma once

#include "kernels/cuda/linear/state_scan.h"

namespace millrace::cuda {

// out[r, :] = x[r, :] + (x[before r, :] - x[r, :]) * by, where what is before a sequence's first row in this
// step is in its blocks; zeros before the first of all. With `keep` x goes to the blocks. Floor: 12 cols *
// rows / B.
struct TokenShift {
  const float* x = nullptr;   // [rows, cols]
  const float* by = nullptr;  // [cols]
  int64_t rows = 0, cols = 0;
  int64_t place = 0;  // of these columns in a row of a block's inputs
  bool keep = false;
  const int32_t *sequence_of = nullptr, *positions = nullptr;  // [rows]
  StatePool pool = {};
  float* out = nullptr;  // [rows, cols]
};
void launch_token_shift(const TokenShift& op, const Launch& at);

enum class Squash : int32_t { kTanh, kSigmoid };
void launch_squash(Squash kind, int64_t size, float* x, const Launch& at);

// Of each head of a row, [heads * dim] columns each:
//   c = k k_k / |k k_k|;  a = -c;  b = c sigmoid(rate);  k = k (1 + (sigmoid(rate) - 1) k_a);
//   decay = exp(-e^-0.5 sigmoid(decay));  v += (first_values - v) sigmoid(mixed), or first_values = v
// k, b and decay go to the row's block too. Floor: 48 cols * rows / B.
struct PrepareTimeMix {
  float *k = nullptr, *v = nullptr, *decay = nullptr;  // in place
  float* rate = nullptr;                               // becomes b
  float* mixed = nullptr;                              // becomes a; with `first` it is not read
  float* first_values = nullptr;
  bool first = false;
  const float *k_k = nullptr, *k_a = nullptr;  // [cols]
  int64_t rows = 0;
  int32_t heads = 0, dim = 0;
  const int32_t *sequence_of = nullptr, *positions = nullptr;  // [rows]
  StatePool pool = {};
};
void launch_prepare_time_mix(const PrepareTimeMix& op, const Launch& at);

// Of each head: y = (layer_norm(y) + (r . (r_k k)) v) gate. Floor: 24 cols * rows / B.
struct FinishTimeMix {
  float* y = nullptr;  // [rows, heads * dim]
  const float *r = nullptr, *k = nullptr, *v = nullptr, *gate = nullptr;
  const float *r_k = nullptr, *norm = nullptr, *norm_bias = nullptr;  // [heads * dim]
  float eps = 0.0f;
  int64_t rows = 0;
  int32_t heads = 0, dim = 0;
};
void launch_finish_time_mix(const FinishTimeMix& op, const Launch& at);

}  // namespace millrace::cuda
