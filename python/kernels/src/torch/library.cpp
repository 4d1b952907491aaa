// The operations torch.ops.millrace.*: their schemas, and their kernels for a CPU and, where the kernel
// library was built with CUDA, for a GPU by the same functions. Fake kernels and autograd are Python's
// (millrace_kernels/torch).
#include "tensors.h"

namespace {

void implement_all(torch::stable::detail::StableLibrary& m) {
  millrace::torch_ops::implement_attention(m);
  millrace::torch_ops::implement_fused(m);
  millrace::torch_ops::implement_losses(m);
  millrace::torch_ops::implement_products(m);
  millrace::torch_ops::implement_experts(m);
  millrace::torch_ops::implement_lowbit(m);
  millrace::torch_ops::implement_packed(m);
}

}  // namespace

STABLE_TORCH_LIBRARY(millrace, m) {
  millrace::torch_ops::define_attention(m);
  millrace::torch_ops::define_fused(m);
  millrace::torch_ops::define_losses(m);
  millrace::torch_ops::define_products(m);
  millrace::torch_ops::define_experts(m);
  millrace::torch_ops::define_lowbit(m);
  millrace::torch_ops::define_packed(m);
}

STABLE_TORCH_LIBRARY_IMPL(millrace, CPU, m) { implement_all(m); }
#ifdef MILLRACE_KERNELS_CUDA
STABLE_TORCH_LIBRARY_IMPL(millrace, CUDA, m) { implement_all(m); }
#endif
