// Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw ("Parallel random numbers: as
// easy as 1, 2, 3", 2011): ten rounds of two multiplications over a counter of four words, with a key of two.
// Plain integer arithmetic, the same bits on every device.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define MILLRACE_PHILOX_FUNCTION __host__ __device__ inline
#else
#define MILLRACE_PHILOX_FUNCTION inline
#endif

namespace millrace::philox {

inline constexpr int kRounds = 10;
inline constexpr uint32_t kMultiply0 = 0xd2511f53u, kMultiply1 = 0xcd9e8d57u;
inline constexpr uint32_t kWeyl0 = 0x9e3779b9u, kWeyl1 = 0xbb67ae85u;  // what the key grows by each round

struct Words {
  uint32_t w[4];
};
struct Keys {
  uint32_t first[kRounds], second[kRounds];
};

MILLRACE_PHILOX_FUNCTION Keys keys_of(uint64_t seed) {
  Keys keys{};
  for (int round = 0; round < kRounds; ++round) {
    keys.first[round] = static_cast<uint32_t>(seed) + static_cast<uint32_t>(round) * kWeyl0;
    keys.second[round] = static_cast<uint32_t>(seed >> 32) + static_cast<uint32_t>(round) * kWeyl1;
  }
  return keys;
}

MILLRACE_PHILOX_FUNCTION Words generate(Words c, const Keys& keys) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = static_cast<uint64_t>(kMultiply0) * c.w[0],
                   b = static_cast<uint64_t>(kMultiply1) * c.w[2];
    c = {{static_cast<uint32_t>(b >> 32) ^ c.w[1] ^ keys.first[round], static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.w[3] ^ keys.second[round], static_cast<uint32_t>(a)}};
  }
  return c;
}

// Dropout with 0 <= p < 1: a word below this is dropped; what is kept is multiplied by 1 / (1 - p).
MILLRACE_PHILOX_FUNCTION uint32_t drop_below(float p) {
  return static_cast<uint32_t>(static_cast<double>(p) * 4294967296.0);
}
MILLRACE_PHILOX_FUNCTION float keep_scale(float p) {
  return static_cast<float>(1.0 / (1.0 - static_cast<double>(p)));
}

}  // namespace millrace::philox
#undef MILLRACE_PHILOX_FUNCTION
