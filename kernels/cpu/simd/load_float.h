// Sixteen float32, float16 or bfloat16 as sixteen floats: how kernels that are templates over the stored type
// read it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct LoadF32 {
  using Stored = float;
  static V16 load(const float* p) { return Simd::load(p); }
};
struct LoadF16 {
  using Stored = uint16_t;
  static V16 load(const uint16_t* p) { return Simd::load_f16(p); }
};
struct LoadBF16 {
  using Stored = uint16_t;
  static V16 load(const uint16_t* p) { return Simd::load_bf16(p); }
};

// The last `count` < 16 elements, zeros behind.
template <class Load>
V16 load_tail(const typename Load::Stored* p, int64_t count) {
  typename Load::Stored padded[kLanes] = {};
  __builtin_memcpy(padded, p, static_cast<size_t>(count) * sizeof(typename Load::Stored));
  return Load::load(padded);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
