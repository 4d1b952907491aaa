// Mixture of experts around the products: the router, top-k routing, the activation and combining; and all of
// it in one persistent kernel for one token.
//
// Parameters are plain structs; pointers are device memory unless they say otherwise. Launches are
// asynchronous on the stream, take counts of zero, and throw Error{kDevice} when refused. B = 4.3 TB/s, the
// measured copy of an H200: a floor is what a kernel could reach.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/moe/activation.h"

namespace millrace::cuda {

// The k experts with the largest scores [count, experts] of each token, ties and NaN to the lower index, and
// their softmax weights over the chosen or over all. chosen, weights: [count, k]. Latency-bound: 4 experts
// bytes per token.
void launch_route_top_k(const float* scores, int64_t count, int experts, int k, bool softmax_over_all,
                        int32_t* chosen, float* weights, const Launch& at);

// Of a choice of experts, those of which only some are here: chosen[i] = local[chosen[i]], or, where that is
// -1, any of the `count` that are here, with a weight of 0. local: [experts]. Latency-bound: 12 pairs bytes.
void launch_keep_experts(const int32_t* local, int count, int64_t pairs, int32_t* chosen, float* weights,
                         const Launch& at);

// weights[i] *= scales[chosen[i]], scales [experts] (Gemma 4). Latency-bound: 12 pairs bytes.
void launch_scale_chosen(const float* scales, int64_t pairs, const int32_t* chosen, float* weights,
                         const Launch& at);

// gate = silu(gate) * up, or gpt-oss's clamped form. Floor: 12 size / B.
void launch_activate(const Activation& op, int64_t size, float* gate, const float* up, const Launch& at);

// residual[t, :] += sum over slots, in order, of weights[t, s] * down[t * k + s, :]. Floor: 4 (k + 2) hidden
// count / B.
void launch_combine_experts(const float* down, const float* weights, int64_t count, int k, int64_t hidden,
                            float* residual, const Launch& at);

// scores[t, e] = router[e, :] . norm(x[t, :]) + bias[e]; also keeps the normed rows, as float32 and, unless
// that is null, as bf16. cols a multiple of 32. Latency-bound: 4 cols experts bytes from L2.
struct Router {
  const float* weight = nullptr;  // [experts, cols]
  const float* bias = nullptr;    // [experts] or null
  const float* x = nullptr;       // [tokens, cols]
  const float* norm_weight = nullptr;
  float eps = 0.0f;
  int32_t tokens = 0, experts = 0, cols = 0;
  float* scores = nullptr;     // [tokens, experts]
  float* normed = nullptr;     // [tokens, cols]
  uint16_t* x_bf16 = nullptr;  // [tokens, cols]: the normed rows as bf16, or null
};
bool supports_router(int64_t cols, const Device& device);
void launch_router(const Router& op, const Launch& at);

// Rows of x as bf16, without a norm; cols a multiple of 4.
void launch_rows_to_bf16(const float* x, int64_t rows, int64_t cols, uint16_t* x_bf16, const Launch& at);

// The router and the experts in one persistent kernel, for one token: MXFP4 experts whose columns leave the
// last segment empty, and 4-bit codes of 1,056 to 2,048 columns and up to 1,024 rows (Qwen3-30B-A3B). Its
// CTAs wait for one another: who launches it has the claim on the whole grid (grid_claim.h). `sync`: zeros at
// first. The same bits as launch_router and launch_gemv_experts.
struct PersistentMoeSync {
  uint64_t scores[128];  // each with the number of the kernel it is for
  uint32_t epoch;        // kernels so far
  uint32_t arrived;      // CTAs, in all kernels
};
bool supports_persistent_moe(const Router& router, const GemvExperts& op, const Device& device);
void launch_persistent_moe(const Router& router, const GemvExperts& op, PersistentMoeSync* sync,
                           const Launch& at);

}  // namespace millrace::cuda
