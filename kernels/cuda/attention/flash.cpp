// Attention over tensors on a GPU: which problems have kernels, how large workspaces are, and who is called.
#include "kernels/cuda/attention/flash.h"

#include "kernels/cuda/attention/flash_forward_call.h"
#include "kernels/cuda/resources.h"

namespace millrace::cuda {
namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

bool has_head_size(const mr_flash_problem& p) {
  if (p.head_dim == 192) return p.value_dim == 128;
  const bool listed = p.head_dim == 64 || p.head_dim == 96 || p.head_dim == 128 || p.head_dim == 256;
  return listed && p.value_dim == p.head_dim;
}

}  // namespace

const char* flash_forward_lacks(const mr_flash_problem& problem, const Device& device) {
  if (!device.has_wgmma()) return "this GPU or build has no kernel; one with sm_90a (H100, H200) has";
  if (problem.type != MR_BF16 && problem.type != MR_F16)
    return "no kernel for this type; MR_BF16 and MR_F16 have one";
  if (!has_head_size(problem)) {
    return "no kernel for these head sizes; head_dim and value_dim 64, 96, 128, 256, and 192 with 128, have "
           "one: pad "
           "with zeros and give scale";
  }
  if (problem.blocks != nullptr) return "no kernel for block-sparse calls; blocks NULL has one";
  return nullptr;
}

size_t flash_forward_workspace(const mr_flash_problem& problem, const Device&) {
  return 256 + aligned((static_cast<size_t>(problem.batch) + 1) * sizeof(int32_t));
}

void launch_flash_forward(const mr_flash_problem& problem, const mr_flash_tensor& q, const mr_flash_tensor& k,
                          const mr_flash_tensor& v, const mr_flash_tensor& out, float* lse, void* workspace,
                          const Launch& at) {
  if (problem.batch == 0 || problem.heads == 0 || problem.max_q == 0) return;
  auto* counter = static_cast<int32_t*>(workspace);
  const FlashForwardCall call{problem, q,   k,       v,
                              out,     lse, counter, problem.cu_q != nullptr ? counter + 64 : nullptr};
  problem.type == MR_BF16 ? launch_flash_forward_bf16(call, at) : launch_flash_forward_f16(call, at);
}

}  // namespace millrace::cuda
