// Values multiplied by a factor, added, and capped: what stands between the operations of a layer. Bound by
// memory: 8 bytes read and written for each value, 12 where two are added.
#pragma once

#include "kernels/cpu/context.h"

namespace millrace::cpu {

// x[i] *= by. By the calling thread.
void scale_values(float by, int64_t count, float* x);

// weights[i] *= scales[chosen[i]]: of the experts that tokens go to. By the calling thread.
void scale_chosen(const float* scales, const int32_t* chosen, int64_t count, float* weights);

// to[i] += from[i]. By the calling thread.
void add_values(const float* from, int64_t count, float* to);

// x[i] *= scale, then softcap * tanh(x[i] / softcap) unless softcap is 0.
void scale_softcap(const Context& ctx, float scale, float softcap, int64_t count, float* x);

}  // namespace millrace::cpu
