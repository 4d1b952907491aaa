#include "backend/cuda/gpu_energy.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

namespace millrace::cuda {
namespace {

constexpr int kSuccess = 0;  // NVML_SUCCESS

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

GpuEnergy::GpuEnergy(int gpu) {
  char bus_id[32] = {};
  if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, gpu) != cudaSuccess) {
    (void)cudaGetLastError();  // it is not the next launch's
    return;
  }
  bus_id_ = bus_id;
  library_ = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) return;
  int (*init)() = nullptr;
  int (*by_bus_id)(const char*, void**) = nullptr;
  if (!find(library_, "nvmlInit_v2", init) ||
      !find(library_, "nvmlDeviceGetHandleByPciBusId_v2", by_bus_id) ||
      !find(library_, "nvmlDeviceGetTotalEnergyConsumption", read_)) {
    return;
  }
  if (init() != kSuccess || by_bus_id(bus_id, &handle_) != kSuccess) handle_ = nullptr;
}

GpuEnergy::~GpuEnergy() {
  // What was initialized stays so: the library counts its users, and another one may be in this process.
  if (library_ != nullptr) ::dlclose(library_);
}

std::optional<double> GpuEnergy::joules() const {
  unsigned long long millijoules = 0;
  if (handle_ == nullptr || read_ == nullptr || read_(handle_, &millijoules) != kSuccess) return std::nullopt;
  return static_cast<double>(millijoules) * 1e-3;
}

}  // namespace millrace::cuda
