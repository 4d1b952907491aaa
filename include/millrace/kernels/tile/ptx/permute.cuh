// Words in registers: a byte permutation (a table of eight bytes looked up four times in one instruction),
// and a value that the compiler is to keep rather than compute again.
#pragma once

#include <cstdint>

namespace millrace::cuda::ptx {

// Byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes {low, high}; with bit 3 of that
// selector nibble set, its top bit eight times over.
__device__ inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

// The compiler no longer knows how this came about, so that it stays in its register.
__device__ inline void keep_in_register(uint32_t& value) { asm volatile("" : "+r"(value)); }

}  // namespace millrace::cuda::ptx
