// The seam between models and the ways a Hugging Face directory stores quantized weights: "is the logical
// [rows, cols] weight NAME stored packed, and in which of our types is every value of it exact?" Each scheme
// (GPTQ, AWQ, compressed-tensors, bitsandbytes) is a file of its own that answers with a QuantizedWeight.
//
// The value of a weight is what its scheme defines, computed in float32 from the numbers in the file: for
// integer codes (code - zero) * scale. Nothing is rounded to 16 bits in between, but where the scheme itself
// says so (bitsandbytes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "io/checkpoint.h"
#include "tensor/dtype.h"

namespace millrace {

// Rows of a weight that is not stored in a type of ours.
class RowReader {
 public:
  virtual ~RowReader() = default;
  // Rows [first, first + count) in `type`, one after the other: QuantizedWeight::type, or kF32, which every
  // reader writes. Any number of threads at once.
  virtual void read(DType type, int64_t first, int64_t count, std::byte* out) const = 0;
};

struct QuantizedWeight {
  // Rows a thread takes at a time: packed words hold neighbours along either side, and a cache line of them
  // is then read once.
  static constexpr int64_t kRowsAtOnce = 64;

  std::string name;    // of the tensor with the codes, for messages
  std::string scheme;  // "gptq, 4 bits": for notes
  DType type = DType::kF32;
  std::shared_ptr<const RowReader> rows;
};

// `weight` is the name the unquantized tensor would have, "model.layers.0.mlp.up_proj.weight". Nothing: the
// weight is not packed (but may be there under its name: floats, FP8). Throws Error naming the tensor for
// parts that are missing or of a wrong shape, and for schemes that cannot be read.
std::optional<QuantizedWeight> find_quantized(const io::Checkpoint& checkpoint, const std::string& weight,
                                              int64_t rows, int64_t cols);

// Whether the checkpoint has this weight in any form.
bool has_weight(const io::Checkpoint& checkpoint, const std::string& weight);

// Throws Error{kUnsupported} for a directory whose config.json says that its numbers need more than its
// tensors (rotated activations, another packing): to be asked once before any weight is.
void check_quantization(const io::Checkpoint& checkpoint);

}  // namespace millrace
