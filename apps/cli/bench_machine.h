// What the machine can do at most, measured in the same run as the model: the limits its speed is held
// against.
#pragma once

#include "backend/backend.h"

namespace millrace::cli {

// Read bandwidth of the backend's threads over memory far larger than any cache; the best of several passes,
// as every disturbance only slows one down. In GB/s (1e9).
double measure_read_gb_s(Backend& backend);

}  // namespace millrace::cli
