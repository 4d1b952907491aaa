// Attention over tensors (millrace/kernels/flash_attention.h) on a GPU: to the warpgroup kernels of Hopper
// (kernels/cuda/attention/flash.h) where there is one, else to those on mma.sync (flash_mma.h); what neither
// has is refused with a line that says what would work.
#include "base/error.h"
#include "kernels/api/cuda/cuda_device.h"
#include "kernels/cuda/attention/flash.h"
#include "kernels/cuda/attention/flash_mma.h"

namespace millrace::api::gpu {
namespace {

// `lacks`: why Hopper's kernels do not take it, or null. Throws where nothing does.
bool goes_to_mma(const mr_flash_problem& problem, const char* lacks, bool mma_has_it, const char* pass) {
  if (lacks == nullptr) return false;
  if (mma_has_it) return true;
  throw_error(ErrorCode::kUnsupported, "{}, type {}, head_dim {}, value_dim {}: {}", pass,
              mr_dtype_name(problem.type), problem.head_dim, problem.value_dim, lacks);
}
bool forward_by_mma(const mr_flash_problem& problem, const cuda::Device& device) {
  return goes_to_mma(problem, cuda::flash_forward_lacks(problem, device),
                     cuda::supports_flash_mma(problem, device.code_architecture()), "flash_forward");
}
bool backward_by_mma(const mr_flash_problem& problem, const cuda::Device& device) {
  return goes_to_mma(problem, cuda::flash_backward_lacks(problem, device),
                     cuda::supports_flash_backward_mma(problem, device.code_architecture()),
                     "flash_backward");
}

}  // namespace

size_t CudaDevice::flash_forward_workspace_bytes(const mr_flash_problem& problem) const {
  return forward_by_mma(problem, device_) ? 0 : cuda::flash_forward_workspace(problem, device_);
}

void CudaDevice::flash_forward(const FlashForward& call) {
  const bool mma = forward_by_mma(call.problem, device_);
  const cuda::Launch to = at(call.stream);
  if (mma) {
    return cuda::launch_flash_forward_mma(call.problem, call.q, call.k, call.v, call.out, call.lse,
                                          to.stream);
  }
  cuda::launch_flash_forward(call.problem, call.q, call.k, call.v, call.out, call.lse, call.workspace, to);
}

size_t CudaDevice::flash_backward_workspace_bytes(const mr_flash_problem& problem, bool deterministic) const {
  return backward_by_mma(problem, device_) ? cuda::flash_backward_mma_workspace(problem)
                                           : cuda::flash_backward_workspace(problem, deterministic, device_);
}

void CudaDevice::flash_backward(const FlashBackward& call) {
  const bool mma = backward_by_mma(call.problem, device_);
  const cuda::Launch to = at(call.stream);
  if (mma) {
    return cuda::launch_flash_backward_mma(call.problem, call.q, call.k, call.v, call.out, call.lse,
                                           call.gradients, call.workspace, to.stream);
  }
  cuda::launch_flash_backward(call.problem, call.q, call.k, call.v, call.out, call.lse, call.gradients,
                              call.workspace, to);
}

void CudaDevice::flash_quantize(const mr_flash_quantize_args& args, mr_stream stream) {
  cuda::launch_flash_quantize(args, at(stream).stream);
}

}  // namespace millrace::api::gpu
