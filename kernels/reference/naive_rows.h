// What is done to rows between the operations that have names, plainly: sums, factors and gates.
#pragma once

#include <cstdint>

#include "base/state_block.h"

namespace millrace::reference {

// x *= by
void scale(float by, int64_t size, float* x);
// to += by * from
void add(float by, const float* from, int64_t size, float* to);
// to = factor * (x + by * to)
void scaled_sum(float factor, const float* x, float by, int64_t size, float* to);
// weights[i] *= scales[chosen[i]]
void scale_chosen(const float* scales, const int32_t* chosen, int64_t size, float* weights);
// y *= sigmoid(gate), in double
void gate(const float* by, int64_t size, float* y);
// x = cap * tanh(x / cap), in double; cap 0: as it is
void softcap(float cap, int64_t size, float* x);
// x as bf16 holds it
void round_to_bf16(int64_t size, float* x);

enum class Squash { kNone, kTanh, kSigmoid };
// In double.
void squash(Squash kind, int64_t size, float* x);

// The columns of heads of one row, times their scale, to [heads][dim].
void place_heads(const HeadColumns& columns, const float* row, float* to);
// to [heads][dim] *= the columns of heads of one row.
void multiply_heads(const HeadColumns& by, const float* row, float* to);

}  // namespace millrace::reference
