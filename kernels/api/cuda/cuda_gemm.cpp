// mr_gemm on a GPU.
#include "kernels/api/cuda/cuda_device.h"
#include "kernels/cuda/gemm/dense.h"
#include "kernels/cuda/gemm/split.h"

namespace millrace::api::gpu {
namespace {

cuda::DenseType type_of(mr_dtype type) {
  switch (type) {
    case MR_BF16:
      return cuda::DenseType::kBf16;
    case MR_F16:
      return cuda::DenseType::kF16;
    case MR_F8_E4M3:
      return cuda::DenseType::kE4m3;
    case MR_I8:
      return cuda::DenseType::kS8;
    default:
      return cuda::DenseType::kF32;
  }
}

cuda::DenseOut out_of(mr_dtype type) {
  switch (type) {
    case MR_F32:
      return cuda::DenseOut::kF32;
    case MR_BF16:
      return cuda::DenseOut::kBf16;
    case MR_F16:
      return cuda::DenseOut::kF16;
    default:
      return cuda::DenseOut::kE4m3;
  }
}

// Two types, E5M2, or scales in another grid than the dense kernels': by the split product.
bool is_split(const mr_gemm_args& args) {
  return args.type == MR_F8_E5M2 || args.b_type != args.type || args.a_scale_rows != 0 ||
         args.b_scale_rows != 0;
}

cuda::SplitType split_type_of(mr_dtype type) {
  switch (type) {
    case MR_F32:
      return cuda::SplitType::kF32;
    case MR_F16:
      return cuda::SplitType::kF16;
    case MR_BF16:
      return cuda::SplitType::kBf16;
    case MR_F8_E4M3:
      return cuda::SplitType::kE4m3;
    default:
      return cuda::SplitType::kE5m2;
  }
}

// The scales of an operand; of a grid of 0 and 0 one for `outer_group` outer elements and 128 of k.
struct OperandScales {
  const float* scales;
  int64_t stride;
  int32_t rows, cols, outer_group;
};
cuda::SplitOperand split_operand(mr_dtype type, const void* data, int64_t ld, bool k_major,
                                 const OperandScales& of) {
  cuda::SplitOperand p;
  p.type = split_type_of(type);
  p.data = data, p.ld = ld, p.k_major = k_major;
  if (cuda::split_bytes(p.type) > 1) return p;
  p.scales = of.scales;
  const bool along_k = k_major || of.rows == 0;  // rows of scales are outer elements
  p.outer_group = of.rows == 0 ? of.outer_group : along_k ? of.rows : of.cols;
  p.k_group = of.rows == 0 ? 128 : along_k ? of.cols : of.rows;
  p.outer_stride = along_k ? of.stride : 1;
  p.k_stride = along_k ? 1 : of.stride;
  return p;
}

cuda::SplitGemm split_of(const mr_gemm_args& args) {
  cuda::SplitGemm op;
  op.a = split_operand(args.type, args.a, args.lda, args.transpose_a == 0,
                       {args.a_scales, args.a_scale_stride, args.a_scale_rows, args.a_scale_cols, 1});
  op.b = split_operand(args.b_type, args.b, args.ldb, args.transpose_b != 0,
                       {args.b_scales, args.b_scale_stride, args.b_scale_rows, args.b_scale_cols, 128});
  op.m = args.m, op.n = args.n, op.k = args.k;
  op.alpha = args.alpha;
  op.out = out_of(args.out_type);
  op.c = args.c, op.ldc = args.ldc;
  return op;
}

cuda::DenseGemm dense_of(const mr_gemm_args& args) {
  cuda::DenseGemm op;
  op.type = type_of(args.type);
  op.a = args.a;
  op.b = args.b;
  op.c = args.c;
  op.m = args.m, op.n = args.n, op.k = args.k;
  op.lda = args.lda, op.ldb = args.ldb, op.ldc = args.ldc;
  op.mn_major_a = args.transpose_a != 0;
  op.mn_major_b = args.transpose_b == 0;
  op.split_k = args.split_k != 0;
  if (args.type == MR_F8_E4M3 || args.type == MR_F8_E5M2) {
    op.a_scales = args.a_scales, op.a_scale_stride = args.a_scale_stride;
    op.b_scales = args.b_scales, op.b_scale_stride = args.b_scale_stride;
  } else {
    op.epilogue.row_scales = args.a_scales;
    op.epilogue.column_scales = args.b_scales;
  }
  op.epilogue.alpha = args.alpha;
  op.epilogue.bias = args.bias;
  op.epilogue.activation = static_cast<cuda::DenseActivation>(args.activation);
  op.epilogue.residual = args.residual;
  op.epilogue.residual_stride = args.residual_stride;
  op.epilogue.out = out_of(args.out_type);
  op.epilogue.gate_alpha = args.gate_alpha;
  op.epilogue.gate_limit = args.gate_limit;
  op.epilogue.out_scales = args.c_scales;
  op.epilogue.out_scale_stride = args.c_scale_stride;
  return op;
}

}  // namespace

size_t CudaDevice::gemm_workspace_bytes(const mr_gemm_args& args) const {
  const cuda::DenseGemm op = dense_of(args);
  if (!is_split(args)) return cuda::dense_workspace_bytes(op, device_);
  return op.epilogue.plain() ? 0 : static_cast<size_t>(args.m) * static_cast<size_t>(args.n) * sizeof(float);
}

void CudaDevice::gemm(const mr_gemm_args& args, void* workspace, mr_stream stream) {
  const cuda::DenseGemm op = dense_of(args);
  if (!is_split(args)) return cuda::launch_dense(op, at(stream), workspace);
  cuda::SplitGemm sums = split_of(args);
  if (op.epilogue.plain()) return cuda::launch_split(sums, at(stream));
  sums.out = cuda::DenseOut::kF32;
  sums.c = workspace, sums.ldc = args.n;
  cuda::launch_split(sums, at(stream));
  cuda::launch_dense_finish(static_cast<const float*>(workspace), op, at(stream));
}

}  // namespace millrace::api::gpu
