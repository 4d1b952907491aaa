// The short convolution before a layer with a state, of each channel by itself:
//   out[r][c] = act(bias[c] + sum over i of weight[c][i] x[r - taps + 1 + i][c])
// a chain of fused multiply-adds from the oldest row on. Rows before a sequence's first in this step are in
// the blocks of its pool, or are its initial rows.
#pragma once

#include "kernels/cuda/linear/state_scan.h"

namespace millrace::cuda {

struct ShortConv {
  const float* x = nullptr;  // [rows], x_stride apart
  int64_t x_stride = 0;
  const float *weight = nullptr, *bias = nullptr;  // [channels][taps]; [channels], or null
  int64_t channels = 0;
  int32_t taps = 1;
  bool silu = false;
  const float* gate =
      nullptr;  // the outputs are multiplied by these rows, gate_stride apart; null: they are not
  int64_t gate_stride = 0;
  float* out = nullptr;    // [rows][channels]
  int64_t out_stride = 0;  // from a row to the next; 0: channels
  StateSequences sequences = {};
  // Of sequences without a pool, [sequences][taps - 1][channels], oldest first; null: zeros, not wanted.
  const float* initial_rows = nullptr;
  float* final_rows = nullptr;
  StatePool pool = {};      // this step's inputs are written to its blocks
  int32_t most_tokens = 0;  // of a sequence in this step; 0: not known
};

// Roofline: memory, x and out once.
void launch_short_conv(const ShortConv& op, const Launch& at);

}  // namespace millrace::cuda
