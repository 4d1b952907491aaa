// A file's table of variants (backend/tuning.h) as the choice that launches look up
// (kernels/cuda/variants.h).
#pragma once

#include "backend/tuning.h"
#include "kernels/cuda/variants.h"

namespace millrace::cuda {

// Throws Error{kBadInput} for a kernel, format or choice there is not.
Tuning read_tuning(const TuningTable& table);

}  // namespace millrace::cuda
