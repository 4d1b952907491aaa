#include "kernels/cuda/device.h"

#include <algorithm>

#include "base/error.h"
#include "kernels/cuda/code.h"

namespace millrace::cuda {
namespace {

// How many GPUs there are.
int check_driver() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    cudaGetLastError();
    throw_error(ErrorCode::kDevice,
                "device cuda: found no NVIDIA driver, expected one for CUDA {}; use --device cpu here",
                runtime_version());
  }
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    throw_error(ErrorCode::kDevice,
                "device cuda: the NVIDIA driver is for CUDA {}, this binary needs {} or later",
                driver_version(), runtime_version());
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

Device::Device(int gpu) : ordinal_(gpu) {
  const int count = check_driver();
  if (gpu < 0 || gpu >= count) {
    throw_error(ErrorCode::kDevice, "device cuda:{}: found {} GPU{}, expected cuda:0 to cuda:{}", gpu, count,
                count == 1 ? "" : "s", count - 1);
  }
  use();
  cudaDeviceProp properties{};
  MILLRACE_CUDA_TRY(cudaGetDeviceProperties(&properties, gpu));
  info_ = {properties.name, fmt::format("sm_{}{}", properties.major, properties.minor),
           properties.totalGlobalMem};
  size_t total = 0;
  MILLRACE_CUDA_TRY(cudaMemGetInfo(&info_.free_bytes, &total));
  if (!has_code_for_device()) {
    throw_error(ErrorCode::kDevice, "device cuda: the GPU ({}) is {}, this binary has code for {}",
                info_.name, info_.architecture, MILLRACE_CUDA_ARCHITECTURES);
  }
  std::copy_n(reinterpret_cast<const unsigned char*>(properties.uuid.bytes), uuid_.size(), uuid_.begin());
  sm_count_ = properties.multiProcessorCount;
  max_shared_memory_ = static_cast<uint32_t>(properties.sharedMemPerBlockOptin);
  code_architecture_ = cuda::code_architecture();
  has_bulk_copies_ = properties.major >= 9 && code_architecture_ >= 90;  // not made from code for older ones
  has_wgmma_ = code_has_wgmma();
  if (has_bulk_copies_) {
    cudaDriverEntryPointQueryResult found{};
    MILLRACE_CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &tensor_map_encoder_, 12000,
                                                       cudaEnableDefault, &found));
  }
}

int Device::count() { return check_driver(); }

std::string Device::uuid_text() const {
  std::string text;
  for (const unsigned char byte : uuid_) text += fmt::format("{:02x}", byte);
  return text;
}

void Device::use() const { MILLRACE_CUDA_TRY(cudaSetDevice(ordinal_)); }

}  // namespace millrace::cuda
