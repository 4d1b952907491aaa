// Rotary position embedding. Scalings (llama3, YaRN) are a choice of inv_freq and magnitude.
#pragma once

#include <cstdint>
#include <span>

#include "base/query_growth.h"
#include "kernels/cpu/context.h"

namespace millrace::cpu {

struct Rotary {
  std::span<const float> inv_freq;  // [rotary dims / 2]: angle per position of each pair
  float magnitude = 1.0f;           // multiplies cosine and sine
  bool interleaved = false;         // pairs (2i, 2i + 1); else (i, i + rotary dims / 2)
};

// factors[row]: what a query at that position is multiplied with, in double. By the calling thread.
void query_growth(const QueryGrowth& growth, const int32_t* positions, int64_t rows, float* factors);

// cosines, sines: [rows][inv_freq.size()]
void rotary_angles(const Context& ctx, const Rotary& rotary, const int32_t* positions, int64_t rows,
                   float* cosines, float* sines);

// The same by three positions of each row, [rows][3]: axes [inv_freq.size()] says which of them turns a pair;
// empty: the first.
void rotary_angles_on_axes(const Context& ctx, const Rotary& rotary, std::span<const uint8_t> axes,
                           const int32_t* positions, int64_t rows, float* cosines, float* sines);

// Rotates one head in place. cosines, sines: [half] of its position. By the calling thread.
void rotate(float* x, const float* cosines, const float* sines, int64_t half, bool interleaved);

// Rotates x [rows][heads][head_dim], rows `stride` apart, in place.
void rotary_rows(const Context& ctx, const Rotary& rotary, const int32_t* positions, int64_t rows,
                 int64_t heads, int64_t head_dim, float* x, int64_t stride);

}  // namespace millrace::cpu
