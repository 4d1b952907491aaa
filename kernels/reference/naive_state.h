// Layers with a state, plainly: a token and a head at a time, in double. The tokens of a block are replayed
// from the state before it.
#pragma once

#include <cstdint>

#include "base/state_block.h"

namespace millrace::reference {

struct StateMix {
  StateShape shape;
  enum class Kind { kGatedDelta, kSelectiveScan, kConvolution } kind = Kind::kGatedDelta;
  const float *conv = nullptr, *conv_bias = nullptr;         // [channels][taps]; [channels], or absent
  const float *conv_keys = nullptr, *conv_values = nullptr;  // of their own, or absent: `conv` has all
  bool conv_silu = true;
  const float *a = nullptr, *step_bias = nullptr, *d = nullptr;  // [value_heads]; the last two may be absent
  float step_min = 0.0f, step_max = 0.0f;
  const float* norm = nullptr;  // [value_dim] of each head, or [values] of groups
  float norm_eps = 0.0f;
  int64_t norm_size = 0;
  bool norm_before_gate = true, gate_sigmoid = false;
  float* pool = nullptr;
  int64_t block_floats = 0, layer_offset = 0;
};

// One token: mix: [mix_cols], out: [values]. Those before it are in the pool, and it is written there.
void state_mix(const StateMix& op, const int32_t* table, int32_t position, const float* mix, float* out);

}  // namespace millrace::reference
