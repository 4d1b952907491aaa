// A file's table of variants (backend/tuning.h) as the choice that launches look up (kernels/cuda/tuning.h).
#pragma once

#include "backend/tuning.h"
#include "kernels/cuda/tuning.h"

namespace millrace::cuda {

// Throws Error{kBadInput} for a kernel, format or choice there is not.
Tuning read_tuning(const TuningTable& table);

}  // namespace millrace::cuda
