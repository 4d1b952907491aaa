// Gates of attention (Qwen 3 Next): one product has query and gate of every head, and what heads attended to
// is multiplied by the sigmoid of its gate.
#pragma once

#include "kernels/cpu/context.h"

namespace millrace::cpu {

// Query and gate alternate: from [heads][2][dim], of all rows, to two of [heads][dim]. By the calling thread.
void split_gates(const float* from, int64_t heads, int64_t dim, float* query, float* gate);

// y *= sigmoid(gate), [rows][cols] both; the gate is overwritten.
void gate_attention(const Context& ctx, int64_t rows, int64_t cols, float* gate, float* y);

}  // namespace millrace::cpu
