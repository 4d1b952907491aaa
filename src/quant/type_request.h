// What a user asks of a quantization, and which type each tensor gets for it. Used by `millrace quantize` and
// by quantization on load alike, so that both give the same model.
//
//   norms, biases, sinks, routers   f32: they are small and everything passes through them
//   matrices, experts               the type asked for
//   token_embd, where it is looked up only        the type asked for
//   output, and token_embd where it serves as it  q6_k for types below it, else the type asked for: its
//                                                 errors reach the logits with nothing to average them
// Rows that do not fill a type's blocks take the next type that fits: q4_k -> q4_1, q5_k -> q5_1, q6_k ->
// q8_0, q2_k, q3_k and iq4_xs -> iq4_nl (rows not in 256s), nvfp4 -> iq4_nl (rows not in 64s), and every
// block type -> f16 (rows not in 32s).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tensor/tensor_view.h"

namespace millrace::quant {

// What a tensor is for, by its GGUF name.
enum class Part { kSmall, kMatrix, kEmbedding, kOutput };
// "blk.3.ffn_down.weight", "token_embd.weight". `tied`: the model has no output matrix but its embedding.
Part part_of(std::string_view name, const TensorView& view, bool tied);

struct TypeRequest {
  DType type = DType::kQ8_0;
  DType output_type = DType::kQ8_0;  // of Part::kOutput
  // int8, int4: what the source stores in no more bits stays as it is.
  bool keep_smaller = false;
};

// "q8_0" and every other type that can be written; "int8" is q8_0, "int4" is q4_k: of our 4-bit types the one
// of least error per bit on weights (4.5 bits; where rows are no multiple of 256 q4_1, 5 bits, has the
// least). Throws Error{kBadInput} listing the known names; `option` names where it was given.
TypeRequest parse_request(std::string_view option, std::string_view name, bool knows_auto = true);
std::string request_names();  // "q8_0 q6_k ... int8 int4"

// The type that rows of `cols` get when `wanted` does not fit them.
DType fitting_type(DType wanted, int64_t cols);
// The type of this tensor in a GGUF file made for `request`.
DType target_type(const TypeRequest& request, std::string_view name, const TensorView& view, bool tied);

double bits_per_weight(DType type);

}  // namespace millrace::quant
