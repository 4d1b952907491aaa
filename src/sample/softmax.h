// Softmax arithmetic that gives the same bits on every machine: an exponential of our own in float32 (libm's
// differs between builds), sums in double in a fixed order. No multiply-add is fused (-ffp-contract=off).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace millrace {

// e^x for x <= 0 to about 2e-7 relative; 0 below -87 and for NaN.
float exp_nonpositive(float x);

// Index of the largest value, the lowest index among equals; NaN never wins. -1 when nothing is above
// -infinity.
int32_t argmax(std::span<const float> logits);

// out[i] = e^((logits[i] - largest) * scale), the largest exactly 1; NaN gives 0. When the largest is
// +infinity the infinite ones share everything. out has logits' size; `scale` is 1 / temperature, at most
// 1e6.
void softmax_weights(std::span<const float> logits, float largest, float scale, std::vector<float>& out);

// Sum of weights in double, in a fixed order.
double sum_in_order(std::span<const float> weights);

// log(sum(e^logits)). Throws Error{kBadInput} when no logit is a number above -infinity.
double log_sum_exp(std::span<const float> logits);

// log softmax(logits)[index], given log_sum_exp(logits).
double log_softmax_at(std::span<const float> logits, int32_t index, double log_sum);
inline double log_softmax_at(std::span<const float> logits, int32_t index) {
  return log_softmax_at(logits, index, log_sum_exp(logits));
}

}  // namespace millrace
