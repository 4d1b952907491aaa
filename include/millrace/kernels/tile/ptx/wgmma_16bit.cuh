// wgmma.mma_async of f16 or bf16 (m64nNk16) with float32 sums, for the widths that
// attention over tensors uses: A in registers or shared memory, B in shared memory, either of those in shared
// memory K-major or MN-major. Descriptors are those of wgmma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "millrace/kernels/tile/ptx/wgmma.cuh"

#ifdef MILLRACE_HAS_WGMMA

namespace millrace::cuda::ptx {

// One width: d [N / 2] (+)= a b. Only those below exist.
template <int kN>
struct WarpgroupProduct;

// clang-format off
#define MILLRACE_WGMMA_TEXT_100 MILLRACE_WGMMA_TEXT_96 ", %96, %97, %98, %99"
#define MILLRACE_WGMMA_TEXT_104 MILLRACE_WGMMA_TEXT_100 ", %100, %101, %102, %103"
#define MILLRACE_WGMMA_TEXT_108 MILLRACE_WGMMA_TEXT_104 ", %104, %105, %106, %107"
#define MILLRACE_WGMMA_TEXT_112 MILLRACE_WGMMA_TEXT_108 ", %108, %109, %110, %111"
#define MILLRACE_WGMMA_TEXT_116 MILLRACE_WGMMA_TEXT_112 ", %112, %113, %114, %115"
#define MILLRACE_WGMMA_TEXT_120 MILLRACE_WGMMA_TEXT_116 ", %116, %117, %118, %119"
#define MILLRACE_WGMMA_TEXT_124 MILLRACE_WGMMA_TEXT_120 ", %120, %121, %122, %123"
#define MILLRACE_WGMMA_TEXT_128 MILLRACE_WGMMA_TEXT_124 ", %124, %125, %126, %127"
#define MILLRACE_WGMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MILLRACE_WGMMA_SUMS_100 MILLRACE_WGMMA_SUMS_96, MILLRACE_WGMMA_FOUR(96)
#define MILLRACE_WGMMA_SUMS_104 MILLRACE_WGMMA_SUMS_100, MILLRACE_WGMMA_FOUR(100)
#define MILLRACE_WGMMA_SUMS_108 MILLRACE_WGMMA_SUMS_104, MILLRACE_WGMMA_FOUR(104)
#define MILLRACE_WGMMA_SUMS_112 MILLRACE_WGMMA_SUMS_108, MILLRACE_WGMMA_FOUR(108)
#define MILLRACE_WGMMA_SUMS_116 MILLRACE_WGMMA_SUMS_112, MILLRACE_WGMMA_FOUR(112)
#define MILLRACE_WGMMA_SUMS_120 MILLRACE_WGMMA_SUMS_116, MILLRACE_WGMMA_FOUR(116)
#define MILLRACE_WGMMA_SUMS_124 MILLRACE_WGMMA_SUMS_120, MILLRACE_WGMMA_FOUR(120)
#define MILLRACE_WGMMA_SUMS_128 MILLRACE_WGMMA_SUMS_124, MILLRACE_WGMMA_FOUR(124)
// clang-format on

#define MILLRACE_WGMMA_TEXT(shape, types, sums, accumulate, a, b, transposed)         \
  "{\n .reg .pred p;\n setp.ne.b32 p, " accumulate                                    \
  ", 0;\n"                                                                            \
  "wgmma.mma_async.sync.aligned." shape ".f32." types " {" MILLRACE_WGMMA_TEXT_##sums \
      "}, " a ", " b ", p, 1, 1" transposed ";\n}"

// sums: N / 2, which is the number of the first operand behind the accumulators; o1, o2, ..: the next ones.
#define MILLRACE_WGMMA_REGISTERS(n, types, sums, o1, o2, o3, o4, o5, o6)                                    \
  asm volatile(MILLRACE_WGMMA_TEXT("m64n" #n "k16", types, sums, "%" #o5,                                   \
                                   "{%" #sums ", %" #o1 ", %" #o2 ", %" #o3 "}", "%" #o4, ", %" #o6)        \
               : MILLRACE_WGMMA_SUMS_##sums                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)), \
                 "n"(kTransposedB))
#define MILLRACE_WGMMA_SHARED(n, types, sums, o1, o2, o3, o4)                                             \
  asm volatile(                                                                                           \
      MILLRACE_WGMMA_TEXT("m64n" #n "k16", types, sums, "%" #o2, "%" #sums, "%" #o1, ", %" #o3 ", %" #o4) \
      : MILLRACE_WGMMA_SUMS_##sums                                                                        \
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)), "n"(kTransposedA), "n"(kTransposedB))

#define MILLRACE_WGMMA_WIDTH(n, sums, o1, o2, o3, o4, o5, o6)                                  \
  template <>                                                                                  \
  struct WarpgroupProduct<n> {                                                                 \
    template <class Element, int kTransposedB>                                                 \
    __device__ static void registers(float (&d)[sums], const uint32_t (&a)[4], uint64_t b,     \
                                     bool accumulate) {                                        \
      if constexpr (std::is_same_v<Element, __half>) {                                         \
        MILLRACE_WGMMA_REGISTERS(n, "f16.f16", sums, o1, o2, o3, o4, o5, o6);                  \
      } else {                                                                                 \
        MILLRACE_WGMMA_REGISTERS(n, "bf16.bf16", sums, o1, o2, o3, o4, o5, o6);                \
      }                                                                                        \
    }                                                                                          \
    template <class Element, int kTransposedA, int kTransposedB>                               \
    __device__ static void shared(float (&d)[sums], uint64_t a, uint64_t b, bool accumulate) { \
      if constexpr (std::is_same_v<Element, __half>) {                                         \
        MILLRACE_WGMMA_SHARED(n, "f16.f16", sums, o1, o2, o3, o4);                             \
      } else {                                                                                 \
        MILLRACE_WGMMA_SHARED(n, "bf16.bf16", sums, o1, o2, o3, o4);                           \
      }                                                                                        \
    }                                                                                          \
  };

MILLRACE_WGMMA_WIDTH(64, 32, 33, 34, 35, 36, 37, 38)
MILLRACE_WGMMA_WIDTH(80, 40, 41, 42, 43, 44, 45, 46)
MILLRACE_WGMMA_WIDTH(96, 48, 49, 50, 51, 52, 53, 54)
MILLRACE_WGMMA_WIDTH(112, 56, 57, 58, 59, 60, 61, 62)
MILLRACE_WGMMA_WIDTH(128, 64, 65, 66, 67, 68, 69, 70)
MILLRACE_WGMMA_WIDTH(144, 72, 73, 74, 75, 76, 77, 78)
MILLRACE_WGMMA_WIDTH(160, 80, 81, 82, 83, 84, 85, 86)
MILLRACE_WGMMA_WIDTH(176, 88, 89, 90, 91, 92, 93, 94)
MILLRACE_WGMMA_WIDTH(192, 96, 97, 98, 99, 100, 101, 102)
MILLRACE_WGMMA_WIDTH(256, 128, 129, 130, 131, 132, 133, 134)

#undef MILLRACE_WGMMA_WIDTH
#undef MILLRACE_WGMMA_SHARED
#undef MILLRACE_WGMMA_REGISTERS
#undef MILLRACE_WGMMA_TEXT
#undef MILLRACE_WGMMA_FOUR

// d (+)= a b of a warpgroup: 64 x 2 kSums outputs, 16 elements of K. a: a lane's fragment as of ptx/mma.cuh's
// m16n8k16, of the warp's 16 rows; it may not change before the product is done. kTransposedB 1: b is
// MN-major.
template <class Element, int kTransposedB, int kSums>
__device__ inline void wgmma_16bit(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  WarpgroupProduct<2 * kSums>::template registers<Element, kTransposedB>(d, a, b, accumulate);
}
// The same with a in shared memory too. kTransposedA 1: a is MN-major.
template <class Element, int kTransposedA, int kTransposedB, int kSums>
__device__ inline void wgmma_16bit(float (&d)[kSums], uint64_t a, uint64_t b, bool accumulate) {
  WarpgroupProduct<2 * kSums>::template shared<Element, kTransposedA, kTransposedB>(d, a, b, accumulate);
}

}  // namespace millrace::cuda::ptx

#endif  // MILLRACE_HAS_WGMMA
