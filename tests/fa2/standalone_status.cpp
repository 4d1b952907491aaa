// mr_last_error() of the small library that `make fa2-opt` builds; the whole library has its own.
#include <cstdio>

#include "kernels/cuda/resident/resident_error.h"

namespace {
thread_local char last_error[512] = "";
}

void millrace::cuda::resident::keep_last_error(const char* line) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", line);
}

extern "C" {

const char* mr_last_error(void) { return last_error; }

const char* mr_status_name(mr_status status) {
  switch (status) {
    case MR_OK:
      return "MR_OK";
    case MR_ERROR_INVALID:
      return "MR_ERROR_INVALID";
    case MR_ERROR_UNSUPPORTED:
      return "MR_ERROR_UNSUPPORTED";
    case MR_ERROR_NO_MEMORY:
      return "MR_ERROR_NO_MEMORY";
    case MR_ERROR_DEVICE:
      return "MR_ERROR_DEVICE";
    case MR_ERROR_INTERNAL:
      return "MR_ERROR_INTERNAL";
  }
  return "unknown status";
}
}
