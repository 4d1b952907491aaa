// The mma.sync attention kernels as C functions, for tests/gpu/flash_mma_test.py: the library's own calls
// take them only where no faster kernel has the shape.
#include <exception>
#include <string>

#include "kernels/cuda/attention/flash_mma.h"

namespace {
thread_local std::string last_error;

template <class Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}
}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* flash_mma_last_error() { return last_error.c_str(); }

EXPORTED int flash_mma_forward(const mr_flash_problem* problem, const mr_flash_tensor* q,
                               const mr_flash_tensor* k, const mr_flash_tensor* v, const mr_flash_tensor* out,
                               float* lse, void* stream) {
  return guarded([&] {
    millrace::cuda::launch_flash_forward_mma(*problem, *q, *k, *v, *out, lse,
                                             static_cast<cudaStream_t>(stream));
  });
}

EXPORTED size_t flash_mma_backward_workspace(const mr_flash_problem* problem) {
  return millrace::cuda::flash_backward_mma_workspace(*problem);
}

EXPORTED int flash_mma_backward(const mr_flash_problem* problem, const mr_flash_tensor* q,
                                const mr_flash_tensor* k, const mr_flash_tensor* v,
                                const mr_flash_tensor* out, const float* lse,
                                const mr_flash_gradients* gradients, void* workspace, void* stream) {
  return guarded([&] {
    millrace::cuda::launch_flash_backward_mma(*problem, *q, *k, *v, *out, lse, *gradients, workspace,
                                              static_cast<cudaStream_t>(stream));
  });
}
