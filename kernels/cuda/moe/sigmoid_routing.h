// Routing by sigmoids, and what mixtures do to rows beside their products. Pointers are device memory;
// launches are asynchronous on the stream and take counts of zero.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

// The k experts of each token with the largest sigmoid(score) + choice_bias, ties and NaN to the lower index,
// among those of the `groups_chosen` groups whose two largest of these are largest in sum; their weights are
// the sigmoids, divided by the sum of the chosen with `renormalize`, times scale. With `softmax` (DeepSeek
// V2) the scores themselves are compared, of a group the largest one, and weights are their softmax over all
// experts. Latency-bound: 4 experts bytes per token.
struct SigmoidRouting {
  const float* scores = nullptr;       // [tokens, experts]
  const float* choice_bias = nullptr;  // [experts] or null
  int64_t tokens = 0;
  int32_t experts = 0, k = 0;
  int32_t groups = 1, groups_chosen = 1;  // of experts / groups that follow one another
  bool renormalize = false, softmax = false;
  float scale = 1.0f;
  int32_t* chosen = nullptr;  // [tokens, k]
  float* weights = nullptr;   // [tokens, k]
};
// Whether a token's scores fit shared memory.
bool supports_sigmoid_routing(int32_t experts, int32_t groups);
void launch_sigmoid_routing(const SigmoidRouting& op, const Launch& at);

// out[pair, :] = weights[pair] * x[pair / k, :], and weights[pair] = 1: what comes out of an expert is then
// added as it is. Floor: 8 cols * pairs / B.
void launch_weigh_inputs(const float* x, int64_t pairs, int32_t k, int64_t cols, float* weights, float* out,
                         const Launch& at);

// residual[t, :] += scale * sigmoid(mix[t]) * x[t, :]. Floor: 12 cols * rows / B.
void launch_add_mixed(const float* mix, float scale, const float* x, int64_t rows, int64_t cols,
                      float* residual, const Launch& at);

}  // namespace millrace::cuda
