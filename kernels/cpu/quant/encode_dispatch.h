// Which encoders this machine can run, and which are used.
#pragma once

#include <span>

#include "kernels/cpu/quant/encode_table.h"

namespace millrace::quant {

// Best last; never empty.
std::span<const EncodeTable* const> runnable_encoders();

// The best of them, or the best that the instruction set MILLRACE_ISA names has ("avx512": avx2's).
const EncodeTable& best_encoders();

}  // namespace millrace::quant
