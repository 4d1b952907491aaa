// Devices of the kernel library for callers on any thread. A device serves one thread at a time, so a call
// leases one and gives it back; the next call of the same kind finds it again with its threads awake.
#pragma once

#include <memory>
#include <string>

#include "millrace/kernels.h"

namespace millrace::bindings {

class DeviceLease {
 public:
  // A CPU device of so many threads (0: one per core this process may use).
  static DeviceLease cpu(int threads);
  // GPU `ordinal`; `stream` is where its work goes.
  static DeviceLease cuda(int ordinal, mr_stream stream);
  ~DeviceLease();
  DeviceLease(const DeviceLease&) = delete;
  DeviceLease& operator=(const DeviceLease&) = delete;

  mr_device* get() const { return device_; }
  mr_stream stream() const { return stream_; }
  // Host memory for the time of the lease, aligned to 256 bytes; it stays with the device, so that small
  // calls do not ask the system for pages every time. One at a time: a second call may move it.
  void* scratch(size_t bytes);

 private:
  DeviceLease(int kind, mr_stream stream);
  int kind_;  // threads of a CPU, or -1 - ordinal of a GPU
  mr_device* device_;
  mr_stream stream_;
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
  void* pool_;  // where it came from: a forked child has another one
};

// Throws std::runtime_error with mr_last_error() unless the status is MR_OK.
void check(mr_status status);

}  // namespace millrace::bindings
