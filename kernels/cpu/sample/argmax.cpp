#include "kernels/cpu/sample/argmax.h"

#include <algorithm>
#include <cmath>

namespace millrace::cpu {
namespace {

constexpr int64_t kArgmaxPiece = 4096;  // logits of a task

}  // namespace

int64_t argmax_pieces(int64_t rows, int64_t vocab) { return rows * tasks_for(vocab, kArgmaxPiece); }

void argmax_rows(const Context& ctx, const float* logits, int64_t rows, int64_t vocab, ArgmaxPiece* pieces,
                 int32_t* tokens) {
  const int64_t per_row = tasks_for(vocab, kArgmaxPiece);
  ctx.pool.parallel_for(rows * per_row, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % per_row * kArgmaxPiece, last = std::min(first + kArgmaxPiece, vocab);
      const float* row = logits + task / per_row * vocab;
      ArgmaxPiece found{row[first], static_cast<int32_t>(first)};
      bool nan = false;
      for (int64_t i = first; i < last; ++i) {
        nan |= std::isnan(row[i]);
        if (row[i] > found.logit) found = {row[i], static_cast<int32_t>(i)};
      }
      pieces[task] = {found.logit, nan ? -1 : found.token};
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    const ArgmaxPiece* piece = pieces + row * per_row;
    ArgmaxPiece found = piece[0];
    for (int64_t i = 1; i < per_row && found.token >= 0; ++i) {
      if (piece[i].token < 0 || piece[i].logit > found.logit) found = piece[i];
    }
    tokens[row] = found.token;
  }
}

}  // namespace millrace::cpu
