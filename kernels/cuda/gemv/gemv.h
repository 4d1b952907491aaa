// The decode path's kernels: products of one to four rows with packed weights, each kernel close to the time
// its weights take from memory. See docs/kernels/cuda_decode.md for the schedule and the figures.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/moe/activation.h"
#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::cuda {

inline constexpr int32_t kMaxStreamRows = 4;  // beyond, wide products read each weight once for all

// Does the shape fit the streaming kernels? By its columns alone.
bool fits_streaming(const PackedMatrix& w, const Device& device);

// Up to three matrices with the same columns and format on the same rows: out_i[t, r] (+)= w_i[r, :] . n(x[t,
// :])
// + bias_i[r], n the RMSNorm when norm_weight is there. tokens <= 4. Floor: the tiles' bytes / B.
struct StreamLinear {
  struct Part {
    PackedMatrix w;
    const float* bias = nullptr;  // [rows] or null
    float* out = nullptr;         // [tokens, rows]
  };
  Part parts[3];
  int32_t num_parts = 0;
  const float* x = nullptr;              // [.., cols]
  const int32_t* source_rows = nullptr;  // [tokens]: row of x, or null: the token's own
  const float* norm_weight = nullptr;    // [cols] or null
  float eps = 0.0f;
  int32_t tokens = 0;
  bool add = false;         // to out
  uint32_t ring_bytes = 0;  // of a stream of many tiles; 0: what is tuned (tuning.h) or, else, built in
};
bool streams_many(const StreamLinear& op, const Device& device);  // ring_bytes counts
void launch_stream_linear(const StreamLinear& op, const Launch& at);

// scores[t, e] = router[e, :] . norm(x[t, :]) + bias[e]; also keeps the normed rows, as float32 [tokens,
// cols] and, unless that is null, as bf16. router: float32 [experts, cols], cols a multiple of 32.
// Latency-bound: 4 cols experts bytes from L2.
struct StreamRoute {
  const float* router = nullptr;
  const float* bias = nullptr;
  const float* x = nullptr;
  const float* norm_weight = nullptr;
  float eps = 0.0f;
  int32_t tokens = 0, experts = 0, cols = 0;
  float* scores = nullptr;
  float* normed = nullptr;
  uint16_t* rounded = nullptr;  // [tokens, cols]: the normed rows as bf16, or null
};
void launch_stream_route(const StreamRoute& op, const Launch& at);

// The experts of one to four tokens. Chooses from the scores (every CTA for itself), so nothing waits for a
// kernel that only chooses. act: [tokens * k, expert_ffn] between the two. k <= 8. Floor: the chosen tiles'
// bytes / B.
struct StreamExperts {
  PackedMatrix gate, up, down;
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  const float* scores = nullptr;  // [tokens, experts]
  int32_t tokens = 0, experts = 0, k = 0;
  bool softmax_over_all = false;
  Activation activation;
  const uint16_t* rounded = nullptr;  // [tokens, cols] bf16, from launch_stream_route
  float* act = nullptr;               // holds bf16
  float* residual = nullptr;          // [tokens, hidden]
};
bool fits_stream_experts(const StreamExperts& op, const Device& device);
void launch_stream_experts(const StreamExperts& op, const Launch& at);

// Both in one kernel, for one token and MXFP4 experts whose columns leave the last segment empty. Its CTAs
// wait for one another: two such kernels may not run side by side. `sync`: zeros at first. The same bits as
// above.
struct MoeSync {
  uint64_t scores[128];  // each with the number of the kernel it is for
  uint32_t epoch;        // kernels so far
  uint32_t arrived;      // CTAs, in all kernels
};
bool fits_stream_moe(const StreamRoute& route, const StreamExperts& op, const Device& device);
void launch_stream_moe(const StreamRoute& route, const StreamExperts& op, MoeSync* sync, const Launch& at);

// Rows of x as bf16, without a norm; cols a multiple of 4.
void launch_round_rows(const float* x, int64_t rows, int64_t cols, uint16_t* rounded, const Launch& at);

}  // namespace millrace::cuda
