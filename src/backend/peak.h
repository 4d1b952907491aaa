// The peak of the machine's arithmetic: what the instructions of an instruction set do when nothing waits for
// memory. The denominator of `millrace bench --roofline`.
#pragma once

#include <optional>

#include "backend/backend.h"

namespace millrace {

// In operations per second of all the backend's threads together; a multiply-add counts two. Nothing where
// the backend's instruction set has none here.
struct Peak {
  std::optional<double> int8_dot, float_fma;
  const char* int8_instruction = "";
  std::optional<double> bf16_tile;  // AMX: what products of 4-bit floats use
};

// Some tenths of a second; the best of several passes, as every disturbance only slows one down.
Peak measure_peak(Backend& backend);

}  // namespace millrace
