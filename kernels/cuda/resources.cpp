#include "kernels/cuda/resources.h"

#include "base/error.h"

namespace millrace::cuda {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

[[noreturn]] void throw_no_memory(size_t bytes, const char* what) {
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  cudaGetLastError();
  throw_error(ErrorCode::kNoMemory,
              "device cuda: {} needs {:.2f} GiB, found {:.2f} GiB free of the GPU's {:.2f} GiB", what,
              static_cast<double>(bytes) / kGiB, static_cast<double>(free) / kGiB,
              static_cast<double>(total) / kGiB);
}

}  // namespace

void check_call(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // forget it: the next call reports its own
  throw_error(status == cudaErrorMemoryAllocation ? ErrorCode::kNoMemory : ErrorCode::kDevice,
              "device cuda: {} failed: {} ({})", call, cudaGetErrorString(status), cudaGetErrorName(status));
}

void check_launch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw_error(ErrorCode::kDevice, "device cuda: launch of {} failed: {} ({})", kernel,
              cudaGetErrorString(status), cudaGetErrorName(status));
}

Stream::Stream() { MILLRACE_CUDA_TRY(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
Stream::~Stream() { cudaStreamDestroy(stream_); }
void Stream::synchronize() const { MILLRACE_CUDA_TRY(cudaStreamSynchronize(stream_)); }
void Stream::wait_for(const Event& event) const {
  MILLRACE_CUDA_TRY(cudaStreamWaitEvent(stream_, event.get(), 0));
}

Event::Event() { MILLRACE_CUDA_TRY(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
Event::~Event() { cudaEventDestroy(event_); }
void Event::record(const Stream& stream) { MILLRACE_CUDA_TRY(cudaEventRecord(event_, stream.get())); }
void Event::wait() const { MILLRACE_CUDA_TRY(cudaEventSynchronize(event_)); }

void* DeviceAllocator::allocate(size_t bytes, const char* what) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) throw_no_memory(bytes, what);
  check_call(status, "cudaMalloc");
  return data;
}
void DeviceAllocator::release(void* data) noexcept { cudaFree(data); }

void* PinnedAllocator::allocate(size_t bytes, const char* what) {
  void* data = nullptr;
  const cudaError_t status = cudaMallocHost(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw_error(ErrorCode::kNoMemory,
                "device cuda: {} needs {:.2f} GiB of pinned host memory, which was refused", what,
                static_cast<double>(bytes) / kGiB);
  }
  check_call(status, "cudaMallocHost");
  return data;
}
void PinnedAllocator::release(void* data) noexcept { cudaFreeHost(data); }

std::string driver_version() {
  int version = 0;
  MILLRACE_CUDA_TRY(cudaDriverGetVersion(&version));
  return version_text(version);
}
std::string runtime_version() {
  int version = 0;
  MILLRACE_CUDA_TRY(cudaRuntimeGetVersion(&version));
  return version_text(version);
}

}  // namespace millrace::cuda
