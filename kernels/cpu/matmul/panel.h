// Where a row of activations lies.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline const uint8_t* panel_row(const Panel& x, int64_t m) {
  return x.data + (x.index != nullptr ? x.index[m] : m) * x.row_bytes;
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
