// Launching with the attribute that lets a kernel start before the one ahead of it has ended.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

// The kernel must call wait_for_previous() before it reads what a kernel of the same step writes, and before
// it writes anything. cluster: how many CTAs that follow one another are one (ptx/cluster.cuh). L1 stays as
// large as it is: kernels whose loads go through registers keep them under way there.
template <class... Parameters, class... Arguments>
void launch_overlapping(const char* name, unsigned cluster, void (*kernel)(Parameters...), dim3 grid,
                        unsigned threads, size_t shared_bytes, const Launch& at, Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = at.stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  config.attrs = attributes;
  config.numAttrs = !at.device.has_bulk_copies() ? 0 : cluster > 1 ? 2 : 1;
  check_call(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
  check_launch(name);
}
// The same with all shared memory, as in every kernel of a step: an SM that has to move the border between
// shared memory and L1 empties first, and nothing would overlap.
template <class... Parameters, class... Arguments>
void launch_clusters(const char* name, unsigned cluster, void (*kernel)(Parameters...), dim3 grid,
                     unsigned threads, size_t shared_bytes, const Launch& at, Arguments&&... arguments) {
  check_call(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute(carveout)");
  launch_overlapping(name, cluster, kernel, grid, threads, shared_bytes, at,
                     std::forward<Arguments>(arguments)...);
}
template <class... Parameters, class... Arguments>
void launch_dependent(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                      size_t shared_bytes, const Launch& at, Arguments&&... arguments) {
  launch_clusters(name, 1, kernel, grid, threads, shared_bytes, at, std::forward<Arguments>(arguments)...);
}

// Shared memory of a kernel of which an SM holds one CTA at a time: more than half of what there is. Kernels
// of a decode step have a CTA to every SM and follow one another closely: with room for two, those of a
// kernel go where the one ahead has left room first, two to some SMs and none to others, and the next ones
// after them, to the end of the step (docs/kernels/cuda_decode.md).
inline size_t alone_on_sm(size_t bytes, const Device& device) {
  return std::max<size_t>(bytes, device.max_shared_memory() / 2 + 1);
}

// Lets a kernel use more than 48 KB of shared memory, its __shared__ variables (8 KB at most) among them.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, size_t bytes) {
  if (bytes <= 40 * 1024) return;
  check_call(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "cudaFuncSetAttribute(shared memory)");
}

}  // namespace millrace::cuda
