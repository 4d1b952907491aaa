// GPUs in a build that has none behind the C API.
#include "kernels/api/mr_device.h"

namespace millrace::api {

std::unique_ptr<mr_device> open_cuda_device(int ordinal) {
  throw_error(ErrorCode::kDevice, "device: cuda:{} is not to be had, this build of the C API has no CUDA",
              ordinal);
}

}  // namespace millrace::api
