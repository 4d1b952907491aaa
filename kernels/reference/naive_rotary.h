// Rotary position embedding, plainly.
#pragma once

#include <cstdint>
#include <span>

#include "base/query_growth.h"

namespace millrace::reference {

struct Rotary {
  std::span<const float> inv_freq;  // [rotary dims / 2]: angle per position of each pair
  float magnitude = 1.0f;           // multiplies cosine and sine
  bool interleaved = false;         // pairs (2i, 2i + 1); else (i, i + rotary dims / 2)
};

double growth_at(const QueryGrowth& growth, int32_t position);
void grow_query(const QueryGrowth& growth, int32_t position, int64_t size, float* q);

// One head at one position, in place.
void rotate(const Rotary& rotary, int32_t position, float* x);
// The same at three positions: axes [inv_freq.size()] says which of them turns a pair; empty: the first.
void rotate_on_axes(const Rotary& rotary, std::span<const uint8_t> axes, const int32_t* positions, float* x);

}  // namespace millrace::reference
