// The likeliest token of rows of logits.
#pragma once

#include "kernels/cpu/context.h"

namespace millrace::cpu {

// The largest logit of a piece of a row.
struct ArgmaxPiece {
  float logit;
  int32_t token;  // -1: a NaN
};

// Pieces that a call needs as scratch.
int64_t argmax_pieces(int64_t rows, int64_t vocab);

// tokens[r] of logits [rows][vocab]: the largest, the lowest id among equals; -1 when one is NaN.
void argmax_rows(const Context& ctx, const float* logits, int64_t rows, int64_t vocab, ArgmaxPiece* pieces,
                 int32_t* tokens);

}  // namespace millrace::cpu
