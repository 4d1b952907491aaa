// Times the variants of kernels that kernels/cuda/variants.h names for the shapes of a model.
#pragma once

#include <span>

#include "backend/tuning.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {

// `target`: what the table is for. A variant whose result differs from the built-in choice's by one bit is
// left out, and so is one that is not worth its change: less than 2% faster.
TuningTable autotune(const Device& device, const TuningTarget& target, std::span<const TuningShape> shapes,
                     const AutotuneProgress& progress);

// The names of times that belong to no candidate: it gave other bits.
inline constexpr const char* kOtherBits = " (other bits)";

}  // namespace millrace::cuda
