// The first half of a gated feed-forward block, act(W_gate x, W_up x): both products of a chunk of rows are
// made by one thread, activated, and quantized for the product with W_down while they are in its cache.
#pragma once

#include "base/gated_activation.h"
#include "kernels/cpu/matmul/gemm_chunk.h"
#include "kernels/cpu/matmul/low_rank.h"

namespace millrace::cpu {

struct GateUp {
  LinearWeights gate, up;  // [experts][inner][hidden]; without up, u is 1
  Activation activation = Activation::kSilu;
  float alpha = 1.702f, limit = 7.0f;
  // What is added to both products before biases and activation.
  std::span<const LowRankRun> gate_updates = {}, up_updates = {};
  int64_t updates_at = 0;  // the updates' row that is row 0 of x: of experts, runs count sorted rows
};

// What lies between up and down.
struct InnerActivations {
  float* values;  // [rows][inner], written only where the formats have float32
  QuantizedActivations quantized;
  ActivationFormats formats;
};

// Rows [first, first + count) of an expert's matrices with rows [0, num_m) of x, into columns of `inner`
// [num_m][inner]. first and count are whole blocks of 32, but at the end. row_scale, [num_m] or absent:
// multiplies a row of both products, as if it had multiplied the input.
void gate_up_chunk(const Context& ctx, const GateUp& op, int64_t expert, int64_t first, int64_t count,
                   const ActivationRows& x, int64_t num_m, const InnerActivations& inner, int thread,
                   const PrefetchHint& prefetch = {}, const float* row_scale = nullptr);

// All rows of a plain matrix, over all threads.
void gate_up(const Context& ctx, const GateUp& op, const ActivationRows& x, int64_t rows,
             const InnerActivations& inner);

}  // namespace millrace::cpu
