#include "kernels/cuda/device.h"

#include <atomic>

#include "base/error.h"
#include "kernels/cuda/ops.h"

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

std::atomic<int> opened_gpu{0};

// How many GPUs there are.
int check_driver() {
  int driver = 0, runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    cudaGetLastError();
    throw_error(ErrorCode::kDevice,
                "device cuda: found no NVIDIA driver, expected one for CUDA {}; use --device cpu here",
                version_text(runtime));
  }
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    throw_error(ErrorCode::kDevice,
                "device cuda: the NVIDIA driver is for CUDA {}, this binary needs {} or later",
                version_text(driver), version_text(runtime));
  }
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) {
    cudaGetLastError();
    throw_error(ErrorCode::kDevice,
                "device cuda: found no GPU (CUDA_VISIBLE_DEVICES may hide it), expected one");
  }
  check_call(status, "cudaGetDeviceCount(&count)");
  return count;
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

namespace {
int attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  MILLRACE_CUDA_TRY(cudaGetDevice(&device));
  MILLRACE_CUDA_TRY(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
}  // namespace

bool has_bulk_copies() {
  static const bool has = attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9 &&
                          code_architecture() >= 90;  // and not made from code for older ones
  return has;
}

uint32_t most_shared_memory() {
  static const auto bytes =
      static_cast<uint32_t>(attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  return bytes;
}

void use_device() {
  thread_local int current = -1;
  const int wanted = opened_gpu.load(std::memory_order_relaxed);
  if (current == wanted) return;
  MILLRACE_CUDA_TRY(cudaSetDevice(wanted));
  current = wanted;
}

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

DeviceInfo open_device(int gpu) {
  const int count = check_driver();
  if (gpu >= count) {
    throw_error(ErrorCode::kDevice, "device cuda:{}: found {} GPU{}, expected cuda:0 to cuda:{}", gpu, count,
                count == 1 ? "" : "s", count - 1);
  }
  opened_gpu = gpu;
  use_device();
  cudaDeviceProp properties{};
  MILLRACE_CUDA_TRY(cudaGetDeviceProperties(&properties, gpu));
  DeviceInfo device{properties.name, fmt::format("sm_{}{}", properties.major, properties.minor),
                    properties.totalGlobalMem};
  size_t total = 0;
  MILLRACE_CUDA_TRY(cudaMemGetInfo(&device.free_bytes, &total));
  if (!has_code_for_device()) {
    throw_error(ErrorCode::kDevice, "device cuda: the GPU ({}) is {}, this binary has code for {}",
                device.name, device.architecture, MILLRACE_CUDA_ARCHITECTURES);
  }
  return device;
}

}  // namespace millrace::cuda
