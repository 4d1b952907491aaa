// Programmatic dependent launch: a kernel may start while the one before it still runs, and waits for it
// where it first needs its results. Launched without the attribute, and in code for GPUs that do not know it
// (before sm_90), both are no-ops.
#pragma once

namespace millrace::cuda::ptx {

// The next kernel's CTAs may be scheduled once every CTA of this one has said so.
__device__ inline void let_dependents_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Returns when every kernel before this one is complete and its writes are visible. What a kernel reads
// before it must not be written by any kernel of the same step.
__device__ inline void wait_for_previous() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace millrace::cuda::ptx
