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
  return type == MR_F32    ? cuda::DenseOut::kF32
         : type == MR_BF16 ? cuda::DenseOut::kBf16
                           : cuda::DenseOut::kF16;
}

}  // namespace

void CudaDevice::gemm(const mr_gemm_args& args, void*, mr_stream stream) {
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
  cuda::launch_dense(op, at(stream));
}

}  // namespace millrace::api::gpu
