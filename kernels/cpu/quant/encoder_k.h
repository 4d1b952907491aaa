// What encoder.cpp, encoder_k.cpp and encoder_levels.cpp share: stored scales, and the weights of a run of
// blocks.
#pragma once

#include <algorithm>

#include "base/float_bits.h"
#include "kernels/cpu/quant/float4.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant {

// An f16 scale. What f16 cannot hold saturates, so that a stored scale is always finite.
inline uint16_t stored_half(float d) { return to_half(std::clamp(d, -65504.0f, 65504.0f)).bits; }
inline float half_value(uint16_t bits) { return to_float(Half{bits}); }

// A run of blocks of `count` values and the importance of their columns (absent: all alike).
struct BlockRun {
  const float* x;
  const float* importance;
};

// Two bits of element e, the mirror of pair_code.
inline void put_pair(uint8_t* q, int e, unsigned code) {
  uint8_t& byte = q[e / 128 * 32 + e % 32];
  byte = static_cast<uint8_t>(byte | (code & 3u) << (e / 32 % 4 * 2));
}

void encode_q2_k(const BlockRun& run, BlockQ2_K& out);
void encode_q4_k(const BlockRun& run, BlockQ4_K& out);
void encode_q5_k(const BlockRun& run, BlockQ5_K& out);
void encode_q6_k(const BlockRun& run, BlockQ6_K& out);

}  // namespace millrace::quant
