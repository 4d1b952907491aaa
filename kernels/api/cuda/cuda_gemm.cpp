// mr_gemm on a GPU.
#include "kernels/api/cuda/cuda_device.h"
#include "kernels/cuda/gemm/dense.h"

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

// What a CPU does and the kernels here do not.
void refuse_more(const mr_gemm_args& args) {
  if (args.type == MR_F8_E5M2 || args.b_type != args.type) {
    throw_error(ErrorCode::kUnsupported,
                "args.type is {} and b's {}: a GPU has no kernel for them, expected one type, not f8_e5m2",
                mr_dtype_name(args.type), mr_dtype_name(args.b_type));
  }
  if (args.a_scale_rows != 0 || args.b_scale_rows != 0) {
    throw_error(
        ErrorCode::kUnsupported,
        "args.{} is {} and _cols {}: a GPU has no kernel for this grid, expected 0 and 0, scales along "
        "k",
        args.a_scale_rows != 0 ? "a_scale_rows" : "b_scale_rows",
        args.a_scale_rows != 0 ? args.a_scale_rows : args.b_scale_rows,
        args.a_scale_rows != 0 ? args.a_scale_cols : args.b_scale_cols);
  }
}

cuda::DenseGemm dense_of(const mr_gemm_args& args) {
  refuse_more(args);
  cuda::DenseGemm op;
  op.type = type_of(args.type);
  op.a = args.a;
  op.b = args.b;
  op.c = args.c;
  op.m = args.m, op.n = args.n, op.k = args.k;
  op.lda = args.lda, op.ldb = args.ldb, op.ldc = args.ldc;
  op.mn_major_a = args.transpose_a != 0;
  op.mn_major_b = args.transpose_b == 0;
  if (args.type == MR_F8_E4M3) {
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
  return cuda::dense_workspace_bytes(dense_of(args), device_);
}

void CudaDevice::gemm(const mr_gemm_args& args, void* workspace, mr_stream stream) {
  cuda::launch_dense(dense_of(args), at(stream), workspace);
}

}  // namespace millrace::api::gpu
