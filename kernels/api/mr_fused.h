// What a device does behind the fused operations of the C API (norm.h, rotary.h, activation.h, softmax.h,
// cross_entropy.h, embedding.h, dropout.h). mr_fused.cpp has checked the arguments: strides of 0 are
// replaced, pointers are there and aligned to their elements, workspaces are large enough, rows and cols are
// at least 1.
#pragma once

#include <cstddef>

#include "millrace/kernels.h"

namespace millrace::api {

class FusedOps {
 public:
  virtual ~FusedOps() = default;

  virtual void norm(const mr_norm_args& args, mr_stream stream) = 0;
  virtual size_t norm_backward_workspace_bytes(const mr_norm_backward_args& args) const = 0;
  virtual void norm_backward(const mr_norm_backward_args& args, void* workspace, mr_stream stream) = 0;
  virtual void rotary(const mr_rotary_args& args, mr_stream stream) = 0;
  virtual void activation(const mr_activation_args& args, mr_stream stream) = 0;
  virtual void activation_backward(const mr_activation_backward_args& args, mr_stream stream) = 0;
  virtual void softmax(const mr_softmax_args& args, mr_stream stream) = 0;
  virtual void softmax_backward(const mr_softmax_backward_args& args, mr_stream stream) = 0;
  virtual void cross_entropy(const mr_cross_entropy_args& args, mr_stream stream) = 0;
  virtual void cross_entropy_backward(const mr_cross_entropy_backward_args& args, mr_stream stream) = 0;
  virtual void embedding(const mr_embedding_args& args, mr_stream stream) = 0;
  virtual size_t embedding_backward_workspace_bytes(const mr_embedding_backward_args& args) const = 0;
  virtual void embedding_backward(const mr_embedding_backward_args& args, void* workspace,
                                  mr_stream stream) = 0;
  virtual void dropout(const mr_dropout_args& args, mr_stream stream) = 0;
  // Of no rows too.
  virtual size_t linear_cross_entropy_backward_workspace_bytes(
      const mr_linear_cross_entropy_backward_args& args) const = 0;
  virtual void linear_cross_entropy_backward(const mr_linear_cross_entropy_backward_args& args,
                                             void* workspace, mr_stream stream) = 0;
};

}  // namespace millrace::api
