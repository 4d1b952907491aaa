// What the kernel of RWKV 7's recurrence gets (kernels/cpu/state/wkv7_chunk.h): some rows of one chunk of one
// head. Plain data: tables include it.
#pragma once

#include <stdint.h>

#include "kernels/cpu/state/state_task.h"

namespace millrace::cpu {

// With S the state before a row, [key_dim][padded_dim], and e_i the row's decay of each dimension of a key:
//
//   u_i = S^T a_i;   S = diag(e_i) S + b_i u_i^T + k_i v_i^T;   o_i = S^T r_i
//
// In terms of the chunk's first state S_0, with e(i, j) = e_i e_(i-1) .. e_(j+1), element by element:
//
//   u_i = S_0^T (e(i-1, -1) a_i) + sum over j < i of (e(i-1, j) a_i . k_j) v_j + (e(i-1, j) a_i . b_j) u_j
//   o_i = S_0^T (e(i, -1) r_i) + sum over j <= i of (e(i, j) r_i . k_j) v_j + (e(i, j) r_i . b_j) u_j
//   S'  = diag(e(last, -1)) S_0 + sum over j of (e(last, j) k_j) v_j^T + (e(last, j) b_j) u_j^T
//
// a_i and r_i are decayed a row at a time, from their own row back: no exponential is computed and nothing
// grows, whatever the decays. Rows before `first` are known: their k, b, v, u and decays are read. A sum over
// dimensions of a key has sixteen lanes and a tree; one over rows, or of S^T a, is a chain of fused
// multiply-adds in order. So a row has the same bits alone and among others.
struct Wkv7Chunk {
  int32_t key_dim, padded_dim;  // padded_dim: of values, a multiple of 16
  int32_t first, last;          // rows of the chunk to compute
  const float* state;           // [key_dim][padded_dim], or null: zeros
  float* state_out;             // the same behind row last - 1, or null; it may be `state`
  const float* r[kChunkRows];   // [key_dim], of the rows to compute
  const float* a[kChunkRows];   // the same
  // [key_dim] and [padded_dim], of all rows before `last`
  const float *decay[kChunkRows], *k[kChunkRows], *b[kChunkRows], *v[kChunkRows];
  float* u[kChunkRows];  // [padded_dim], of all rows before `last`
  float* o[kChunkRows];  // [padded_dim], of the rows to compute
  float* scratch;        // wkv7_scratch_floats
};
// What rows read the state at, a then r; keys as far as they are left behind the chunk, k and b in turn; what
// is left of the state.
inline int64_t wkv7_scratch_floats(int64_t key_dim) {
  constexpr int64_t kVector = 16;
  return (4 * kChunkRows + 1) * ((key_dim + kVector - 1) / kVector * kVector);
}
using Wkv7ChunkFn = void (*)(const Wkv7Chunk& chunk);

}  // namespace millrace::cpu
