// The rows of a layer with a state, put together from the columns of its projections: queries, keys and
// values, which are convolved, a gate, steps and betas. Bound by memory: 8 bytes for each value.
#pragma once

#include <array>

#include "base/state_block.h"
#include "kernels/cpu/context.h"

namespace millrace::cpu {

// Those of head h go to column `to` + h * dim, times their scale.
struct PlacedHeads {
  HeadColumns columns;
  int64_t to = 0;
};

struct PlaceRows {
  const float* from;  // [rows][from_cols]: products side by side
  int64_t rows, from_cols, cols;
  std::array<PlacedHeads, 6> parts;
  PlacedHeads value_by;  // what goes to the same place is multiplied by these (LFM 2)
  float* out;            // [rows][cols]
};
void place_rows(const Context& ctx, const PlaceRows& op);

}  // namespace millrace::cpu
