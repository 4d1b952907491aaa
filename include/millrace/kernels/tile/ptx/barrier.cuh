// mbarriers in shared memory and the bulk copy that completes on them (sm_90 and later), as thin wrappers.
// Who waits for whom is said where they are used. In code for older GPUs they are nothing, so that a kernel
// with them compiles; it must not be launched there (has_bulk_copies).
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MILLRACE_BULK_ASM(...)
#else
#define MILLRACE_BULK_ASM(...) asm volatile(__VA_ARGS__)
#endif

namespace millrace::cuda::ptx {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  MILLRACE_BULK_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// After the inits, before anybody (the copy engine included) uses the barriers.
__device__ inline void barrier_init_fence() { MILLRACE_BULK_ASM("fence.mbarrier_init.release.cluster;"); }

__device__ inline void barrier_arrive_at(uint32_t address) {
  MILLRACE_BULK_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) { barrier_arrive_at(shared_address(barrier)); }
// Arrives, and makes the phase wait for `bytes` of copies as well.
__device__ inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  MILLRACE_BULK_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                    "r"(bytes)
                    : "memory");
}
__device__ inline bool barrier_try_wait_at(uint32_t address, uint32_t parity) {
  uint32_t done = 1;
  MILLRACE_BULK_ASM(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(address), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ inline bool barrier_try_wait(uint64_t* barrier, uint32_t parity) {
  return barrier_try_wait_at(shared_address(barrier), parity);
}
// The same, without the while that try_wait may take.
__device__ inline bool barrier_test(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 1;
  MILLRACE_BULK_ASM(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
// Returns when the phase of this parity is over.
__device__ inline void barrier_wait_at(uint32_t address, uint32_t parity) {
  while (!barrier_try_wait_at(address, parity)) {
  }
}
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  barrier_wait_at(shared_address(barrier), parity);
}

// Weights are read once per step: first to leave L2, so that activations and the cache stay.
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;

// `bytes` (a multiple of 16) from global to shared memory, both 16-byte aligned; completes on `barrier`.
__device__ inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  MILLRACE_BULK_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// The same for what is read again soon.
__device__ inline void bulk_copy_kept(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  MILLRACE_BULK_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// What this thread wrote to shared memory is there for the tensor cores and the copy engine.
__device__ inline void publish_to_async() {
  MILLRACE_BULK_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

// What this thread has seen in global memory comes before the bulk copies that it issues.
__device__ inline void fence_bulk_copies() { MILLRACE_BULK_ASM("fence.proxy.async;" ::: "memory"); }

// Closes this thread's group of stores (tma_store_2d, tensor_map.cuh).
__device__ inline void bulk_store_commit() { MILLRACE_BULK_ASM("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory of all but the last kLeft of this thread's groups has been read.
template <int kLeft = 0>
__device__ inline void bulk_store_wait() {
  MILLRACE_BULK_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// Adds one to a counter in global memory, for all CTAs; returns what it was. What this CTA wrote before a
// barrier ahead of it is visible to who counts later, and what others did before they counted is here.
__device__ inline int32_t count_in(int32_t* counter) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// A barrier among `threads` threads of the CTA, under one of its names 1 to 15.
template <int kName, int kThreads>
__device__ inline void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}
// The same under a name that is known when the kernel runs.
template <int kThreads>
__device__ inline void named_barrier(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}
// The same for a number of threads (whole warps) that is known then.
__device__ inline void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// The same for who does not wait for the others.
template <int kName, int kThreads>
__device__ inline void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ inline void named_arrive(int name) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

}  // namespace millrace::cuda::ptx
