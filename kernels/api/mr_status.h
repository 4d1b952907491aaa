// The boundary of the C API: no exception crosses it. A call's body runs inside guarded(), and what it throws
// becomes a status and this thread's mr_last_error().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "millrace/kernels/device.h"

namespace millrace::api {

// Keeps the message of the exception that is being handled, and says which status it is.
mr_status status_of_exception() noexcept;

template <class Body>
mr_status guarded(Body&& body) noexcept {
  try {
    body();
    return MR_OK;
  } catch (...) {
    return status_of_exception();
  }
}

// Throws Error{kBadInput} naming the argument.
void require_pointer(const void* pointer, const char* name);
void require_aligned(const void* pointer, size_t alignment, const char* name);  // and not null
void allow_aligned(const void* pointer, size_t alignment, const char* name);    // or null
void require_finite(float value, const char* name);
// low <= value <= high
void require_range(int64_t value, int64_t low, int64_t high, const char* name);
// The same of an enumeration, which C lets a caller fill with any number: it is read as one.
template <class Enum>
void require_enum(const Enum& value, Enum low, Enum high, const char* name) {
  int32_t number;
  static_assert(sizeof number == sizeof value);
  std::memcpy(&number, &value, sizeof number);
  require_range(number, low, high, name);
}
// A workspace of `needed` bytes; Error{kNoMemory} where it is smaller. With needed 0 it may be null.
void require_workspace(const void* workspace, size_t bytes, size_t needed);

// Elements of an array that a caller describes; more than this is no array.
inline constexpr int64_t kMaxElements = int64_t{1} << 48;
// a * b, or Error{kBadInput} above kMaxElements. Both at least 0.
int64_t product(int64_t a, int64_t b, const char* name);

// 0 means: rows lie one after the other.
int64_t stride_or(int64_t stride, int64_t cols, const char* name);

inline constexpr size_t kWorkspaceAlignment = 256;

// A call that says no more than how many bytes something takes: needed(*device).
template <class Device, class Needed>
mr_status tell_bytes(Device* device, size_t* bytes, const Needed& needed) noexcept {
  return guarded([&] {
    require_pointer(device, "device");
    require_pointer(bytes, "bytes");
    *bytes = needed(*device);
  });
}

}  // namespace millrace::api
