// The kernels of torch.ops.millrace.* by their names, for the module that calls them past torch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

namespace millrace::torch_ops {

// As torch's stable ABI has a kernel: takes its arguments off the stack and leaves its results there.
using BoxedKernel = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

}  // namespace millrace::torch_ops

// Null where no such kernel was implemented.
extern "C" __attribute__((visibility("default"))) millrace::torch_ops::BoxedKernel millrace_torch_kernel(
    const char* name);
