// Products of plain matrices on a CPU behind the C API.
#include "kernels/api/cpu_device.h"
#include "kernels/cpu/matmul/dense_gemm.h"

namespace millrace::api {

size_t CpuDevice::gemm_workspace_bytes(const mr_gemm_args& args) const {
  return cpu::dense_gemm_workspace_bytes(args, pool_.size());
}

void CpuDevice::gemm(const mr_gemm_args& args, void* workspace, mr_stream) {
  cpu::dense_gemm(context(), args, workspace);
}

}  // namespace millrace::api
