// Reading memory and doing nothing else: the loop whose speed is the limit that decoding is held against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace millrace {

// The sum of all words, so that they must be read. `bytes` is a multiple of 64. With `ahead` it is
// prefetched: where one core keeps too few plain loads under way, that finds a higher limit. Measure both,
// take the better.
inline uint64_t sum_words(const std::byte* data, int64_t bytes, bool ahead) {
  constexpr int64_t kAhead = 16 << 10;
  uint64_t sums[8] = {}, words[8];
  for (int64_t at = 0; at < bytes; at += 64) {
    if (ahead) __builtin_prefetch(data + at + kAhead, 0, 2);  // past the end now and then: it cannot fault
    std::memcpy(words, data + at, 64);
    for (int i = 0; i < 8; ++i) sums[i] += words[i];
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  return sum;
}

}  // namespace millrace
