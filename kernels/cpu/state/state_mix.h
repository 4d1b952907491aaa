// A layer with a state over a ragged batch: the short convolution, what becomes of its keys, queries and
// gates, the chunks of every sequence and head, and the gated norm of what they give.
#pragma once

#include "base/state_block.h"
#include "kernels/cpu/attention/attention_plan.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/state/state_pieces.h"

namespace millrace::cpu {

// What a step writes besides the pool, and what each thread has for itself.
struct StateWorkspace {
  StateWorkspace() = default;
  StateWorkspace(const StateShape& shape, int64_t tokens, int threads, Arena& arena);

  float* convolved = nullptr;                 // [tokens][channels]
  float *decays = nullptr, *betas = nullptr;  // [tokens][steps], [tokens][value_heads]
  StatePiece* pieces = nullptr;               // [tokens]
  struct Thread {
    float *state, *writes, *values, *outputs;  // [key_dim], three times [16]: [.][padded_dim]
    float* scratch;                            // state_scratch_floats
  };
  Thread* threads = nullptr;  // [threads]
};

// kGatedDelta: queries and keys are normed to length 1 (1 / sqrt(sum of squares + 1e-6)), queries divided by
// sqrt(key_dim); log decay = a softplus(step + step_bias), of the head or of each of its state's rows, beta =
// sigmoid(beta); y = norm(o) silu(gate) or norm(o) sigmoid(gate), a norm of each head. kSelectiveScan
// (Mamba-2): step = clamp(softplus(step + step_bias)), log decay = a step, a value counts step times; y =
// norm((o + d v) silu(gate)), or the norm before the gate. kConvolution: y = gate * what is convolved.
struct StateMixRows {
  StateShape shape;
  enum class Kind { kGatedDelta, kSelectiveScan, kConvolution } kind;
  const float* mix;  // [rows][mix_cols]
  int64_t rows;
  const AttentionSequence* sequences;  // [num_sequences]
  int64_t num_sequences;
  const int32_t* const* tables;  // [num_sequences]: the group's block tables
  float* pool;
  int64_t block_floats, layer_offset;    // of a block of the group; of this layer in it
  const float *conv, *conv_bias;         // [channels][taps]; [channels], or null
  const float *conv_keys, *conv_values;  // [keys][taps], [values][taps]: then conv is [keys][taps]; or null
  bool conv_silu;
  const float *a, *step_bias, *d;  // [value_heads], [steps], [value_heads]; the last two may be null
  float step_min, step_max;
  const float* norm;  // [value_dim] of each head, or [values] of groups; null: no norm
  float norm_eps;
  int64_t norm_size;  // columns of a norm
  bool norm_before_gate, gate_sigmoid;
  float* out;  // [rows][values]
};

void state_mix(const Context& ctx, const StateMixRows& op, const StateWorkspace& work);

}  // namespace millrace::cpu
