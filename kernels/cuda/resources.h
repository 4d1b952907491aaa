// The CUDA runtime behind RAII: Stream, Event, DeviceBuffer, PinnedBuffer; and the two checks through which
// every call and every launch goes. What is made here belongs to the GPU that is current on the calling
// thread (Device::use).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace millrace::cuda {

// Throws Error{kDevice} (Error{kNoMemory} when memory ran out) naming the call, unless it succeeded.
void check_call(cudaError_t status, const char* call);
// After every <<<>>>: a launch that was refused throws, naming the kernel. A kernel that fails while running
// shows at the next call that waits for it.
void check_launch(const char* kernel);

#define MILLRACE_CUDA_TRY(call) ::millrace::cuda::check_call((call), #call)

class Event;

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void synchronize() const;
  void wait_for(const Event& event)
      const;  // what is launched after this call starts after what the event was recorded behind

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(const Stream& stream);
  void wait() const;  // for what was recorded last; at once when nothing was
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Memory of one kind, owned. Empty when default-made or made with 0 bytes; move-only.
template <class Allocator>
class Memory {
 public:
  Memory() = default;
  // `what` names the memory in the message when there is too little of it.
  Memory(size_t bytes, const char* what)
      : data_(bytes == 0 ? nullptr : Allocator::allocate(bytes, what)), bytes_(bytes) {}
  ~Memory() {
    if (data_ != nullptr) Allocator::release(data_);
  }
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

struct DeviceAllocator {
  static void* allocate(size_t bytes, const char* what);  // aligned to 256 bytes
  static void release(void* data) noexcept;
};
struct PinnedAllocator {
  static void* allocate(size_t bytes, const char* what);
  static void release(void* data) noexcept;
};
using DeviceBuffer = Memory<DeviceAllocator>;
using PinnedBuffer = Memory<PinnedAllocator>;  // host memory the device copies from and to without a detour

// "13.0": of the CUDA that the driver is for, and that this binary was built with.
std::string driver_version();
std::string runtime_version();

}  // namespace millrace::cuda
