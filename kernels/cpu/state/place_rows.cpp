#include "kernels/cpu/state/place_rows.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

constexpr int64_t kPlacedRowsPerTask = 4;

void place(const HeadColumns& columns, const float* from, float* to) {
  for (int32_t h = 0; h < columns.heads; ++h, to += columns.dim) {
    std::copy_n(from + columns.at(h), columns.dim, to);
    for (int32_t i = 0; columns.scale != 1.0f && i < columns.dim; ++i) to[i] *= columns.scale;
  }
}

}  // namespace

void place_rows(const Context& ctx, const PlaceRows& op) {
  ctx.pool.parallel_for(op.rows, kPlacedRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = op.from + row * op.from_cols;
      float* to = op.out + row * op.cols;
      for (const PlacedHeads& part : op.parts) place(part.columns, from, to + part.to);
      const HeadColumns& by = op.value_by.columns;
      for (int32_t h = 0; h < by.heads; ++h) {
        float* values = to + op.value_by.to + int64_t{h} * by.dim;
        ctx.kernels.multiply(values, from + by.at(h), by.dim, values);
      }
    }
  });
}

}  // namespace millrace::cpu
