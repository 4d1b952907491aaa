// Rows of an embedding table, looked up and dequantized.
#pragma once

#include "kernels/cpu/context.h"
#include "tensor/tensor_view.h"

namespace millrace::cpu {

// y[t] = table[tokens[t]] * scale, y: [rows][cols]. Tokens are rows of the table.
void embed_rows(const Context& ctx, const TensorView& table, const int32_t* tokens, int64_t rows, float scale,
                float* y);

}  // namespace millrace::cpu
