// Stands in for cuda/ in a build without nvcc.
#include "backend/cuda_backend.h"
#include "base/error.h"

namespace millrace {

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions&, int) {
  throw_error(
      ErrorCode::kUnsupported,
      "device cuda: this binary was built without CUDA; build it with `make cuda` where nvcc is installed, "
      "or use --device cpu");
}

}  // namespace millrace
