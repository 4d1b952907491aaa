// wgmma.mma_async of 64 x N outputs (N = 64, 96, 128, 160, 192, 256), both operands in shared memory, for the
// element types of plain matrices: bf16, f16 (K = 16, either operand K-major or MN-major), e4m3 (K = 32,
// K-major) with float32 sums, and s8 (K = 32, K-major) with int32 sums. Layouts and descriptors are
// wgmma.cuh's: 128-byte swizzle.
#pragma once

#include "millrace/kernels/tile/ptx/wgmma.cuh"

namespace millrace::cuda::ptx {

struct WgmmaBf16 {
  using Sum = float;
  static constexpr int kElementBytes = 2;
};
struct WgmmaF16 : WgmmaBf16 {};
struct WgmmaE4m3 {
  using Sum = float;
  static constexpr int kElementBytes = 1;
};
struct WgmmaS8 {
  using Sum = int32_t;
  static constexpr int kElementBytes = 1;
};

#ifdef MILLRACE_HAS_WGMMA

// d [N / 2] of a lane (+)= a b over 32 bytes of K. kMnA, kMnB: the operand is MN-major.
template <class Element, int kN, bool kMnA, bool kMnB>
struct DenseWgmma;

// clang-format off
#define MR_D_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define MR_D_16(c, i) MR_D_4(c, i), MR_D_4(c, i + 4), MR_D_4(c, i + 8), MR_D_4(c, i + 12)
#define MR_D_32(c) MR_D_16(c, 0), MR_D_16(c, 16)
#define MR_D_48(c) MR_D_32(c), MR_D_16(c, 32)
#define MR_D_64(c) MR_D_32(c), MR_D_16(c, 32), MR_D_16(c, 48)
#define MR_D_80(c) MR_D_64(c), MR_D_16(c, 64)
#define MR_D_96(c) MR_D_64(c), MR_D_16(c, 64), MR_D_16(c, 80)
#define MR_D_128(c) MR_D_64(c), MR_D_16(c, 64), MR_D_16(c, 80), MR_D_16(c, 96), MR_D_16(c, 112)
#define MR_T_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MR_T_48 MR_T_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define MR_T_64 MR_T_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MR_T_80 MR_T_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define MR_T_96 MR_T_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define MR_T_128 MR_T_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MR_FLOAT(x) "+f"(x)
#define MR_INT(x) "+r"(x)
// clang-format on

#define MR_DENSE_WGMMA(element, n, sums, shape, a, b, p, c, kinds, mn_a, mn_b)                             \
  template <>                                                                                              \
  struct DenseWgmma<element, n, mn_a, mn_b> {                                                              \
    __device__ static void multiply(element::Sum (&d)[sums], uint64_t first, uint64_t second, bool add) {  \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #p                                               \
                   ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n shape " {" MR_T_##sums "}, %" #a ", %" #b \
                                                                                        ", p" kinds ";\n}" \
                   : MR_D_##sums(c)                                                                        \
                   : "l"(first), "l"(second), "r"(static_cast<int32_t>(add)));                             \
    }                                                                                                      \
  };
#define MR_DENSE_WGMMA_16(element, name, n, sums, a, b, p)                                                   \
  MR_DENSE_WGMMA(element, n, sums, "k16.f32." name "." name, a, b, p, MR_FLOAT, ", 1, 1, 0, 0", false,       \
                 false)                                                                                      \
  MR_DENSE_WGMMA(element, n, sums, "k16.f32." name "." name, a, b, p, MR_FLOAT, ", 1, 1, 0, 1", false, true) \
  MR_DENSE_WGMMA(element, n, sums, "k16.f32." name "." name, a, b, p, MR_FLOAT, ", 1, 1, 1, 0", true, false) \
  MR_DENSE_WGMMA(element, n, sums, "k16.f32." name "." name, a, b, p, MR_FLOAT, ", 1, 1, 1, 1", true, true)
#define MR_DENSE_WGMMA_WIDTH(n, sums, a, b, p)                                                       \
  MR_DENSE_WGMMA_16(WgmmaBf16, "bf16", n, sums, a, b, p)                                             \
  MR_DENSE_WGMMA_16(WgmmaF16, "f16", n, sums, a, b, p)                                               \
  MR_DENSE_WGMMA(WgmmaE4m3, n, sums, "k32.f32.e4m3.e4m3", a, b, p, MR_FLOAT, ", 1, 1", false, false) \
  MR_DENSE_WGMMA(WgmmaS8, n, sums, "k32.s32.s8.s8", a, b, p, MR_INT, "", false, false)

MR_DENSE_WGMMA_WIDTH(64, 32, 32, 33, 34)
MR_DENSE_WGMMA_WIDTH(96, 48, 48, 49, 50)
MR_DENSE_WGMMA_WIDTH(128, 64, 64, 65, 66)
MR_DENSE_WGMMA_WIDTH(160, 80, 80, 81, 82)
MR_DENSE_WGMMA_WIDTH(192, 96, 96, 97, 98)
MR_DENSE_WGMMA_WIDTH(256, 128, 128, 129, 130)

#undef MR_DENSE_WGMMA_WIDTH
#undef MR_DENSE_WGMMA_16
#undef MR_DENSE_WGMMA
#undef MR_FLOAT
#undef MR_INT

template <int kCount>
__device__ inline void fence_registers(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda::ptx
