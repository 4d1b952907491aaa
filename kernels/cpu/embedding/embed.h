// Rows of an embedding table, looked up and dequantized.
#pragma once

#include <functional>

#include "kernels/cpu/context.h"
#include "tensor/tensor_view.h"

namespace millrace::cpu {

// x[t] += positions[position of t] + types[type of t], x: [rows][cols]; either may be absent. scratch: as
// large as x.
void add_position_rows(const Context& ctx, const TensorView* positions, const TensorView* types,
                       const int32_t* position_of, const std::function<int64_t(int64_t)>& type_of,
                       int64_t rows, int64_t cols, float* x, float* scratch);

// y[t] = table[tokens[t]] * scale, y: [rows][cols]. Tokens are rows of the table.
void embed_rows(const Context& ctx, const TensorView& table, const int32_t* tokens, int64_t rows, float scale,
                float* y);

}  // namespace millrace::cpu
