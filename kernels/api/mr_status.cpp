#include "kernels/api/mr_status.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <new>

namespace millrace::api {
namespace {

// The only state outside handles: a message per thread, in memory that needs no allocation.
constexpr size_t kMaxMessage = 512;
thread_local char last_error[kMaxMessage] = "";

void keep(const char* message) noexcept { std::snprintf(last_error, kMaxMessage, "%s", message); }

mr_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kBadInput:
      return MR_ERROR_INVALID;
    case ErrorCode::kUnsupported:
      return MR_ERROR_UNSUPPORTED;
    case ErrorCode::kNoMemory:
      return MR_ERROR_NO_MEMORY;
    case ErrorCode::kDevice:
      return MR_ERROR_DEVICE;
    case ErrorCode::kIo:
    case ErrorCode::kBusy:
    case ErrorCode::kInternal:
      break;
  }
  return MR_ERROR_INTERNAL;
}

}  // namespace

mr_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    keep(error.what());
    return status_of(error.code());
  } catch (const std::bad_alloc&) {
    keep("out of host memory");
    return MR_ERROR_NO_MEMORY;
  } catch (const std::exception& error) {
    keep(error.what());
  } catch (...) {
    keep("an exception of unknown type");
  }
  return MR_ERROR_INTERNAL;
}

void require_pointer(const void* pointer, const char* name) {
  if (pointer == nullptr) throw_error(ErrorCode::kBadInput, "{} is NULL", name);
}

void require_aligned(const void* pointer, size_t alignment, const char* name) {
  require_pointer(pointer, name);
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    throw_error(ErrorCode::kBadInput, "{} is {}, expected a multiple of {} bytes", name, fmt::ptr(pointer),
                alignment);
  }
}

void allow_aligned(const void* pointer, size_t alignment, const char* name) {
  if (pointer != nullptr) require_aligned(pointer, alignment, name);
}

void require_finite(float value, const char* name) {
  if (!std::isfinite(value)) throw_error(ErrorCode::kBadInput, "{} is {}, expected a number", name, value);
}

void require_range(int64_t value, int64_t low, int64_t high, const char* name) {
  if (value < low || value > high) {
    throw_error(ErrorCode::kBadInput, "{} is {}, expected {} to {}", name, value, low, high);
  }
}

void require_workspace(const void* workspace, size_t bytes, size_t needed) {
  if (needed == 0) return;
  require_aligned(workspace, kWorkspaceAlignment, "workspace");
  if (bytes < needed) {
    throw_error(ErrorCode::kNoMemory, "workspace has {} bytes, expected at least {}", bytes, needed);
  }
}

int64_t product(int64_t a, int64_t b, const char* name) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result) || result > kMaxElements) {
    throw_error(ErrorCode::kBadInput, "{} are {} x {} elements, expected at most {}", name, a, b,
                kMaxElements);
  }
  return result;
}

int64_t stride_or(int64_t stride, int64_t cols, const char* name) {
  if (stride == 0) return cols;
  require_range(stride, cols, kMaxElements, name);
  return stride;
}

}  // namespace millrace::api

extern "C" {

const char* mr_last_error(void) { return millrace::api::last_error; }

const char* mr_version(void) { return MILLRACE_VERSION; }

}  // extern "C"
