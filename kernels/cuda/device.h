// One GPU as an object. A Device is made by whoever opens a GPU (a backend, a test) and passed by reference
// to everything that launches: what a launcher must know of the GPU (its SMs, its shared memory, which
// kernels its code has, the tuning in use) it asks the Device, and nothing of it is process-wide. Any number
// of Devices, of one GPU or of several, live in one process.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/cuda/grid_claim.h"
#include "kernels/cuda/resources.h"
#include "kernels/cuda/variants.h"

namespace millrace::cuda {

struct DeviceInfo {
  std::string name;                         // "NVIDIA H200"
  std::string architecture;                 // "sm_90"
  size_t memory_bytes = 0, free_bytes = 0;  // free: when it was opened
};

class Device {
 public:
  // A GPU of those that CUDA_VISIBLE_DEVICES leaves, current on the calling thread from here on. Throws
  // Error{kDevice}, one line each: no driver, a driver too old for this binary, no such GPU, a GPU this
  // binary has no code for.
  static Device open(int gpu) { return Device(gpu); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Makes it current on the calling thread: every thread begins with GPU 0, and may have used another since.
  void use() const;

  // How many GPUs there are. Throws Error{kDevice} as open() does where there is none.
  static int count();

  int ordinal() const { return ordinal_; }
  // Which GPU it is, whatever its number: 32 hexadecimal digits.
  std::string uuid_text() const;
  const DeviceInfo& info() const { return info_; }
  int sm_count() const { return sm_count_; }
  // Shared memory that a CTA may have, in bytes.
  uint32_t max_shared_memory() const { return max_shared_memory_; }
  // The architecture of the code that runs on it, 90 for sm_90: of the PTX where the driver translates that.
  int code_architecture() const { return code_architecture_; }
  // Whether GPU and code have bulk copies, barriers that count bytes, clusters and programmatic launches (9.0
  // and later). Kernels that need one of them are empty in code for older GPUs and must not be launched
  // there.
  bool has_bulk_copies() const { return has_bulk_copies_; }
  // Whether GPU and code have warpgroup products, for everything that multiplies many rows.
  bool has_wgmma() const { return has_wgmma_; }
  // The driver's cuTensorMapEncodeTiled, which makes the maps of ptx/tensor_map.cuh; null without bulk
  // copies.
  void* tensor_map_encoder() const { return tensor_map_encoder_; }

  // The kernels' variants that launches choose, from here on; not while a step is launched.
  const Tuning& tuning() const { return tuning_; }
  void use_tuning(Tuning tuning) { tuning_ = std::move(tuning); }

  // The right to launch kernels whose CTAs wait for one another, if nobody in this process has it for this
  // GPU; see grid_claim.h.
  GridClaim claim_grid() const { return GridClaim(uuid_); }

 private:
  explicit Device(int gpu);

  int ordinal_;
  DeviceInfo info_;
  GpuUuid uuid_{};
  int sm_count_ = 0;
  uint32_t max_shared_memory_ = 0;
  int code_architecture_ = 0;
  bool has_bulk_copies_ = false, has_wgmma_ = false;
  void* tensor_map_encoder_ = nullptr;
  Tuning tuning_;
};

// Where a kernel goes: the last parameter of every launcher. The device is current on the calling thread.
struct Launch {
  const Device& device;
  cudaStream_t stream;
};

}  // namespace millrace::cuda
