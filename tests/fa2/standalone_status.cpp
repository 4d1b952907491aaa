// mr_last_error() of the small library that `make fa2-opt` builds; the whole library has its own.
#include <cstdio>

#include "kernels/cuda/resident/resident_error.h"

namespace {
thread_local char last_error[512] = "";
}

void millrace::cuda::resident::keep_last_error(const char* line) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", line);
}

extern "C" const char* mr_last_error(void) { return last_error; }
