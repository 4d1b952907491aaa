// Linear attention on a CPU behind the C API.
#include "kernels/api/cpu_device.h"
#include "kernels/cpu/state/linear_attention.h"

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

}  // namespace millrace::api
