// Encoders: float32 rows into the block types, with the scale of every block searched for the least weighted
// error (fit.h). quant/codec.h has the plain round-to-nearest forms that tests and oracles compare with.
//
// Speed on one core is that of a search: some ten roundings per value for the 4- and 6-bit types; f16, bf16
// and q8_0 take one pass. Blocks are independent, so callers cut tensors by rows and give them to all
// threads.
#pragma once

#include <cstdint>
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

// Are all finite? A vector loop; encoders and their callers refuse what is not.
bool all_finite(const float* x, int64_t count);

}  // namespace millrace::quant
