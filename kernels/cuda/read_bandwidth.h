// How fast this GPU's memory is read: the limit that `millrace bench --roofline` compares with.
#pragma once

#include "kernels/cuda/device.h"

namespace millrace::cuda {

// Bytes a second: the best of several passes over memory that no cache holds. Waits for the stream. Throws
// Error{kNoMemory} without some free memory.
double measure_read_bandwidth(const Launch& at);

}  // namespace millrace::cuda
