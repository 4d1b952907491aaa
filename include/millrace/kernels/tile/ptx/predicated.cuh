// Loads that happen or do not, without a branch.
#pragma once

namespace millrace::cuda::ptx {

// value = *from where `there`; else it stays.
__device__ inline void load_if(bool there, const float* from, float& value) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p ld.global.f32 %0, [%1];\n}"
               : "+f"(value)
               : "l"(from), "r"(static_cast<int>(there))
               : "memory");
}

}  // namespace millrace::cuda::ptx
