// The kernels of torch.ops.millrace.* by their names: what the files of operations implement, for torch's
// dispatcher and for calls past it (direct_call.h). One table for the process, as torch's own registry is: it
// is filled while the library is loaded, and only read afterwards.
#include <map>
#include <string>

#include "tensors.h"

namespace {

std::map<std::string, millrace::torch_ops::BoxedKernel>& kernels() {
  static std::map<std::string, millrace::torch_ops::BoxedKernel> by_name;
  return by_name;
}

}  // namespace

void millrace::torch_ops::implement(torch::stable::detail::StableLibrary& m, const char* name,
                                    BoxedKernel kernel) {
  m.impl(name, kernel);
  kernels()[name] = kernel;
}

millrace::torch_ops::BoxedKernel millrace_torch_kernel(const char* name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : found->second;
}
