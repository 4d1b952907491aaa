// Four floats at a time through the compilers' vector extension (GCC and Clang alike, no intrinsics): each
// lane computes exactly what the scalar code would, so results do not depend on the machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace millrace::vec4 {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef double D4 __attribute__((vector_size(32)));

inline constexpr size_t kWidth = 4;

inline F4 load(const float* from) {
  F4 v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
inline void store(float* to, F4 v) { std::memcpy(to, &v, sizeof(v)); }
inline F4 splat(float x) { return F4{x, x, x, x}; }
inline I4 splat(int32_t x) { return I4{x, x, x, x}; }

inline I4 bits(F4 v) { return reinterpret_cast<I4>(v); }
inline F4 floats(I4 v) { return reinterpret_cast<F4>(v); }

// mask lanes are all ones or all zeros, as comparisons give them.
inline I4 choose(I4 mask, I4 yes, I4 no) { return (mask & yes) | (~mask & no); }
inline F4 choose(I4 mask, F4 yes, F4 no) { return floats(choose(mask, bits(yes), bits(no))); }

}  // namespace millrace::vec4
