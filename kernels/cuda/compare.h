// Comparing two results word by word, as autotuning does with its candidates.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

// Adds to *count how many of `words` words differ: for comparing what two kernels wrote.
void launch_count_differences(const void* a, const void* b, int64_t words, uint64_t* count, const Launch& at);

}  // namespace millrace::cuda
