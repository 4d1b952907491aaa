// The warp product of e2m1 operands with block scales of sm_120a, m16n8k64; operands as quant/fp4_fragments.h
// has them. Elsewhere nothing here may be called.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define MILLRACE_HAS_FP4_MMA 1
#endif

namespace millrace::cuda::ptx {

#ifdef MILLRACE_HAS_FP4_MMA

#define MILLRACE_FP4_MMA(vector, type)                                                                    \
  asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::" vector                                    \
      ".m16n8k64.row.col.f32.e2m1.e2m1.f32." type                                                         \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, %12}, {%11}, {%12, " \
      "%12};"                                                                                             \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales), "r"(b_scales),   \
        "h"(static_cast<uint16_t>(0)))

// d += a b. kNvfp4: four e4m3 scales of 16 columns; else two e8m0 of 32.
template <bool kNvfp4>
__device__ inline void mma_fp4(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                               uint32_t a_scales, uint32_t b_scales) {
  if constexpr (kNvfp4) {
    MILLRACE_FP4_MMA("4X", "ue4m3");
  } else {
    MILLRACE_FP4_MMA("2X", "ue8m0");
  }
}

#undef MILLRACE_FP4_MMA

#endif  // MILLRACE_HAS_FP4_MMA

}  // namespace millrace::cuda::ptx
