// Gradients of layers with a state: the gated delta rule and Mamba-2's selective scan (docs/kernels/
// state_space.md, "Backwards"). Sequences are cut into chunks of 64 tokens. With the letters of state_scan.h,
// B the betas, g_i what is left at row i of the chunk's first state and dS' the gradient of its last:
//
//   U = (I + L B)^-1 (V - g K S),  W = B U
//   dW = A^T dO + e(last) K dS'                 A(i, j) = scale e(i, j) (q_i . k_j), j <= i
//   dX = (I + B L^T)^-1 B dW = dV               without the delta rule U = V and dX = B dW
//   dS = g_last dS' + scale (g Q)^T dO - (g K)^T dX
//
// and all else follows chunk by chunk from S, U, dW, dX and dS'.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

inline constexpr int32_t kBackwardChunk = 64;    // tokens
inline constexpr int32_t kMaxBackwardDim = 128;  // of keys and of values: what shared memory holds

struct LinearBackward {
  bool delta = false;  // the delta rule
  // What the forward pass got: rows [tokens][heads], dense.
  const float *q = nullptr, *k = nullptr;  // [tokens][key_heads][key_dim]
  const float* v = nullptr;                // [tokens][heads][value_dim]
  const float* logs = nullptr;             // [tokens][heads]; null: `rates`
  const float* rates = nullptr;            // [heads], times `betas`; null with `logs`: nothing decays
  const float* betas = nullptr;            // [tokens][heads]: betas, or the steps of a scan; null: 1
  const float* skip = nullptr;             // [heads]; null: none
  float scale = 1.0f;
  const float* initial = nullptr;       // [sequences][heads][key_dim][value_dim]; null: zeros
  const int32_t* row_starts = nullptr;  // [sequences + 1]
  int32_t sequences = 0, key_heads = 0, heads = 0, key_dim = 0, value_dim = 0;
  int32_t most_tokens = 0;  // of a sequence
  const float* d_out = nullptr;
  const float* d_final = nullptr;  // null: zeros
  // Gradients, null where they are not wanted.
  float *dq = nullptr, *dk = nullptr, *dv = nullptr, *d_logs = nullptr, *d_betas = nullptr;
  float *d_rates = nullptr, *d_skip = nullptr, *d_initial = nullptr;
  float* workspace = nullptr;  // linear_backward_floats()
};

// Of each chunk and head two states, two matrices of 64 x value_dim, and with the delta rule one more and one
// of 64 x 64.
size_t linear_backward_floats(const LinearBackward& op, const Device& device);

// Where there are warpgroup products launch_warpgroup_backward; else five kernels: what chunks need of
// themselves; states forwards; gradients of states backwards; the gradients of each chunk; sums over tokens.
// Products are of TF32, sums float32 in one order.
void launch_linear_backward(const LinearBackward& op, const Launch& at);

// The same for GPUs with warpgroup products: of bf16.
size_t warpgroup_backward_floats(const LinearBackward& op);
void launch_warpgroup_backward(const LinearBackward& op, const Launch& at);

}  // namespace millrace::cuda
