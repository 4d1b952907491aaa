// The link of ranks that have a GPU each, by NCCL.
#pragma once

#include <memory>
#include <string>

#include "backend/cuda/device_link.h"

namespace millrace::cuda {

// "2.28.3" of the NCCL that is found here, or why there is none.
struct NcclFound {
  std::string version;  // empty: there is none
  std::string fault;
};
NcclFound find_nccl();
// Collective; of ranks with a GPU each. Throws Error{kDevice}.
std::unique_ptr<DeviceLink> make_nccl_link(dist::Communicator& group, const Device& device);

}  // namespace millrace::cuda
