#include "kernels/cpu/embedding/embed.h"

#include "base/check.h"
#include "kernels/quant/codec.h"

namespace millrace::cpu {

void embed_rows(const Context& ctx, const TensorView& table, const int32_t* tokens, int64_t rows, float scale,
                float* y) {
  const int64_t cols = table.cols(), table_rows = table.rows();
  ctx.pool.parallel_for(rows, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* x = y + t * cols;
      MILLRACE_CHECK(tokens[t] >= 0 && tokens[t] < table_rows);
      quant::dequantize_row(table, tokens[t], x);
      if (scale != 1.0f) {
        for (int64_t i = 0; i < cols; ++i) x[i] *= scale;
      }
    }
  });
}

void add_position_rows(const Context& ctx, const TensorView* positions, const TensorView* types,
                       const int32_t* position_of, const std::function<int64_t(int64_t)>& type_of,
                       int64_t rows, int64_t cols, float* x, float* scratch) {
  ctx.pool.parallel_for(rows, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = scratch + t * cols;
      const auto add = [&](const TensorView* table, int64_t at) {
        if (table == nullptr) return;
        MILLRACE_CHECK(at >= 0 && at < table->rows() && table->cols() == cols);
        quant::dequantize_row(*table, at, row);
        ctx.kernels.scale_add(x + t * cols, 1.0f, row, 1.0f, cols);
      };
      add(positions, position_of[t]);
      add(types, type_of(t));
    }
  });
}

}  // namespace millrace::cpu
