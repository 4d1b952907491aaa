// Drawing tokens from rows of logits: temperature, top-k, top-p, min-p, in that order, by the arithmetic of
// base/sampling_math.h. The same logits and random number give the same token as on every other device.
#pragma once

#include "kernels/cpu/context.h"

namespace millrace::cpu {

inline constexpr int32_t kTokenNan = -1, kTokenNone = -2;  // a logit is NaN; none is above -infinity

struct DrawParams {
  bool draw;       // else the likeliest, the lowest id among equals
  float scale;     // of logits: 1 / temperature
  int32_t top_k;   // 0: all
  float top_p;     // 1: all
  float min_p;     // 0: all
  double uniform;  // in [0, 1)
};

struct DrawEntry {
  float weight;  // e^((logit - largest) * scale)
  int32_t token;
};
// One thread's own: [vocab] of each.
struct DrawScratch {
  float* weights;
  DrawEntry* entries;
};
DrawScratch* take_draw_scratch(Arena& arena, int threads, int64_t vocab);

// One row, by the calling thread.
int32_t draw_token(const float* logits, int64_t vocab, const DrawParams& params, const DrawScratch& scratch);

}  // namespace millrace::cpu
