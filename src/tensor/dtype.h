// DType: how the numbers of a tensor are stored. Every type is described by a block: so many elements in so
// many bytes; a plain type is a block of one. The byte layouts are in quant/blocks.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace millrace {

enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF8E4M3,  // one byte each; the tensor carries a scale grid (TensorView::scales)
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,  // GGUF blocks of 32
  kQ4_K,
  kQ5_K,
  kQ6_K,        // GGUF super-blocks of 256
  kMXFP4,       // GGUF layout: blocks of 32 in 17 bytes, the e8m0 scale first
  kMXFP4Split,  // Hugging Face layout: 16-byte nibble blocks here, the e8m0 scales in TensorView::scales
  kQ4_Z,        // our own: blocks of 32 in 18 bytes, a short scale and a zero point between the codes
  kQ2_K,
  kQ3_K,    // GGUF super-blocks of 256
  kIQ4_NL,  // GGUF blocks of 32, levels that are not evenly apart
  kIQ4_XS,  // the same levels in super-blocks of 256
  kIQ3_XXS,
  kIQ3_S,
  kIQ2_XXS,
  kIQ2_XS,
  kIQ2_S,
  kIQ1_S,
  kIQ1_M,  // GGUF super-blocks of 256 whose codes are entries of a codebook (quant/codebooks.h)
  kTQ1_0,
  kTQ2_0,  // GGUF super-blocks of 256, three levels
  kNVFP4,  // GGUF: blocks of 64 in 36 bytes, an e4m3 scale per 16
  kI32,
  kU8,  // indices and raw bytes: never weights of a matrix product
};

struct DTypeInfo {
  std::string_view name;  // as printed and as parsed: "q4_k"
  int block_elements;
  int block_bytes;
};

const DTypeInfo& info(DType type);
std::optional<DType> parse_dtype(std::string_view name);

// Bytes of `elements` contiguous elements; elements must be a multiple of the block.
inline size_t bytes_of(DType type, int64_t elements) {
  const DTypeInfo& i = info(type);
  return static_cast<size_t>(elements / i.block_elements) * static_cast<size_t>(i.block_bytes);
}

}  // namespace millrace
