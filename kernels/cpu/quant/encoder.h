// Encoders: float32 rows into the block types, with the scale of every block searched for the least error.
// quant/codec.h has the plain round-to-nearest forms that tests and oracles compare with.
//
// Where all columns count alike the search is in integers, written for each instruction set (encode_table.h);
// with weights it is in float (fit_weighted.h), some ten roundings per value. Blocks are independent, so
// callers cut tensors by rows and give them to all threads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "tensor/dtype.h"

namespace millrace::quant {

// The types encode_rows writes, in the order they are offered.
std::span<const DType> encodable_types();
bool can_encode(DType type);

// `num_rows` rows of `cols` finite values (cols a multiple of the type's block) into `out`, rows one after
// the other. `importance` [cols], or absent: the weight of an error in each column, such as the mean square
// of what the column is multiplied with. Throws Error{kUnsupported} for a type that cannot be written.
void encode_rows(DType type, const float* x, int64_t num_rows, int64_t cols, const float* importance,
                 std::byte* out);

// Sums of squares: of what the codes miss, and of the values.
struct EncodeError {
  double error = 0.0, total = 0.0;
};

// `count` values (whole blocks) that count alike, and what that costs. The same bytes as encode_rows()
// without importance; nothing is done for the types that have no such encoder (f32, q4_z, and those
// of encoder_levels.h).
std::optional<EncodeError> encode_alike(DType type, const float* x, int64_t count, std::byte* out);

// Values of a type that needs no tensor around it, as float32; false if one is NaN or infinite.
bool widen(DType type, const std::byte* x, int64_t count, float* out);

// Are all finite? A vector loop; encoders and their callers refuse what is not.
bool all_finite(const float* x, int64_t count);

}  // namespace millrace::quant
