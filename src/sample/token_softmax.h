// Softmax arithmetic that gives the same bits on every machine: base/sampling_math.h, several at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace millrace {

// Index of the largest value, the lowest index among equals; NaN never wins. -1 when nothing is above
// -infinity.
int32_t argmax(std::span<const float> logits);

// out[i] = e^((logits[i] - largest) * scale), the largest exactly 1; NaN gives 0. When the largest is
// +infinity the infinite ones share everything. out has logits' size; `scale` is 1 / temperature, at most
// 1e6.
void softmax_weights(std::span<const float> logits, float largest, float scale, std::vector<float>& out);

// Sum of weights in [0, 1], each rounded to units (sampling::units_of): exact in any order.
uint64_t sum_units(std::span<const float> weights);

// Throws Error{kBadInput}: of so many logits none is a number above -infinity.
[[noreturn]] void throw_no_logits(size_t count);

// log(sum(e^logits)). Throws Error{kBadInput} when no logit is a number above -infinity.
double log_sum_exp(std::span<const float> logits);
// The same where the largest and the sum of all sampling::weight_of(logit, largest, 1) are known.
double log_of_units(float largest, uint64_t units);
// log softmax of one logit then.
double log_softmax_of(float logit, double log_sum, uint64_t units);

// log softmax(logits)[index], given log_sum_exp(logits).
double log_softmax_at(std::span<const float> logits, int32_t index, double log_sum);
inline double log_softmax_at(std::span<const float> logits, int32_t index) {
  return log_softmax_at(logits, index, log_sum_exp(logits));
}

}  // namespace millrace
