// One function per scheme: the weight that these tensors store, of so many rows and columns. Internal to
// quantized_weights; quantized_weight.cpp chooses.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "model/quantized_weights/parts.h"
#include "model/quantized_weights/quantized_weight.h"

namespace millrace {

// X.qweight, X.qzeros, X.scales and, in most files, X.g_idx.
QuantizedWeight read_gptq(const Parts& parts, const nlohmann::json& config, int64_t rows, int64_t cols);
// X.qweight, X.qzeros, X.scales in the layout "gemm".
QuantizedWeight read_awq(const Parts& parts, const nlohmann::json& config, int64_t rows, int64_t cols);
// compressed-tensors' pack-quantized: X.weight_packed of I32.
QuantizedWeight read_packed_integers(const Parts& parts, const nlohmann::json& config, int64_t rows,
                                     int64_t cols);
// Its int-quantized: X.weight of I8.
QuantizedWeight read_int8(const Parts& parts, const nlohmann::json& config, int64_t rows, int64_t cols);
// nvfp4-pack-quantized and mxfp4-pack-quantized: X.weight_packed of U8; ModelOpt's NVFP4: X.weight of U8.
QuantizedWeight read_packed_floats(const Parts& parts, const nlohmann::json& config, int64_t rows,
                                   int64_t cols);
// bitsandbytes: X.weight of U8 with a quant_state (NF4, FP4), of I8 with X.SCB (LLM.int8).
QuantizedWeight read_bitsandbytes_4bit(const Parts& parts, const nlohmann::json& config, int64_t rows,
                                       int64_t cols);
QuantizedWeight read_bitsandbytes_int8(const Parts& parts, const nlohmann::json& config, int64_t rows,
                                       int64_t cols);

}  // namespace millrace
