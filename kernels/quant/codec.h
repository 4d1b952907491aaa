// Scalar codecs of every weight type: one function each way, plainly written. The reference backend runs on
// them, every SIMD kernel is tested against them.
#pragma once

#include <cstdint>

#include "tensor/tensor_view.h"

namespace millrace::quant {

// `elements` values from `source` (a multiple of the type's block) as float32. Not for types with a separate
// scale grid (kF8E4M3, kMXFP4Split): use the row form.
void dequantize(DType type, const std::byte* source, float* out, int64_t elements);

// Row `row` of a weight (TensorView::row), cols() values, scale grids applied.
void dequantize_row(const TensorView& view, int64_t row, float* out);

// The other way, to nearest. For the types a file can be written in: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1
// mxfp4 q4_z iq4_nl nvfp4. Others throw Error{kUnsupported}.
void quantize(DType type, const float* source, std::byte* out, int64_t elements);

// Is this row free of NaN and infinite scales? False names a damaged file.
bool scales_are_finite(const TensorView& view, int64_t row);

}  // namespace millrace::quant
