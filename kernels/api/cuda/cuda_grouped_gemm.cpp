// Products of experts and of four-bit weights on a GPU.
#include "kernels/api/cuda/cuda_device.h"
#include "kernels/cuda/gemm/fp4.h"
#include "kernels/cuda/gemm/grouped.h"
#include "kernels/cuda/gemm/lowbit.h"
#include "kernels/cuda/gemm/split.h"

namespace millrace::api::gpu {
namespace {

cuda::DenseOut grouped_out(mr_dtype type) {
  return type == MR_F32    ? cuda::DenseOut::kF32
         : type == MR_BF16 ? cuda::DenseOut::kBf16
                           : cuda::DenseOut::kF16;
}

cuda::LowbitGemm lowbit_of(const mr_lowbit_gemm_args& args, void* workspace) {
  cuda::LowbitGemm op;
  op.format = args.format;
  op.experts = static_cast<int32_t>(args.experts);
  op.n = args.n, op.k = args.k, op.m = args.m;
  op.weights = static_cast<const uint8_t*>(args.weights);
  op.expert_scales = args.expert_scales;
  op.backward = args.backward != 0;
  op.offsets = args.offsets;
  op.x = args.x, op.ldx = args.ldx;
  op.out = grouped_out(args.out_type);
  op.y = args.y, op.ldy = args.ldy;
  op.alpha = args.alpha;
  op.bias = args.bias;
  op.workspace = static_cast<float*>(workspace);
  return op;
}

// dy, and W or x, as they were quantized for the forward: scales of 1 x 128, of W 128 x 128.
cuda::SplitGemm fp8_gradient_of(const mr_grouped_gemm_args& args) {
  const bool wgrad = args.op == MR_GROUPED_WGRAD;
  const int64_t blocks_n = (args.n + 127) / 128, blocks_k = (args.k + 127) / 128;
  cuda::SplitGemm op;
  op.a.type = op.b.type = cuda::SplitType::kE4m3;
  op.a.data = args.a, op.a.ld = args.lda, op.a.scales = args.a_scales;
  op.b.data = args.b, op.b.ld = args.ldb, op.b.scales = args.b_scales;
  op.b.k_major = false;
  op.b.outer_group = 128, op.b.outer_stride = 1;  // columns k of W and x
  op.b.k_stride = blocks_k;
  if (wgrad) {  // dW[n, k] = sum over rows of dy x
    op.a.k_major = false;
    op.a.outer_group = 128, op.a.outer_stride = 1;
    op.a.k_group = op.b.k_group = 1, op.a.k_stride = blocks_n;
    op.groups = cuda::SplitGroups::kDepth;
    op.m = args.n, op.n = args.k, op.k = args.m;
  } else {  // dx[r, k] = sum over n of dy W
    op.a.outer_stride = blocks_n;
    op.groups = cuda::SplitGroups::kRows;
    op.b_expert = args.n * args.ldb, op.b_scales_of_expert = blocks_n * blocks_k;
    op.m = args.m, op.n = args.k, op.k = args.n;
  }
  op.experts = static_cast<int32_t>(args.experts);
  op.offsets = args.offsets;
  op.c = args.c, op.ldc = args.ldc;
  op.out = grouped_out(args.out_type);
  op.alpha = args.alpha;
  return op;
}

cuda::Fp4Gemm fp4_of(const mr_fp4_gemm_args& args) {
  cuda::Fp4Gemm op;
  op.nvfp4 = args.format == MR_LOWBIT_NVFP4;
  op.m = args.m, op.n = args.n, op.k = args.k;
  op.a = static_cast<const uint8_t*>(args.a), op.a_scales = static_cast<const uint8_t*>(args.a_scales);
  op.b = static_cast<const uint8_t*>(args.b), op.b_scales = static_cast<const uint8_t*>(args.b_scales);
  op.alpha = args.alpha;
  op.out = grouped_out(args.out_type);
  op.c = args.c, op.ldc = args.ldc;
  return op;
}

}  // namespace

void CudaDevice::lowbit_repack(const mr_lowbit_matrix& matrix, void* to, mr_stream stream) {
  cuda::launch_lowbit_repack(matrix, static_cast<uint8_t*>(to), at(stream));
}
size_t CudaDevice::lowbit_gemm_workspace_bytes(const mr_lowbit_gemm_args& args) const {
  return cuda::lowbit_workspace_bytes(lowbit_of(args, nullptr), device_);
}
void CudaDevice::lowbit_gemm(const mr_lowbit_gemm_args& args, void* workspace, mr_stream stream) {
  cuda::launch_lowbit(lowbit_of(args, workspace), at(stream));
}

void CudaDevice::grouped_gemm(const mr_grouped_gemm_args& args, void*, mr_stream stream) {
  if (args.type == MR_F8_E4M3 && args.op != MR_GROUPED_FORWARD)
    return cuda::launch_split(fp8_gradient_of(args), at(stream));
  cuda::GroupedDense op;
  op.op = static_cast<cuda::GroupedOp>(args.op);
  op.type = args.type == MR_BF16  ? cuda::DenseType::kBf16
            : args.type == MR_F16 ? cuda::DenseType::kF16
                                  : cuda::DenseType::kE4m3;
  op.experts = static_cast<int32_t>(args.experts);
  op.m = args.m, op.n = args.n, op.k = args.k;
  op.offsets = args.offsets;
  op.a = args.a, op.lda = args.lda;
  op.b = args.b, op.ldb = args.ldb;
  op.c = args.c, op.ldc = args.ldc;
  op.out = grouped_out(args.out_type);
  op.alpha = args.alpha;
  op.a_scales = args.a_scales, op.b_scales = args.b_scales;
  op.a_scale_stride = (args.k + 127) / 128;
  cuda::launch_grouped_dense(op, at(stream));
}

size_t CudaDevice::fp4_gemm_workspace_bytes(const mr_fp4_gemm_args& args) const {
  return cuda::fp4_workspace_bytes(fp4_of(args), device_);
}
void CudaDevice::fp4_gemm(const mr_fp4_gemm_args& args, void* workspace, mr_stream stream) {
  cuda::launch_fp4(fp4_of(args), workspace, at(stream));
}

}  // namespace millrace::api::gpu
