// RWKV 7's layers over a ragged batch, without their products: the token shift of both mixes, and the time
// mix between its products and the output matrix: gates, keys, the chunks of every sequence and head, the
// norm of each head, the bonus of a token's own value.
#pragma once

#include "base/state_block.h"
#include "kernels/cpu/attention/attention_plan.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/state/state_mix.h"

namespace millrace::cpu {

// A step's rows, and where what is kept of them lies.
struct ShiftedRows {
  StateShape shape;  // of which wkv7; keys() columns are the residual stream's
  int64_t rows;
  const AttentionSequence* sequences;  // [num_sequences]
  int64_t num_sequences;
  const int32_t* const* tables;  // [num_sequences]: the group's block tables
  float* pool;
  int64_t block_floats, layer_offset;  // of a block of the group; of this layer in it
};

// What a step writes besides the pool, and what each thread has for itself. Null where a shape has no wkv7.
struct TimeMixWorkspace {
  TimeMixWorkspace() = default;
  TimeMixWorkspace(const StateShape& shape, int64_t tokens, int threads, Arena& arena);

  float* normed = nullptr;  // [tokens][keys]: what is shifted
  // [tokens][keys]: what products give, and what becomes of it; of each layer but the first values.
  float *r = nullptr, *k = nullptr, *v = nullptr, *decay = nullptr, *rate = nullptr, *mixed = nullptr,
        *gate = nullptr, *first_values = nullptr;
  float* low = nullptr;          // [tokens][projected]: products of low rank
  StatePiece* pieces = nullptr;  // [tokens]
  struct Thread {
    float *state, *values, *written, *outputs;  // [key_dim], three times [16]: [.][padded_dim]
    float* scratch;                             // wkv7_scratch_floats
  };
  Thread* threads = nullptr;  // [threads]
};

enum class ShiftPlace { kTimeMix = 0, kChannelMix = 1 };

// Keeps x, [rows][keys], for the step behind this one.
void keep_shifted(const Context& ctx, const ShiftedRows& op, ShiftPlace place, const float* x,
                  const TimeMixWorkspace& work);
// to = x + (x of the token before - x) by, by: [keys]; zeros before the first token.
void token_shift(const Context& ctx, const ShiftedRows& op, ShiftPlace place, const float* x, const float* by,
                 float* to, const TimeMixWorkspace& work);

// x = tanh(x), x = sigmoid(x), over all threads.
void tanh_all(const Context& ctx, float* x, int64_t size);
void sigmoid_all(const Context& ctx, float* x, int64_t size);

// work's r, k, v, decay, rate, mixed (not of the first layer) and gate are products as they are.
struct TimeMixRows {
  ShiftedRows of;
  bool first;                     // its values are kept as first_values; else they are mixed in
  const float *k_k, *k_a, *r_k;   // [keys]
  const float *norm, *norm_bias;  // [values]
  float norm_eps;
  float* out;  // [rows][values]
};
void time_mix(const Context& ctx, const TimeMixRows& op, const TimeMixWorkspace& work);

}  // namespace millrace::cpu
