// Random weights straight in their stored form: block bytes are drawn, not quantized, so that writing a model
// is as fast as its disk. Scales are chosen so that values spread like `sigma`, which keeps activations sane.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace millrace::cli {

// Can fill_random make this type?
bool can_fill(DType type);

// Fills whole blocks. The same (seed, piece) gives the same bytes.
void fill_random(DType type, double sigma, uint64_t seed, uint64_t piece, std::byte* out, size_t bytes);

}  // namespace millrace::cli
