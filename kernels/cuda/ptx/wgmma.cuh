// Matrix products of a warpgroup (sm_90a): operands in shared memory, sums in registers, asynchronous.
// Operands are rows of 128 bytes (64 f16 or bf16), their 16-byte chunks exchanged by chunk ^ (row % 8), eight
// rows after the other: the 128-byte swizzle, columns innermost. Lane (g, t) of warp w holds in d[4j..4j+3]
// row 16w + g columns 8j + 2t and + 1, then row 16w + g + 8. Elsewhere (no sm_90a) nothing here may be
// called.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MILLRACE_HAS_WGMMA 1
#endif

namespace millrace::cuda::ptx {

inline constexpr int kSwizzleRowBytes = 128;

// Where byte `at` of row `row` lies in such an operand.
__host__ __device__ inline constexpr uint32_t swizzled(uint32_t row, uint32_t at) {
  return row * kSwizzleRowBytes + (at ^ (row % 8 * 16));
}

#ifdef MILLRACE_HAS_WGMMA

// An operand at `p` (1,024-byte aligned): eight rows are 1,024 bytes from the next eight. 16 columns further
// on: + 2.
__device__ inline uint64_t wgmma_operand_at(uint32_t address) {
  constexpr uint64_t kEightRows = 1024 / 16, kSwizzle128 = 1;
  return uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{1} << 16 | kEightRows << 32 | kSwizzle128 << 62;
}
__device__ inline uint64_t wgmma_operand(const void* p) { return wgmma_operand_at(shared_address(p)); }
// A value that all lanes of the warp have, for the compiler to know it: what is computed from it is computed
// once for the warp, in uniform registers.
__device__ inline uint32_t warp_uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }

// An operand whose rows are the 16 (or more) columns of the product and whose 128 bytes are 64 of its
// outputs, swizzled alike; the next 64 outputs lie `next_bytes` further. 16 columns further on: + 128.
__device__ inline uint64_t wgmma_columns(const void* p, uint32_t next_bytes) {
  constexpr uint64_t kEightColumns = 1024 / 16, kSwizzle128 = 1;
  return uint64_t{(shared_address(p) & 0x3ffffu) >> 4} | uint64_t{next_bytes >> 4} << 16 |
         kEightColumns << 32 | kSwizzle128 << 62;
}

// Before the first product of a batch: registers written by this warpgroup are the tensor core's now.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kLeft committed batches are under way.
template <int kLeft>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from reading the sums before, or writing them after, this point.
template <int kCount>
__device__ inline void hold_sums(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// How many registers a thread of this warpgroup has from here on.
template <int kRegisters>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#define MILLRACE_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
// d (+)= a b of a warpgroup: 64 x n outputs, 16 columns. a: a lane's fragment as of ptx/mma.cuh's m16n8k16,
// of the warp's 16 rows; it may not change before the product is done.
__device__ inline void wgmma_bf16(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[48], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
      "{%48, %49, %50, %51}, %52, p, 1, 1, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44), MILLRACE_FOUR(48), MILLRACE_FOUR(52), MILLRACE_FOUR(56),
        MILLRACE_FOUR(60)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
// The same with a in shared memory too.
__device__ inline void wgmma_bf16(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[48], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
      "%48, %49, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44), MILLRACE_FOUR(48), MILLRACE_FOUR(52), MILLRACE_FOUR(56),
        MILLRACE_FOUR(60)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[96], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
      "%96, %97, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44), MILLRACE_FOUR(48), MILLRACE_FOUR(52), MILLRACE_FOUR(56),
        MILLRACE_FOUR(60), MILLRACE_FOUR(64), MILLRACE_FOUR(68), MILLRACE_FOUR(72), MILLRACE_FOUR(76),
        MILLRACE_FOUR(80), MILLRACE_FOUR(84), MILLRACE_FOUR(88), MILLRACE_FOUR(92)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
// d += a b where b has its 16 columns of the product as rows: 64 (or twice 64) outputs are one row of 128
// bytes, see wgmma_columns.
__device__ inline void wgmma_bf16_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void wgmma_bf16_columns(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44), MILLRACE_FOUR(48), MILLRACE_FOUR(52), MILLRACE_FOUR(56),
        MILLRACE_FOUR(60)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef MILLRACE_FOUR

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda::ptx
