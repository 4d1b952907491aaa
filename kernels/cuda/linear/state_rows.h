// What a layer with a state does to rows, before and behind its scan: columns of the projections put in
// order, keys normed, gates computed, outputs normed and gated; and the gates of attention (Qwen 3 Next).
#pragma once

#include <array>

#include "base/state_block.h"
#include "kernels/cuda/linear/state_scan.h"

namespace millrace::cuda {

StatePlaces state_places_of(const StateShape& shape);

// Columns of heads: those of head h begin at first + h / per_group * group_stride + h % per_group * dim, and
// go to `to` + h * dim, times scale.
struct PlacedHeads {
  int32_t first = 0, heads = 0, dim = 0, per_group = 1, group_stride = 0;
  int64_t to = 0;
  float scale = 1.0f;
};

// Products that lie one behind the other, [rows][columns] each, as if side by side in a row.
struct PlaceRows {
  struct Product {
    const float* data = nullptr;
    int32_t columns = 0;  // 0: none
  };
  static constexpr int kProducts = 8;
  std::array<Product, kProducts> products = {};
  std::array<PlacedHeads, 6> parts = {};
  PlacedHeads value_by = {};  // what goes to the same place is multiplied by these
  int64_t rows = 0, columns = 0;
  float* out = nullptr;  // [rows][columns]
};
void launch_place_rows(const PlaceRows& op, const Launch& at);

// Behind the convolution, of each row: queries and keys normed to length 1 (the delta rule), in place; the
// logarithm of the decay a softplus(step + step_bias), of a head or, with StateShape::channel_decay, of each
// row of its state; and beta = sigmoid(beta) or, of the selective scan, the step itself, clamped. Keys,
// logarithms and betas go to the row's block too.
struct PrepareRows {
  StateShape shape = {};
  bool delta = false;
  const float* mix = nullptr;                      // [rows][mix_cols]
  float* convolved = nullptr;                      // [rows][channels]
  const float *a = nullptr, *step_bias = nullptr;  // [value_heads]; [steps], or null
  float step_min = 0.0f, step_max = 0.0f;
  float *logs = nullptr, *betas = nullptr;                     // [rows][steps], [rows][value_heads]
  const int32_t *sequence_of = nullptr, *positions = nullptr;  // [rows]
  StatePool pool = {};
  int64_t rows = 0;
};
void launch_prepare_rows(const PrepareRows& op, const Launch& at);

// y = norm(y) act(gate), or norm(y act(gate)), a norm of `size` columns each; act is silu, or the sigmoid.
struct FinishRows {
  float* y = nullptr;  // [rows][columns]
  const float* gate = nullptr;
  int64_t gate_stride = 0, rows = 0, columns = 0;
  const float* norm = nullptr;  // [size], or [columns] with each_column; null: no norm
  bool each_column = false, norm_before_gate = true, gate_sigmoid = false;
  float eps = 0.0f;
  int32_t size = 0;
};
void launch_finish_rows(const FinishRows& op, const Launch& at);

// Of each head query and gate alternate: from [rows * heads][2][dim] into two of [rows * heads][dim].
void launch_split_gates(const float* from, int64_t heads, int32_t dim, float* query, float* gate,
                        const Launch& at);
// y *= sigmoid(gate)
void launch_gate_attention(const float* gate, int64_t size, float* y, const Launch& at);

}  // namespace millrace::cuda
