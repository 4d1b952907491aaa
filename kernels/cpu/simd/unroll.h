// unroll<n>(f): f(0), f(1) ... f(n - 1) with the index a constant. Compilers split an array of vectors into
// registers before they unroll loops, so a tile whose loops are written plainly lives in memory.
#pragma once

#include "kernels/cpu/simd/target.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <int kValue>
struct Index {
  constexpr operator int() const { return kValue; }  // NOLINT(google-explicit-constructor): it is an int
};

template <int kCount, class F>
[[gnu::always_inline]] inline void unroll(const F& f) {
  if constexpr (kCount > 0) {
    unroll<kCount - 1>(f);
    f(Index<kCount - 1>{});
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
