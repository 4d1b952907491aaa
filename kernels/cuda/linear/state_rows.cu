// Rows of layers with a state. Roofline of each: memory, of activations that are mostly in L2.
#include "kernels/cuda/linear/state_rows.h"

#include <algorithm>

#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpLanes;
constexpr float kLengthEps = 1e-6f;  // of queries and keys that are normed

unsigned ctas_for(int64_t size, int64_t each) {
  constexpr int64_t kMaxCtas = 1 << 20;  // beyond, a CTA takes several turns
  return static_cast<unsigned>(std::min((size + each - 1) / each, kMaxCtas));
}

// ---------------------------------------------------------------- before the scan

__device__ inline float product_at(const PlaceRows& op, int64_t row, int32_t column) {
#pragma unroll
  for (int i = 0; i < PlaceRows::kProducts; ++i) {
    const PlaceRows::Product& p = op.products[i];
    if (column < p.columns) return p.data[row * p.columns + column];
    column -= p.columns;
  }
  return 0.0f;
}

// Where column `to` of a part comes from.
__device__ inline int32_t source_of(const PlacedHeads& part, int32_t to) {
  const int32_t h = to / part.dim;
  return part.first + h / part.per_group * part.group_stride + h % part.per_group * part.dim + to % part.dim;
}
__device__ inline bool holds(const PlacedHeads& part, int64_t column) {
  return column >= part.to && column < part.to + int64_t{part.heads} * part.dim;
}

__global__ void __launch_bounds__(kThreads) place_rows_kernel(const __grid_constant__ PlaceRows op) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < op.rows * op.columns;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / op.columns, column = i % op.columns;
    float value = 0.0f;
#pragma unroll
    for (int p = 0; p < 6; ++p) {
      const PlacedHeads& part = op.parts[p];
      if (holds(part, column))
        value = product_at(op, row, source_of(part, static_cast<int32_t>(column - part.to))) * part.scale;
    }
    if (holds(op.value_by, column))
      value *= product_at(op, row, source_of(op.value_by, static_cast<int32_t>(column - op.value_by.to)));
    op.out[i] = value;
  }
}

__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// A CTA has a row: a warp each of its heads, then a thread each of its gates.
__global__ void __launch_bounds__(kThreads) prepare_rows_kernel(const __grid_constant__ PrepareRows op) {
  const StateShape& s = op.shape;
  const int64_t row = blockIdx.x;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes,
            lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t keys = int64_t{s.key_heads} * s.key_dim, values = int64_t{s.value_heads} * s.value_dim;
  const int64_t channels = 2 * keys + values;
  const int64_t query_at = s.values_first ? values + keys : 0, key_at = s.values_first ? values : keys;
  const int32_t position = op.positions[row];
  const int32_t id = op.pool.tables[op.pool.table_starts[op.sequence_of[row]] + position / kStateChunk];
  float* block = id < 0 ? nullptr : op.pool.pool + id * op.pool.block_floats + op.pool.layer_offset;
  const int32_t r = position % kStateChunk;
  for (int h = warp; h < 2 * s.key_heads; h += kWarps) {
    const bool query = h < s.key_heads;
    if (query && !op.delta) continue;
    const int64_t head_at = int64_t{query ? h : h - s.key_heads} * s.key_dim;
    float* x = op.convolved + row * channels + (query ? query_at : key_at) + head_at;
    float by = 1.0f;
    if (op.delta) {
      float squares = 0.0f;
      for (int i = lane; i < s.key_dim; i += kWarpLanes) squares = fmaf(x[i], x[i], squares);
      by = 1.0f / sqrtf(warp_sum(squares) + kLengthEps);
    }
    float* kept =
        block == nullptr || query ? nullptr : block + op.pool.at.keys + r * op.pool.at.row_keys + head_at;
    for (int i = lane; i < s.key_dim; i += kWarpLanes) {
      const float y = x[i] * by;
      x[i] = y;
      if (kept != nullptr) kept[i] = y;
    }
  }
  const int64_t steps = int64_t{s.value_heads} * (s.channel_decay ? s.key_dim : 1);
  const float* gates = op.mix + row * (channels + values + steps + s.value_heads) + channels + values;
  if (s.channel_decay) {  // of the delta rule alone
    for (int64_t i = threadIdx.x; i < steps; i += kThreads) {
      const float bias = op.step_bias != nullptr ? op.step_bias[i] : 0.0f;
      const float log = op.a[i / s.key_dim] * softplus(gates[i] + bias);
      op.logs[row * steps + i] = log;
      if (block != nullptr) block[op.pool.at.decays + r * op.pool.at.row_decays + i] = log;
    }
    for (int h = static_cast<int>(threadIdx.x); h < s.value_heads; h += kThreads)
      op.betas[row * s.value_heads + h] = sigmoid(gates[steps + h]);
    return;
  }
  for (int h = static_cast<int>(threadIdx.x); h < s.value_heads; h += kThreads) {
    float size = softplus(gates[h] + (op.step_bias != nullptr ? op.step_bias[h] : 0.0f));
    if (!op.delta) size = fminf(fmaxf(size, op.step_min), op.step_max);
    const float log = op.a[h] * size, beta = op.delta ? sigmoid(gates[s.value_heads + h]) : size;
    op.logs[row * s.value_heads + h] = log;
    op.betas[row * s.value_heads + h] = beta;
    if (block == nullptr) continue;
    block[op.pool.at.decays + r * op.pool.at.row_decays + h] = log;
    block[op.pool.at.betas + r * op.pool.at.row_decays + h] = beta;
  }
}

// ---------------------------------------------------------------- behind it

// So many threads have a group of columns that are normed together.
template <int kTeam>
__global__ void __launch_bounds__(kThreads) finish_rows_kernel(const __grid_constant__ FinishRows op) {
  __shared__ float partial[kWarps];
  const int64_t groups = op.columns / op.size;
  const int64_t group = int64_t{blockIdx.x} * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (group >= op.rows * groups) return;  // whole teams: of 256 threads there is one
  const int lane = static_cast<int>(threadIdx.x) % kTeam;
  const int64_t row = group / groups, first = group % groups * op.size;
  float* y = op.y + row * op.columns + first;
  const float* gate = op.gate + row * op.gate_stride + first;
  const auto factor = [&](int c) { return (op.gate_sigmoid ? 1.0f : gate[c]) * sigmoid(gate[c]); };
  const auto gated = [&](int c) { return y[c] * factor(c); };
  float by = 1.0f;
  if (op.norm != nullptr) {
    float squares = 0.0f;
    for (int c = lane; c < op.size; c += kTeam) {
      const float x = op.norm_before_gate ? y[c] : gated(c);
      squares = fmaf(x, x, squares);
    }
    squares = kTeam == kWarpLanes ? warp_sum(squares) : block_sum<kThreads>(squares, partial);
    by = 1.0f / sqrtf(squares / static_cast<float>(op.size) + op.eps);
  }
  for (int c = lane; c < op.size; c += kTeam) {
    float x = op.norm_before_gate ? y[c] : gated(c);
    if (op.norm != nullptr) x = x * by * op.norm[op.each_column ? first + c : c];
    y[c] = op.norm_before_gate ? x * factor(c) : x;
  }
}

// ---------------------------------------------------------------- attention

__global__ void __launch_bounds__(kThreads)
    split_gates_kernel(const float* from, int64_t size, int32_t dim, float* query, float* gate) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t head = i / dim, c = i % dim;
    query[i] = from[2 * head * dim + c];
    gate[i] = from[(2 * head + 1) * dim + c];
  }
}

__global__ void __launch_bounds__(kThreads) gate_attention_kernel(const float* gate, int64_t size, float* y) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    y[i] *= sigmoid(gate[i]);
  }
}

}  // namespace

StatePlaces state_places_of(const StateShape& shape) {
  const StateBlock block(shape);
  StatePlaces at;
  at.inputs = block.inputs;
  at.keys = block.keys;
  at.writes = block.writes;
  at.decays = block.decays;
  at.betas = block.betas;
  at.state = block.state;
  at.row_inputs = block.row_inputs;
  at.row_keys = block.row_keys;
  at.row_writes = block.row_writes;
  at.row_decays = block.row_decays;
  at.head_state = block.head_state;
  at.padded_dim = static_cast<int32_t>(block.padded_dim);
  return at;
}

void launch_place_rows(const PlaceRows& op, const Launch& at) {
  if (op.rows == 0) return;
  place_rows_kernel<<<ctas_for(op.rows * op.columns, kThreads), kThreads, 0, at.stream>>>(op);
  check_launch("place_rows_kernel");
}

void launch_prepare_rows(const PrepareRows& op, const Launch& at) {
  if (op.rows == 0) return;
  prepare_rows_kernel<<<static_cast<unsigned>(op.rows), kThreads, 0, at.stream>>>(op);
  check_launch("prepare_rows_kernel");
}

void launch_finish_rows(const FinishRows& op, const Launch& at) {
  if (op.rows == 0) return;
  const int64_t groups = op.rows * (op.columns / op.size);
  // By the size alone, never by how many rows there are: the choice fixes the order of the sum.
  if (op.size <= 256) {
    const auto ctas = static_cast<unsigned>((groups + kWarps - 1) / kWarps);
    finish_rows_kernel<kWarpLanes><<<ctas, kThreads, 0, at.stream>>>(op);
  } else {
    finish_rows_kernel<kThreads><<<static_cast<unsigned>(groups), kThreads, 0, at.stream>>>(op);
  }
  check_launch("finish_rows_kernel");
}

void launch_split_gates(const float* from, int64_t heads, int32_t dim, float* query, float* gate,
                        const Launch& at) {
  const int64_t size = heads * dim;
  if (size == 0) return;
  split_gates_kernel<<<ctas_for(size, kThreads), kThreads, 0, at.stream>>>(from, size, dim, query, gate);
  check_launch("split_gates_kernel");
}

void launch_gate_attention(const float* gate, int64_t size, float* y, const Launch& at) {
  if (size == 0) return;
  gate_attention_kernel<<<ctas_for(size, kThreads), kThreads, 0, at.stream>>>(gate, size, y);
  check_launch("gate_attention_kernel");
}

}  // namespace millrace::cuda
