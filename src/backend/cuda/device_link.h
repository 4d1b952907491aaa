// DeviceLink: how ranks gather what their GPUs made. Two kinds: `staged` goes through pinned memory of the
// host and any Communicator, and its calls wait for the stream; `nccl` is queued on the stream, GPU to GPU,
// and may be captured in a graph. Both copy bytes: no sum is a library's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "backend/backend.h"
#include "dist/communicator.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {

class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  virtual std::string name() const = 0;  // "staged over mpi", "nccl 2.28.3"
  // Calls wait for the stream and for the other ranks: not to be captured.
  virtual bool blocks() const = 0;
  // all[.. sum of counts): everybody's `mine`, in rank order; counts[r] values of rank r, which may be none.
  // On the device, `mine` not in `all`.
  virtual void all_gather(const float* mine, float* all, std::span<const int64_t> counts,
                          const Launch& at) = 0;
};

enum class LinkKind { kAuto, kStaged, kNccl };
// By MILLRACE_RANK_LINK: auto (or unset), staged, nccl. Throws Error{kBadInput} for another word.
LinkKind wanted_link();

// Collective. `most`: values that are gathered at once, of all ranks together. kAuto is NCCL where every rank
// has a GPU of its own and the library, else staged. Throws Error{kUnsupported} for kNccl where it is not to
// be had.
std::unique_ptr<DeviceLink> make_device_link(dist::Communicator& group, const Device& device, int64_t most,
                                             LinkKind kind);

// Collective: all_gathers of few and of many bytes.
DeviceLinkSpeed measure(DeviceLink& link, dist::Communicator& group, const Device& device);
inline constexpr int64_t kMeasuredValues = int64_t{1} << 22;  // of all ranks together

}  // namespace millrace::cuda
