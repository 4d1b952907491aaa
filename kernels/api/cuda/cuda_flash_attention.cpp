// Attention over tensors (millrace/kernels/flash_attention.h) on a GPU: what has no kernel is refused with a
// line that says what has; the rest goes to kernels/cuda/attention/flash.h.
#include "base/error.h"
#include "kernels/api/cuda/cuda_device.h"
#include "kernels/cuda/attention/flash.h"

namespace millrace::api::gpu {
namespace {

void require_forward(const mr_flash_problem& problem, const cuda::Device& device) {
  if (const char* lacks = cuda::flash_forward_lacks(problem, device)) {
    throw_error(ErrorCode::kUnsupported, "flash_forward, type {}, head_dim {}, value_dim {}: {}",
                mr_dtype_name(problem.type), problem.head_dim, problem.value_dim, lacks);
  }
}
void require_backward(const mr_flash_problem& problem, const cuda::Device& device) {
  if (const char* lacks = cuda::flash_backward_lacks(problem, device)) {
    throw_error(ErrorCode::kUnsupported, "flash_backward, type {}, head_dim {}, value_dim {}: {}",
                mr_dtype_name(problem.type), problem.head_dim, problem.value_dim, lacks);
  }
}

}  // namespace

size_t CudaDevice::flash_forward_workspace_bytes(const mr_flash_problem& problem) const {
  require_forward(problem, device_);
  return cuda::flash_forward_workspace(problem, device_);
}

void CudaDevice::flash_forward(const FlashForward& call) {
  require_forward(call.problem, device_);
  cuda::launch_flash_forward(call.problem, call.q, call.k, call.v, call.out, call.lse, call.workspace,
                             at(call.stream));
}

size_t CudaDevice::flash_backward_workspace_bytes(const mr_flash_problem& problem, bool deterministic) const {
  require_backward(problem, device_);
  return cuda::flash_backward_workspace(problem, deterministic, device_);
}

void CudaDevice::flash_backward(const FlashBackward& call) {
  require_backward(call.problem, device_);
  cuda::launch_flash_backward(call.problem, call.q, call.k, call.v, call.out, call.lse, call.gradients,
                              call.workspace, at(call.stream));
}

void CudaDevice::flash_quantize(const mr_flash_quantize_args&, mr_stream) {
  throw_error(ErrorCode::kUnsupported, "flash_quantize on a GPU, expected a cpu device");
}

}  // namespace millrace::api::gpu
