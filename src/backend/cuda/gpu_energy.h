// Energy that a GPU has used, by NVIDIA's management library, which comes with the driver and is loaded when
// a counter is made: no build needs it.
#pragma once

#include <optional>
#include <string>

namespace millrace::cuda {

class GpuEnergy {
 public:
  // Of the GPU with this number among those that CUDA sees.
  explicit GpuEnergy(int gpu);
  ~GpuEnergy();
  GpuEnergy(const GpuEnergy&) = delete;
  GpuEnergy& operator=(const GpuEnergy&) = delete;
  // Joules since the driver was loaded; nothing: there is no such library, or the GPU has no counter (Volta
  // was the first with one). Any thread.
  std::optional<double> joules() const;
  const std::string& bus_id() const { return bus_id_; }  // "00000000:3B:00.0"

 private:
  void* library_ = nullptr;
  void* handle_ = nullptr;
  int (*read_)(void* device, unsigned long long* millijoules) = nullptr;
  std::string bus_id_;
};

}  // namespace millrace::cuda
