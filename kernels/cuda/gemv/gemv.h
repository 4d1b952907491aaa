// GEMV: products of one to four rows with packed weights, each kernel close to the time its weights take from
// memory. docs/kernels/cuda_decode.md has the schedule and the figures. Pointers are device memory; launches
// are asynchronous on the stream and take counts of zero. B = 4.3 TB/s, the measured copy of an H200.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/moe/activation.h"
#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::cuda {

inline constexpr int32_t kMaxGemvRows = 4;  // beyond, a GEMM reads each weight once for all rows

// Does the shape fit launch_gemv, for so many rows?
bool supports_gemv(const PackedMatrix& w, const Device& device, int32_t tokens = kMaxGemvRows);

// Up to three matrices with the same columns and format on the same rows: out_i[t, r] (+)= w_i[r, :] . n(x[t,
// :]) + bias_i[r], n the RMSNorm when norm_weight is there. Floor: the tiles' bytes / B.
struct Gemv {
  struct Part {
    PackedMatrix w;               // [w.rows, w.cols]
    const float* bias = nullptr;  // [w.rows] or null
    float* out = nullptr;         // [tokens, w.rows]
  };
  Part parts[3];
  int32_t num_parts = 0;
  const float* x = nullptr;              // [.., cols]
  const uint16_t* x_bf16 = nullptr;      // [tokens, cols]: in place of x, without a norm
  const int32_t* source_rows = nullptr;  // [tokens]: row of x, or null: the token's own
  const float* norm_weight = nullptr;    // [cols] or null
  float eps = 0.0f;
  int32_t tokens = 0;       // at most kMaxGemvRows
  bool add = false;         // to out
  uint32_t ring_bytes = 0;  // of shared memory; 0: what is tuned (variants.h) or, else, built in
  // With act, two parts of the same rows are gate and up: act[t, r] = activation(out_0[t, r], out_1[t, r]),
  // rounded to bf16, and nothing else is written.
  uint16_t* act = nullptr;  // [tokens, rows]
  Activation activation;
};
bool gemv_has_many_tiles(const Gemv& op, const Device& device);  // ring_bytes counts
void launch_gemv(const Gemv& op, const Launch& at);

// The experts of one to four tokens: gate and up with the activation, then down with the weighted sum. Every
// CTA routes from the scores for itself (moe/top_k.cuh), so nothing waits for a kernel that only routes.
// Floor: the chosen tiles' bytes / B.
struct GemvExperts {
  PackedMatrix gate, up, down;
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;  // [experts, rows] or null
  const float* scores = nullptr;                                               // [tokens, experts]
  int32_t tokens = 0, experts = 0, k = 0;  // k: experts of a token, at most 8
  bool softmax_over_all = false;
  Activation activation;
  const uint16_t* x_bf16 = nullptr;  // [tokens, gate.cols], from launch_router
  float* act = nullptr;              // [tokens * k, gate.rows], as bf16, between the two kernels
  float* residual = nullptr;         // [tokens, down.rows]
};
bool supports_gemv_experts(const GemvExperts& op, const Device& device);
void launch_gemv_experts(const GemvExperts& op, const Launch& at);

}  // namespace millrace::cuda
