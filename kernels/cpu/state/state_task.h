// What a kernel of a layer with a state gets (kernels/cpu/state/state_chunk.h): some rows of one chunk of one
// head. Plain data: tables include it.
#pragma once

#include <stdint.h>

namespace millrace::cpu {

inline constexpr int32_t kChunkRows = 16;  // a chunk is a block of the cache (base/paging.h)

// With S the chunk's first state, [key_dim][padded_dim], and e(i, j) = exp(log_i - log_j), what is left at
// row i of what row j wrote:
//
//   w_i = beta_i (v_i - e_i S^T k_i - sum over j < i of e(i, j) (k_i . k_j) w_j); v_i without `delta`
//   o_i = e_i S^T q_i + sum over j <= i of e(i, j) (q_i . k_j) w_j
//   S'  = e_15 S + sum over j of e(15, j) k_j w_j^T, behind the last row
//
// With logs, e(i, j) is a vector over the dimensions of a key: k_i . k_j is the sum of e(i, j)[d] k_i[d]
// k_j[d].
//
// Rows before `first` are known: their k and w are read. A sum over dimensions of a key has sixteen lanes and
// a tree, as all such sums; one over rows, or of S^T k, is a chain of fused multiply-adds in order, a lane
// for each column. So a row has the same bits alone and among others.
struct StateChunk {
  int32_t key_dim, padded_dim;  // padded_dim: a multiple of 16
  int32_t first, last;          // rows of the chunk to compute
  bool delta;
  const float* state;          // [key_dim][padded_dim], or null: zeros
  float* state_out;            // the same behind the chunk, or null; it may be `state`
  const float* q[kChunkRows];  // [key_dim], of the rows to compute
  const float* k[kChunkRows];  // [key_dim], of all rows before `last`
  const float* v[kChunkRows];  // [padded_dim], of the rows to compute
  float* w[kChunkRows];        // [padded_dim], of all rows before `last`
  float* o[kChunkRows];        // [padded_dim], of the rows to compute
  float beta[kChunkRows];
  float log[kChunkRows];          // log_i; behind `last` that of the last row. Without meaning with logs
  const float* logs[kChunkRows];  // [key_dim], of all rows before `last`; the first null: there are none
  float* scratch;                 // state_scratch_floats
};
// Keys as far as they are left behind the chunk; with logs also queries and keys as far as the state is left
// at their row, and what is left of it behind the chunk.
inline int64_t state_scratch_floats(int64_t key_dim, bool logs) {
  constexpr int64_t kVector = 16;
  return (logs ? 3 * kChunkRows + 1 : kChunkRows) * ((key_dim + kVector - 1) / kVector * kVector);
}
using StateChunkFn = void (*)(const StateChunk& chunk);

// y[r][c] = act(bias[c] + sum over t of weight[c][t] x[r + t][c]) for r < rows, a chain of fused
// multiply-adds from the oldest row on.
struct ShortConvRows {
  int64_t channels, rows;
  int32_t taps;
  const float* const* x;  // [rows + taps - 1] -> [channels]; null: zeros
  const float* weight;    // [channels][taps]
  const float* bias;      // [channels], or null
  bool silu;
  float* y;  // rows y_stride apart
  int64_t y_stride;
};
using ShortConvFn = void (*)(const ShortConvRows& rows, int64_t first_channel, int64_t last_channel);

}  // namespace millrace::cpu
