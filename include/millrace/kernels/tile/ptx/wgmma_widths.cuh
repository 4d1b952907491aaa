// wgmma.mma_async.m64nNk16 of bf16 for every N: the instruction is written once per kind of operand, the
// lists of its N / 2 accumulator registers grow four at a time, and a row of the last list makes one width.
// wgmma.cuh is what kernels call.
#pragma once

#include "millrace/kernels/tile/ptx/barrier.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MILLRACE_HAS_WGMMA 1
#endif

#ifdef MILLRACE_HAS_WGMMA

namespace millrace::cuda::ptx {

// One width: d [N / 2] (+)= a b. Only those below exist.
template <int kN>
struct Wgmma;

// clang-format off
// The accumulators as the instruction names them, and as asm binds them.
#define MILLRACE_WGMMA_TEXT_4 "%0, %1, %2, %3"
#define MILLRACE_WGMMA_TEXT_8 MILLRACE_WGMMA_TEXT_4 ", %4, %5, %6, %7"
#define MILLRACE_WGMMA_TEXT_12 MILLRACE_WGMMA_TEXT_8 ", %8, %9, %10, %11"
#define MILLRACE_WGMMA_TEXT_16 MILLRACE_WGMMA_TEXT_12 ", %12, %13, %14, %15"
#define MILLRACE_WGMMA_TEXT_20 MILLRACE_WGMMA_TEXT_16 ", %16, %17, %18, %19"
#define MILLRACE_WGMMA_TEXT_24 MILLRACE_WGMMA_TEXT_20 ", %20, %21, %22, %23"
#define MILLRACE_WGMMA_TEXT_28 MILLRACE_WGMMA_TEXT_24 ", %24, %25, %26, %27"
#define MILLRACE_WGMMA_TEXT_32 MILLRACE_WGMMA_TEXT_28 ", %28, %29, %30, %31"
#define MILLRACE_WGMMA_TEXT_36 MILLRACE_WGMMA_TEXT_32 ", %32, %33, %34, %35"
#define MILLRACE_WGMMA_TEXT_40 MILLRACE_WGMMA_TEXT_36 ", %36, %37, %38, %39"
#define MILLRACE_WGMMA_TEXT_44 MILLRACE_WGMMA_TEXT_40 ", %40, %41, %42, %43"
#define MILLRACE_WGMMA_TEXT_48 MILLRACE_WGMMA_TEXT_44 ", %44, %45, %46, %47"
#define MILLRACE_WGMMA_TEXT_52 MILLRACE_WGMMA_TEXT_48 ", %48, %49, %50, %51"
#define MILLRACE_WGMMA_TEXT_56 MILLRACE_WGMMA_TEXT_52 ", %52, %53, %54, %55"
#define MILLRACE_WGMMA_TEXT_60 MILLRACE_WGMMA_TEXT_56 ", %56, %57, %58, %59"
#define MILLRACE_WGMMA_TEXT_64 MILLRACE_WGMMA_TEXT_60 ", %60, %61, %62, %63"
#define MILLRACE_WGMMA_TEXT_68 MILLRACE_WGMMA_TEXT_64 ", %64, %65, %66, %67"
#define MILLRACE_WGMMA_TEXT_72 MILLRACE_WGMMA_TEXT_68 ", %68, %69, %70, %71"
#define MILLRACE_WGMMA_TEXT_76 MILLRACE_WGMMA_TEXT_72 ", %72, %73, %74, %75"
#define MILLRACE_WGMMA_TEXT_80 MILLRACE_WGMMA_TEXT_76 ", %76, %77, %78, %79"
#define MILLRACE_WGMMA_TEXT_84 MILLRACE_WGMMA_TEXT_80 ", %80, %81, %82, %83"
#define MILLRACE_WGMMA_TEXT_88 MILLRACE_WGMMA_TEXT_84 ", %84, %85, %86, %87"
#define MILLRACE_WGMMA_TEXT_92 MILLRACE_WGMMA_TEXT_88 ", %88, %89, %90, %91"
#define MILLRACE_WGMMA_TEXT_96 MILLRACE_WGMMA_TEXT_92 ", %92, %93, %94, %95"
#define MILLRACE_WGMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MILLRACE_WGMMA_SUMS_4 MILLRACE_WGMMA_FOUR(0)
#define MILLRACE_WGMMA_SUMS_8 MILLRACE_WGMMA_SUMS_4, MILLRACE_WGMMA_FOUR(4)
#define MILLRACE_WGMMA_SUMS_12 MILLRACE_WGMMA_SUMS_8, MILLRACE_WGMMA_FOUR(8)
#define MILLRACE_WGMMA_SUMS_16 MILLRACE_WGMMA_SUMS_12, MILLRACE_WGMMA_FOUR(12)
#define MILLRACE_WGMMA_SUMS_20 MILLRACE_WGMMA_SUMS_16, MILLRACE_WGMMA_FOUR(16)
#define MILLRACE_WGMMA_SUMS_24 MILLRACE_WGMMA_SUMS_20, MILLRACE_WGMMA_FOUR(20)
#define MILLRACE_WGMMA_SUMS_28 MILLRACE_WGMMA_SUMS_24, MILLRACE_WGMMA_FOUR(24)
#define MILLRACE_WGMMA_SUMS_32 MILLRACE_WGMMA_SUMS_28, MILLRACE_WGMMA_FOUR(28)
#define MILLRACE_WGMMA_SUMS_36 MILLRACE_WGMMA_SUMS_32, MILLRACE_WGMMA_FOUR(32)
#define MILLRACE_WGMMA_SUMS_40 MILLRACE_WGMMA_SUMS_36, MILLRACE_WGMMA_FOUR(36)
#define MILLRACE_WGMMA_SUMS_44 MILLRACE_WGMMA_SUMS_40, MILLRACE_WGMMA_FOUR(40)
#define MILLRACE_WGMMA_SUMS_48 MILLRACE_WGMMA_SUMS_44, MILLRACE_WGMMA_FOUR(44)
#define MILLRACE_WGMMA_SUMS_52 MILLRACE_WGMMA_SUMS_48, MILLRACE_WGMMA_FOUR(48)
#define MILLRACE_WGMMA_SUMS_56 MILLRACE_WGMMA_SUMS_52, MILLRACE_WGMMA_FOUR(52)
#define MILLRACE_WGMMA_SUMS_60 MILLRACE_WGMMA_SUMS_56, MILLRACE_WGMMA_FOUR(56)
#define MILLRACE_WGMMA_SUMS_64 MILLRACE_WGMMA_SUMS_60, MILLRACE_WGMMA_FOUR(60)
#define MILLRACE_WGMMA_SUMS_68 MILLRACE_WGMMA_SUMS_64, MILLRACE_WGMMA_FOUR(64)
#define MILLRACE_WGMMA_SUMS_72 MILLRACE_WGMMA_SUMS_68, MILLRACE_WGMMA_FOUR(68)
#define MILLRACE_WGMMA_SUMS_76 MILLRACE_WGMMA_SUMS_72, MILLRACE_WGMMA_FOUR(72)
#define MILLRACE_WGMMA_SUMS_80 MILLRACE_WGMMA_SUMS_76, MILLRACE_WGMMA_FOUR(76)
#define MILLRACE_WGMMA_SUMS_84 MILLRACE_WGMMA_SUMS_80, MILLRACE_WGMMA_FOUR(80)
#define MILLRACE_WGMMA_SUMS_88 MILLRACE_WGMMA_SUMS_84, MILLRACE_WGMMA_FOUR(84)
#define MILLRACE_WGMMA_SUMS_92 MILLRACE_WGMMA_SUMS_88, MILLRACE_WGMMA_FOUR(88)
#define MILLRACE_WGMMA_SUMS_96 MILLRACE_WGMMA_SUMS_92, MILLRACE_WGMMA_FOUR(92)
// clang-format on

// accumulate: text of the operand that says whether d counts; a: operand or list; kinds: of transposed
// operands.
#define MILLRACE_WGMMA_TEXT(n, sums, accumulate, a, b, transposed)                        \
  "{\n .reg .pred p;\n setp.ne.b32 p, " accumulate                                        \
  ", 0;\n"                                                                                \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" MILLRACE_WGMMA_TEXT_##sums \
      "}, " a ", " b ", p, 1, 1, " transposed ";\n}"

// sums: N / 2, which is the number of the first operand behind the accumulators; o1, o2, ..: the next ones.
#define MILLRACE_WGMMA_WIDTH(n, sums, o1, o2, o3, o4, o5)                                                   \
  template <>                                                                                               \
  struct Wgmma<n> {                                                                                         \
    __device__ static void registers_shared(float (&d)[sums], const uint32_t (&a)[4], uint64_t b,           \
                                            bool accumulate) {                                              \
      asm volatile(                                                                                         \
          MILLRACE_WGMMA_TEXT(n, sums, "%" #o5, "{%" #sums ", %" #o1 ", %" #o2 ", %" #o3 "}", "%" #o4, "0") \
          : MILLRACE_WGMMA_SUMS_##sums                                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)));     \
    }                                                                                                       \
    __device__ static void shared_shared(float (&d)[sums], uint64_t a, uint64_t b, bool accumulate) {       \
      asm volatile(MILLRACE_WGMMA_TEXT(n, sums, "%" #o2, "%" #sums, "%" #o1, "0, 0")                        \
                   : MILLRACE_WGMMA_SUMS_##sums                                                             \
                   : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));                                \
    }                                                                                                       \
    __device__ static void registers_transposed(float (&d)[sums], const uint32_t (&a)[4], uint64_t b) {     \
      asm volatile(                                                                                         \
          MILLRACE_WGMMA_TEXT(n, sums, "1", "{%" #sums ", %" #o1 ", %" #o2 ", %" #o3 "}", "%" #o4, "1")     \
          : MILLRACE_WGMMA_SUMS_##sums                                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }                                                                                                       \
  };

MILLRACE_WGMMA_WIDTH(8, 4, 5, 6, 7, 8, 9)
MILLRACE_WGMMA_WIDTH(16, 8, 9, 10, 11, 12, 13)
MILLRACE_WGMMA_WIDTH(24, 12, 13, 14, 15, 16, 17)
MILLRACE_WGMMA_WIDTH(32, 16, 17, 18, 19, 20, 21)
MILLRACE_WGMMA_WIDTH(40, 20, 21, 22, 23, 24, 25)
MILLRACE_WGMMA_WIDTH(48, 24, 25, 26, 27, 28, 29)
MILLRACE_WGMMA_WIDTH(56, 28, 29, 30, 31, 32, 33)
MILLRACE_WGMMA_WIDTH(64, 32, 33, 34, 35, 36, 37)
MILLRACE_WGMMA_WIDTH(72, 36, 37, 38, 39, 40, 41)
MILLRACE_WGMMA_WIDTH(80, 40, 41, 42, 43, 44, 45)
MILLRACE_WGMMA_WIDTH(88, 44, 45, 46, 47, 48, 49)
MILLRACE_WGMMA_WIDTH(96, 48, 49, 50, 51, 52, 53)
MILLRACE_WGMMA_WIDTH(104, 52, 53, 54, 55, 56, 57)
MILLRACE_WGMMA_WIDTH(112, 56, 57, 58, 59, 60, 61)
MILLRACE_WGMMA_WIDTH(120, 60, 61, 62, 63, 64, 65)
MILLRACE_WGMMA_WIDTH(128, 64, 65, 66, 67, 68, 69)
MILLRACE_WGMMA_WIDTH(136, 68, 69, 70, 71, 72, 73)
MILLRACE_WGMMA_WIDTH(144, 72, 73, 74, 75, 76, 77)
MILLRACE_WGMMA_WIDTH(152, 76, 77, 78, 79, 80, 81)
MILLRACE_WGMMA_WIDTH(160, 80, 81, 82, 83, 84, 85)
MILLRACE_WGMMA_WIDTH(168, 84, 85, 86, 87, 88, 89)
MILLRACE_WGMMA_WIDTH(176, 88, 89, 90, 91, 92, 93)
MILLRACE_WGMMA_WIDTH(184, 92, 93, 94, 95, 96, 97)
MILLRACE_WGMMA_WIDTH(192, 96, 97, 98, 99, 100, 101)

#undef MILLRACE_WGMMA_WIDTH
#undef MILLRACE_WGMMA_TEXT
#undef MILLRACE_WGMMA_FOUR

}  // namespace millrace::cuda::ptx

#endif  // MILLRACE_HAS_WGMMA
