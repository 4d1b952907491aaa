// Launching with the attribute that lets a kernel start before the one ahead of it has ended.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/device.h"

namespace millrace::cuda {

// The kernel must call wait_for_previous() before it reads what a kernel of the same step writes, and before
// it writes anything.
template <class... Parameters, class... Arguments>
void launch_dependent(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                      size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  // All shared memory, in every kernel of a step: an SM that has to move the border between shared memory and
  // L1 empties first, and nothing would overlap.
  check_call(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute(carveout)");
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = has_bulk_copies() ? 1 : 0;
  check_call(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
  check_launch(name);
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
