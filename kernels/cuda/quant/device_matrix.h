// A weight matrix on the device in the encoding that its file has.
#pragma once

#include <cstdint>

#include "tensor/dtype.h"

namespace millrace::cuda {

// A weight matrix in the file's own encoding, rows packed: [experts * rows][row_bytes].
struct DeviceMatrix {
  const uint8_t* data = nullptr;
  int64_t rows = 0;  // of one expert
  int64_t cols = 0;
  int64_t row_bytes = 0;
  DType type = DType::kF32;
  // Scales beside the values (kF8E4M3, kMXFP4Split), packed: [grid rows][scales_per_row]; null without.
  DType scale_type = DType::kU8;
  const uint8_t* scales = nullptr;
  int64_t rows_per_scale = 1;
  int64_t cols_per_scale = 32;
  int64_t scales_per_row = 0;
  // Of the IQ types with indices (kernels/quant/codebooks.h): [entries][8, or 4 of IQ3].
  const int8_t* codebook = nullptr;
};

}  // namespace millrace::cuda
