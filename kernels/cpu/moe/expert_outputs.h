// Outputs of experts that are added to the residual stream by themselves: the shared expert's, with a factor;
// and those that are added up elsewhere than where they were made: what an expert gives a token is weighed
// where the expert is, sent, and added in slot order where the token's columns are. The same operations in
// the same order as moe_experts does them in one place, so the same bits.
// Bound by memory: 8 bytes read and written for each value, and a multiply or an add.
#pragma once

#include <span>

#include "kernels/cpu/context.h"

namespace millrace::cpu {

struct WeighOutputs {
  const float* out;             // [sorted rows][cols]: MoeWorkspace::expert_out
  const int32_t* sorted_row;    // [pairs]: of a (token, slot)
  const int32_t* chosen;        // [pairs]: the expert, as `bias` counts them
  const float* weights;         // [pairs]; absent: inputs were weighed
  const float* bias = nullptr;  // [experts][cols], or absent
  int64_t cols;
};
// to[i][count] = columns [first, first + count) of weight * (out + bias) of pairs[i].
void weigh_outputs(const Context& ctx, const WeighOutputs& op, std::span<const int32_t> pairs, int64_t first,
                   int64_t count, float* to);

struct AddOutputs {
  const float* from;     // [..][cols]
  const int32_t* place;  // [rows][k]: row of `from`; -1: no expert
  int64_t rows, k, cols;
  float* y;  // [rows][cols], `stride` apart: added to
  int64_t stride;
};
// y[row] += the sum of its outputs, in slot order.
void add_outputs(const Context& ctx, const AddOutputs& op);

// residual[row] += scale * sigmoid(mix[row]) * x[row].
struct AddMixed {
  float* mix;  // [rows], overwritten; absent: without that factor
  float scale;
  const float* x;  // [rows][cols], `stride` apart as those of residual
  int64_t rows, cols, stride;
  float* residual;
};
void add_mixed(const Context& ctx, const AddMixed& op);

}  // namespace millrace::cpu
