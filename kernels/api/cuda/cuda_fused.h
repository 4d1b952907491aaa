// The fused operations of the C API on a GPU.
#pragma once

#include "kernels/api/mr_fused.h"
#include "kernels/cuda/device.h"

namespace millrace::api::gpu {

class CudaFused final : public FusedOps {
 public:
  explicit CudaFused(const cuda::Device& device) : device_(device) {}

  void norm(const mr_norm_args& args, mr_stream stream) override;
  size_t norm_backward_workspace_bytes(const mr_norm_backward_args& args) const override;
  void norm_backward(const mr_norm_backward_args& args, void* workspace, mr_stream stream) override;
  void rotary(const mr_rotary_args& args, mr_stream stream) override;
  void activation(const mr_activation_args& args, mr_stream stream) override;
  void activation_backward(const mr_activation_backward_args& args, mr_stream stream) override;
  void softmax(const mr_softmax_args& args, mr_stream stream) override;
  void softmax_backward(const mr_softmax_backward_args& args, mr_stream stream) override;
  void cross_entropy(const mr_cross_entropy_args& args, mr_stream stream) override;
  void cross_entropy_backward(const mr_cross_entropy_backward_args& args, mr_stream stream) override;
  void embedding(const mr_embedding_args& args, mr_stream stream) override;
  size_t embedding_backward_workspace_bytes(const mr_embedding_backward_args& args) const override;
  void embedding_backward(const mr_embedding_backward_args& args, void* workspace, mr_stream stream) override;
  void dropout(const mr_dropout_args& args, mr_stream stream) override;
  size_t linear_cross_entropy_backward_workspace_bytes(
      const mr_linear_cross_entropy_backward_args& args) const override;
  void linear_cross_entropy_backward(const mr_linear_cross_entropy_backward_args& args, void* workspace,
                                     mr_stream stream) override;

 private:
  // Where kernels go; the GPU is current on this thread from here on.
  cuda::Launch at(mr_stream stream) const {
    device_.use();
    return {device_, stream};
  }

  const cuda::Device& device_;
};

}  // namespace millrace::api::gpu
