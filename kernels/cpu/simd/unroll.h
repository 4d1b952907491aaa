// unroll<n>(f): f(0), f(1) ... f(n - 1) with the index a constant. Compilers split an array of vectors into
// registers before they unroll loops, so a tile whose loops are written plainly lives in memory. Where that
// does not matter it is a loop, which compiles in half the time: in plain C++, which has no such registers,
// and in tables that a build has for tests alone (MILLRACE_LOOPS). What needs its index as a constant
// everywhere says so (unroll_constants).
#pragma once

#include "kernels/cpu/simd/target.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <int kValue>
struct Index {
  constexpr operator int() const { return kValue; }  // NOLINT(google-explicit-constructor): it is an int
};

template <int kCount, class F>
[[gnu::always_inline]] inline void unroll_constants(const F& f) {
  if constexpr (kCount > 0) {
    unroll_constants<kCount - 1>(f);
    f(Index<kCount - 1>{});
  }
}

template <int kCount, class F>
[[gnu::always_inline]] inline void unroll(const F& f) {
#if defined(MILLRACE_SIMD_SCALAR) || defined(MILLRACE_LOOPS)
  for (int i = 0; i < kCount; ++i) f(i);
#else
  unroll_constants<kCount>(f);
#endif
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
