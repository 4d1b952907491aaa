// RWKV 7's recurrence and token shift, plainly: a token and a head at a time, in double. The tokens of a
// block are replayed from the state before it.
#pragma once

#include <cstdint>

#include "base/state_block.h"

namespace millrace::reference {

struct TimeMix {
  StateShape shape;
  bool first = false;
  const float *k_k = nullptr, *k_a = nullptr, *r_k = nullptr;  // [keys]
  const float *norm = nullptr, *norm_bias = nullptr;           // [values]
  float norm_eps = 0.0f;
  float* pool = nullptr;
  int64_t block_floats = 0, layer_offset = 0;
};

// What products give of one token, each [keys]; of the first layer there is no `mixed`, and first_values is
// written.
struct TimeMixToken {
  const float *r, *k, *v, *decay, *rate, *mixed, *gate;
  float* first_values;
  float* out;  // [values]
};

// One token. Those before it are in the pool, and it is written there.
void time_mix(const TimeMix& op, const int32_t* table, int32_t position, const TimeMixToken& token);

// Keeps `normed` of a token, [keys], at place 0 (time mix) or 1 (channel mix) of the pool; to = normed +
// (that of the token before - normed) by, for `count` vectors by, [count][keys].
void token_shift(const TimeMix& op, const int32_t* table, int32_t position, int place, const float* normed,
                 const float* by, int64_t count, float* to);

}  // namespace millrace::reference
