// Products of plain matrices, of experts and of four-bit weights on a CPU behind the C API.
#include "kernels/api/cpu_device.h"
#include "kernels/cpu/matmul/dense_gemm.h"
#include "kernels/cpu/matmul/fp4_gemm.h"
#include "kernels/cpu/matmul/lowbit_gemm.h"

namespace millrace::api {
namespace {

// The product of one expert, with pointers to its first rows.
mr_gemm_args expert_product(const mr_grouped_gemm_args& args, int64_t expert) {
  const int64_t first = args.offsets[expert], rows = args.offsets[expert + 1] - first;
  const int64_t bytes = args.type == MR_F8_E4M3 ? 1 : 2, out = args.out_type == MR_F32 ? 4 : 2;
  const bool forward = args.op == MR_GROUPED_FORWARD, wgrad = args.op == MR_GROUPED_WGRAD;
  mr_gemm_args g{};
  g.type = g.b_type = args.type;
  g.out_type = args.out_type;
  g.alpha = args.alpha;
  g.m = wgrad ? args.n : rows;
  g.n = forward ? args.n : args.k;
  g.k = forward ? args.k : wgrad ? rows : args.n;
  g.a = static_cast<const uint8_t*>(args.a) + first * args.lda * bytes;
  g.lda = args.lda;
  g.transpose_a = wgrad ? 1 : 0;
  g.b = static_cast<const uint8_t*>(args.b) + (wgrad ? first : expert * args.n) * args.ldb * bytes;
  g.ldb = args.ldb;
  g.transpose_b = forward ? 1 : 0;
  g.c = static_cast<uint8_t*>(args.c) + (wgrad ? expert * args.n : first) * args.ldc * out;
  g.ldc = args.ldc;
  if (args.a_scales == nullptr) return g;
  const int64_t blocks_n = (args.n + 127) / 128, blocks_k = (args.k + 127) / 128;
  g.a_scale_stride = forward ? blocks_k : blocks_n;
  g.a_scales = args.a_scales + first * g.a_scale_stride;
  g.a_scale_rows = 1, g.a_scale_cols = 128;
  g.b_scale_stride = blocks_k;
  g.b_scales = args.b_scales + (wgrad ? first : expert * blocks_n) * blocks_k;
  g.b_scale_rows = wgrad ? 1 : 128, g.b_scale_cols = 128;
  return g;
}

}  // namespace

size_t CpuDevice::gemm_workspace_bytes(const mr_gemm_args& args) const {
  return cpu::dense_gemm_workspace_bytes(args, pool_.size());
}

void CpuDevice::gemm(const mr_gemm_args& args, void* workspace, mr_stream) {
  cpu::dense_gemm(context(), args, workspace);
}

void CpuDevice::lowbit_repack(const mr_lowbit_matrix& matrix, void* to, mr_stream) {
  cpu::lowbit_repack(context(), matrix, to);
}
size_t CpuDevice::lowbit_gemm_workspace_bytes(const mr_lowbit_gemm_args& args) const {
  return cpu::lowbit_gemm_workspace_bytes(args, pool_.size());
}
void CpuDevice::lowbit_gemm(const mr_lowbit_gemm_args& args, void* workspace, mr_stream) {
  cpu::lowbit_gemm(context(), args, workspace);
}

size_t CpuDevice::fp4_gemm_workspace_bytes(const mr_fp4_gemm_args&) const {
  return cpu::fp4_gemm_workspace_bytes(pool_.size());
}
void CpuDevice::fp4_gemm(const mr_fp4_gemm_args& args, void* workspace, mr_stream) {
  cpu::fp4_gemm(context(), args, workspace);
}

size_t CpuDevice::grouped_gemm_workspace_bytes(const mr_grouped_gemm_args&) const {
  return cpu::dense_gemm_workspace_bytes({}, pool_.size());
}
void CpuDevice::grouped_gemm(const mr_grouped_gemm_args& args, void* workspace, mr_stream) {
  for (int64_t expert = 0; expert < args.experts; ++expert)
    cpu::dense_gemm(context(), expert_product(args, expert), workspace);
}

}  // namespace millrace::api
