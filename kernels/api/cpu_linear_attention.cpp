// Linear attention on a CPU behind the C API.
#include "kernels/api/cpu_device.h"
#include "kernels/cpu/state/linear_attention.h"
#include "kernels/cpu/state/linear_backward.h"
#include "kernels/cpu/state/wkv7.h"

namespace millrace::api {

size_t CpuDevice::linear_attention_workspace_bytes(int32_t key_dim, int32_t value_dim) const {
  return cpu::linear_attention_workspace_bytes(key_dim, value_dim, pool_.size());
}

void CpuDevice::gated_delta(const mr_gated_delta_args& args, void* workspace, mr_stream) {
  cpu::gated_delta(context(), args, workspace);
}

void CpuDevice::selective_scan(const mr_selective_scan_args& args, void* workspace, mr_stream) {
  cpu::selective_scan(context(), args, workspace);
}

void CpuDevice::short_conv(const mr_short_conv_args& args, mr_stream) { cpu::short_conv(context(), args); }

size_t CpuDevice::wkv7_workspace_bytes(int32_t key_dim, int32_t value_dim) const {
  return cpu::wkv7_workspace_bytes(key_dim, value_dim, pool_.size());
}

void CpuDevice::wkv7(const mr_wkv7_args& args, void* workspace, mr_stream) {
  cpu::wkv7(context(), args, workspace);
}

size_t CpuDevice::linear_backward_workspace_bytes(const LinearBackwardShape& shape) const {
  return cpu::linear_backward_workspace_bytes(
      {shape.sequences, shape.heads, shape.key_dim, shape.value_dim, shape.longest}, pool_.size());
}

void CpuDevice::gated_delta_backward(const mr_gated_delta_backward_args& args, void* workspace, mr_stream) {
  cpu::gated_delta_backward(context(), args, workspace);
}

void CpuDevice::selective_scan_backward(const mr_selective_scan_backward_args& args, void* workspace,
                                        mr_stream) {
  cpu::selective_scan_backward(context(), args, workspace);
}

void CpuDevice::wkv7_backward(const mr_wkv7_backward_args& args, void* workspace, mr_stream) {
  cpu::wkv7_backward(context(), args, workspace);
}

}  // namespace millrace::api
