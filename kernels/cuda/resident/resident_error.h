// How the resident decode fails: one exception type inside, a status and a line at its C boundary. It needs
// nothing of the rest of the tree, so that it builds as a library of its own.
#pragma once

#include <cuda_runtime.h>

#include <new>
#include <stdexcept>
#include <string>

#include "millrace/kernels/device.h"

namespace millrace::cuda::resident {

class ResidentError : public std::runtime_error {
 public:
  ResidentError(mr_status status, const std::string& line) : std::runtime_error(line), status_(status) {}
  mr_status status() const { return status_; }

 private:
  mr_status status_;
};

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // an error that is no fault of the device does not stay for the next call
  throw ResidentError(error == cudaErrorMemoryAllocation ? MR_ERROR_NO_MEMORY : MR_ERROR_DEVICE,
                      std::string(call) + ": " + cudaGetErrorString(error));
}
inline void require_pointer(const void* pointer, const char* call, const char* name) {
  if (pointer == nullptr) throw ResidentError(MR_ERROR_INVALID, std::string(call) + ": " + name + " is NULL");
}
inline void require_range(int64_t value, int64_t low, int64_t high, const char* call, const char* name) {
  if (value >= low && value <= high) return;
  throw ResidentError(MR_ERROR_INVALID, std::string(call) + ": " + name + " is " + std::to_string(value) +
                                            ", expected " + std::to_string(low) + " to " +
                                            std::to_string(high));
}

// Keeps this thread's mr_last_error(). The whole library has its own, the small one brings one.
void keep_last_error(const char* line) noexcept;

template <class Body>
mr_status guarded(Body&& body) noexcept {
  try {
    body();
    return MR_OK;
  } catch (const ResidentError& error) {
    keep_last_error(error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    keep_last_error("out of host memory");
    return MR_ERROR_NO_MEMORY;
  } catch (const std::exception& error) {
    keep_last_error(error.what());
    return MR_ERROR_INTERNAL;
  }
}

}  // namespace millrace::cuda::resident
