#include "kernels/api/cuda/cuda_fused.h"

#include "kernels/cuda/fused/fused.h"

namespace millrace::api::gpu {

void CudaFused::norm(const mr_norm_args& args, mr_stream stream) { cuda::launch_norm(args, at(stream)); }

size_t CudaFused::norm_backward_workspace_bytes(const mr_norm_backward_args& args) const {
  if (args.dweight.data == nullptr && args.dbias.data == nullptr) return 0;
  const int64_t blocks = cuda::norm_backward_blocks(args.rows, args.cols);
  return static_cast<size_t>(blocks * 2 * args.cols) * sizeof(float);
}
void CudaFused::norm_backward(const mr_norm_backward_args& args, void* workspace, mr_stream stream) {
  cuda::launch_norm_backward(args, static_cast<float*>(workspace), at(stream));
}

void CudaFused::rotary(const mr_rotary_args& args, mr_stream stream) {
  cuda::launch_rotary_rows(args, at(stream));
}

void CudaFused::activation(const mr_activation_args& args, mr_stream stream) {
  cuda::launch_activation(args, at(stream));
}
void CudaFused::activation_backward(const mr_activation_backward_args& args, mr_stream stream) {
  cuda::launch_activation_backward(args, at(stream));
}

void CudaFused::softmax(const mr_softmax_args& args, mr_stream stream) {
  cuda::launch_softmax(args, at(stream));
}
void CudaFused::softmax_backward(const mr_softmax_backward_args& args, mr_stream stream) {
  cuda::launch_softmax_backward(args, at(stream));
}

void CudaFused::cross_entropy(const mr_cross_entropy_args& args, mr_stream stream) {
  cuda::launch_cross_entropy(args, at(stream));
}
void CudaFused::cross_entropy_backward(const mr_cross_entropy_backward_args& args, mr_stream stream) {
  cuda::launch_cross_entropy_backward(args, at(stream));
}

void CudaFused::embedding(const mr_embedding_args& args, mr_stream stream) {
  cuda::launch_embedding(args, at(stream));
}
size_t CudaFused::embedding_backward_workspace_bytes(const mr_embedding_backward_args& args) const {
  return cuda::embedding_backward_workspace_bytes(args.rows, args.vocab);
}
void CudaFused::embedding_backward(const mr_embedding_backward_args& args, void* workspace,
                                   mr_stream stream) {
  cuda::launch_embedding_backward(args, workspace, at(stream));
}

void CudaFused::dropout(const mr_dropout_args& args, mr_stream stream) {
  cuda::launch_dropout(args, at(stream));
}

size_t CudaFused::linear_cross_entropy_backward_workspace_bytes(
    const mr_linear_cross_entropy_backward_args& args) const {
  return cuda::linear_cross_entropy_backward_bytes(args);
}
void CudaFused::linear_cross_entropy_backward(const mr_linear_cross_entropy_backward_args& args,
                                              void* workspace, mr_stream stream) {
  cuda::launch_linear_cross_entropy_backward(args, workspace, at(stream));
}

}  // namespace millrace::api::gpu
