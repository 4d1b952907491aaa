// The products of a warpgroup (wgmma.cuh) with both operands in shared memory, for more numbers of columns:
// an item's outputs are as many as make all SMs end together (wide_fitted.cuh).
#pragma once

#include "kernels/cuda/ptx/wgmma.cuh"

#ifdef MILLRACE_HAS_WGMMA

namespace millrace::cuda::ptx {

#define MILLRACE_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
__device__ inline void wgmma_bf16(float (&d)[12], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %14, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
      "%12, %13, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[20], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %22, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19}, "
      "%20, %21, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[24], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %26, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23}, "
      "%24, %25, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[40], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %42, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39}, "
      "%40, %41, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[44], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %46, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n88k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43}, "
      "%44, %45, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[80], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %82, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, "
      "%80, %81, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44), MILLRACE_FOUR(48), MILLRACE_FOUR(52), MILLRACE_FOUR(56),
        MILLRACE_FOUR(60), MILLRACE_FOUR(64), MILLRACE_FOUR(68), MILLRACE_FOUR(72), MILLRACE_FOUR(76)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[84], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %86, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n168k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83}, "
      "%84, %85, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44), MILLRACE_FOUR(48), MILLRACE_FOUR(52), MILLRACE_FOUR(56),
        MILLRACE_FOUR(60), MILLRACE_FOUR(64), MILLRACE_FOUR(68), MILLRACE_FOUR(72), MILLRACE_FOUR(76),
        MILLRACE_FOUR(80)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
__device__ inline void wgmma_bf16(float (&d)[92], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %94, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n184k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91}, "
      "%92, %93, p, 1, 1, 0, 0;\n}"
      : MILLRACE_FOUR(0), MILLRACE_FOUR(4), MILLRACE_FOUR(8), MILLRACE_FOUR(12), MILLRACE_FOUR(16),
        MILLRACE_FOUR(20), MILLRACE_FOUR(24), MILLRACE_FOUR(28), MILLRACE_FOUR(32), MILLRACE_FOUR(36),
        MILLRACE_FOUR(40), MILLRACE_FOUR(44), MILLRACE_FOUR(48), MILLRACE_FOUR(52), MILLRACE_FOUR(56),
        MILLRACE_FOUR(60), MILLRACE_FOUR(64), MILLRACE_FOUR(68), MILLRACE_FOUR(72), MILLRACE_FOUR(76),
        MILLRACE_FOUR(80), MILLRACE_FOUR(84), MILLRACE_FOUR(88)
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
}
#undef MILLRACE_FOUR

}  // namespace millrace::cuda::ptx

#endif  // MILLRACE_HAS_WGMMA
