// Programmatic dependent launch: a kernel may start while the one before it still runs, and waits for it
// where it first needs its results. Launched without the attribute both are no-ops.
#pragma once

namespace millrace::cuda::ptx {

// The next kernel's CTAs may be scheduled once every CTA of this one has said so.
__device__ inline void let_dependents_start() { asm volatile("griddepcontrol.launch_dependents;"); }
// Returns when every kernel before this one is complete and its writes are visible. What a kernel reads
// before it must not be written by any kernel of the same step.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace millrace::cuda::ptx
