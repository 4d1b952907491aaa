// The greedy token of each row of logits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

// best[r]: the index of the largest of logits[r, :], the lowest among equals; -1 when one of them is NaN, -2
// when none is above -infinity.
// Floor: 4 vocab * rows / B. `candidates`: argmax_candidates_bytes().
void launch_argmax(const float* logits, int64_t rows, int64_t vocab, void* candidates, int32_t* best,
                   const Launch& at);
size_t argmax_candidates_bytes(int64_t rows);

}  // namespace millrace::cuda
