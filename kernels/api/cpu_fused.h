// The fused operations of the C API on a CPU.
#pragma once

#include "kernels/api/mr_fused.h"
#include "kernels/cpu/fused/fused.h"
#include "kernels/cpu/fused/linear_cross_entropy.h"

namespace millrace::api {

class CpuFused final : public FusedOps {
 public:
  CpuFused(const cpu::KernelTable& kernels, ThreadPool& pool) : ctx_{kernels, pool} {}

  void norm(const mr_norm_args& args, mr_stream) override { cpu::norm_rows_fused(ctx_, args); }
  size_t norm_backward_workspace_bytes(const mr_norm_backward_args& args) const override {
    return cpu::norm_backward_bytes(args);
  }
  void norm_backward(const mr_norm_backward_args& args, void* workspace, mr_stream) override {
    cpu::norm_rows_backward(ctx_, args, workspace);
  }
  void rotary(const mr_rotary_args& args, mr_stream) override { cpu::rotary_rows_fused(ctx_, args); }
  void activation(const mr_activation_args& args, mr_stream) override { cpu::activation_rows(ctx_, args); }
  void activation_backward(const mr_activation_backward_args& args, mr_stream) override {
    cpu::activation_rows_backward(ctx_, args);
  }
  void softmax(const mr_softmax_args& args, mr_stream) override { cpu::softmax_rows(ctx_, args); }
  void softmax_backward(const mr_softmax_backward_args& args, mr_stream) override {
    cpu::softmax_rows_backward(ctx_, args);
  }
  void cross_entropy(const mr_cross_entropy_args& args, mr_stream) override {
    cpu::cross_entropy_rows(ctx_, args);
  }
  void cross_entropy_backward(const mr_cross_entropy_backward_args& args, mr_stream) override {
    cpu::cross_entropy_rows_backward(ctx_, args);
  }
  void embedding(const mr_embedding_args& args, mr_stream) override { cpu::embedding_rows(ctx_, args); }
  size_t embedding_backward_workspace_bytes(const mr_embedding_backward_args& args) const override {
    return cpu::embedding_backward_bytes(args);
  }
  void embedding_backward(const mr_embedding_backward_args& args, void* workspace, mr_stream) override {
    cpu::embedding_rows_backward(ctx_, args, workspace);
  }
  void dropout(const mr_dropout_args& args, mr_stream) override { cpu::dropout_rows(ctx_, args); }
  size_t linear_cross_entropy_backward_workspace_bytes(
      const mr_linear_cross_entropy_backward_args& args) const override {
    return cpu::linear_cross_entropy_backward_bytes(args, ctx_.pool.size());
  }
  void linear_cross_entropy_backward(const mr_linear_cross_entropy_backward_args& args, void* workspace,
                                     mr_stream) override {
    cpu::linear_cross_entropy_backward(ctx_, args, workspace);
  }

 private:
  cpu::Context ctx_;
};

}  // namespace millrace::api
