// What lies around the experts' products: top-k routing, their activation, and combining what they give.
// Parameters are plain structs; pointers are
// device memory unless they say otherwise. Launches are asynchronous on the stream, take counts of zero, and
// throw Error{kDevice} when refused. B = 4.3 TB/s, the measured copy of an H200: a floor is what a kernel
// could reach.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/moe/activation.h"

namespace millrace::cuda {

// The k experts with the largest scores [count, experts] of each token, ties and NaN to the lower index, and
// their softmax weights over the chosen or over all. chosen, weights: [count, k]. Latency-bound: 4 experts
// bytes per token.
void launch_choose_experts(const float* scores, int64_t count, int experts, int k, bool softmax_over_all,
                           int32_t* chosen, float* weights, const Launch& at);

// gate = silu(gate) * up, or gpt-oss's clamped form. Floor: 12 size / B.
void launch_activate(const Activation& op, int64_t size, float* gate, const float* up, const Launch& at);

// residual[t, :] += sum over slots, in order, of weights[t, s] * down[t * k + s, :]. Floor: 4 (k + 2) hidden
// count / B.
void launch_combine_experts(const float* down, const float* weights, int64_t count, int k, int64_t hidden,
                            float* residual, const Launch& at);

}  // namespace millrace::cuda
