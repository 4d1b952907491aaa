// Q4_K, Q5_K and Q6_K weights with four rows interleaved, for gemv_interleaved_neon.h. An interleaved block
// is a block of each of four rows, in as many bytes; 4 x 4 below are four bytes of each of four rows.
//   Q4_K  d[4], dmin[4]; the three words of scales, [3][4]; codes, [4 pairs of runs][8] 4 x 4
//   Q5_K  the same with the fifth bits before the codes, [8] 4 x 4
//   Q6_K  low bits, [2 halves][2][8] 4 x 4; high bits, [2 halves][8] 4 x 4; scales, [16][4]; d[4]
#pragma once

#include <cstdint>
#include <cstring>

namespace millrace::cpu {

// `bytes` of each of four rows, in fours.
inline uint8_t* pack_fours(const uint8_t* const* rows, int64_t from, int64_t bytes, uint8_t* to) {
  for (int64_t i = from; i < from + bytes; i += 4) {
    for (int r = 0; r < 4; ++r, to += 4) std::memcpy(to, rows[r] + i, 4);
  }
  return to;
}

inline void interleave_block_q4_k(const uint8_t* const* rows, uint8_t* to) {
  for (int part = 0; part < 2; ++part) {
    for (int r = 0; r < 4; ++r, to += 2) std::memcpy(to, rows[r] + 2 * part, 2);
  }
  pack_fours(rows, 4, 140, to);
}

inline void interleave_block_q5_k(const uint8_t* const* rows, uint8_t* to) {
  for (int part = 0; part < 2; ++part) {
    for (int r = 0; r < 4; ++r, to += 2) std::memcpy(to, rows[r] + 2 * part, 2);
  }
  pack_fours(rows, 4, 172, to);
}

inline void interleave_block_q6_k(const uint8_t* const* rows, uint8_t* to) {
  to = pack_fours(rows, 0, 192, to);
  for (int i = 0; i < 16; ++i) {
    for (int r = 0; r < 4; ++r) *to++ = rows[r][192 + i];
  }
  for (int r = 0; r < 4; ++r, to += 2) std::memcpy(to, rows[r] + 208, 2);
}

}  // namespace millrace::cpu
