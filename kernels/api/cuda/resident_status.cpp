// The resident decode's errors in the whole library: this thread's mr_last_error().
#include "kernels/api/mr_status.h"
#include "kernels/cuda/resident/resident_error.h"

void millrace::cuda::resident::keep_last_error(const char* line) noexcept {
  api::guarded([&] { throw Error(ErrorCode::kDevice, line); });  // its status is the caller's
}
