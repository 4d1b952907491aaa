// What the kernels of gradients share (linear_backward.h): where chunks are, gates, the workspace.
#pragma once

#include "kernels/cuda/linear/cta_product.cuh"
#include "kernels/cuda/linear/linear_backward.h"

namespace millrace::cuda {

inline constexpr int kChunk = kBackwardChunk;
// From row to row of shared matrices: rows g and columns t of a fragment are in 32 banks.
inline constexpr int kSquareStride = kChunk + 4;
__host__ __device__ constexpr int row_stride(int columns) { return columns + 4; }

// The workspace, in floats. Arrays are [sequences][chunks][heads] of what their names say.
struct BackwardPlaces {
  int64_t chunks, state, rows;                             // of the longest sequence; sizes of one entry
  int64_t states, d_states, solved, u, dw, dx, sums, end;  // where arrays begin
};
__host__ __device__ inline BackwardPlaces backward_places(const LinearBackward& op) {
  BackwardPlaces p{};
  p.chunks = (int64_t{op.most_tokens} + kChunk - 1) / kChunk;
  p.state = int64_t{op.key_dim} * op.value_dim;
  p.rows = int64_t{kChunk} * op.value_dim;
  const int64_t entries = op.sequences * p.chunks * op.heads, delta = op.delta ? entries : 0;
  p.d_states = p.states + entries * p.state;
  p.solved = p.d_states + entries * p.state;
  p.u = p.solved + delta * kChunk * kChunk;
  p.dx = p.u + delta * p.rows;
  p.dw = p.dx + delta * p.rows;
  p.sums = p.dw + entries * p.rows;
  p.end = p.sums + entries * 2;
  return p;
}

// A chunk of a head of a sequence.
struct BackwardRows {
  int64_t entry;  // of the workspace's arrays
  int64_t row;    // the chunk's first
  int rows;       // that there are
};

struct BackwardHead {
  __device__ BackwardHead(const LinearBackward& op, int32_t of_sequence, int32_t of_head)
      : places(backward_places(op)),
        sequence(of_sequence),
        head(of_head),
        key_head(of_head / (op.heads / op.key_heads)),
        first(op.row_starts[of_sequence]),
        tokens(op.row_starts[of_sequence + 1] - first),
        count((tokens + kChunk - 1) / kChunk),
        heads(op.heads) {}
  __device__ BackwardRows rows(int32_t chunk) const {
    return {(sequence * places.chunks + chunk) * heads + head, int64_t{first} + int64_t{chunk} * kChunk,
            min(kChunk, tokens - chunk * kChunk)};
  }
  BackwardPlaces places;
  int32_t sequence, head, key_head, first, tokens, count, heads;
};

// In shared memory. Rows that are not there decay by nothing and write nothing.
struct BackwardGates {
  float log[kChunk];   // of what is left of the chunk's first state
  float beta[kChunk];  // or steps
  float left[kChunk];  // exp(log)
  float until_end[kChunk];

  __device__ float between(int i, int j) const { return expf(log[i] - log[j]); }
};

// Of row threadIdx.x, of the first 64 threads.
__device__ inline float2 gates_of(const LinearBackward& op, const BackwardHead& of,
                                  const BackwardRows& rows) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= rows.rows) return {0.0f, 0.0f};
  const int64_t at = (rows.row + r) * op.heads + of.head;
  const float beta = op.betas != nullptr ? op.betas[at] : 1.0f;
  float log = 0.0f;
  if (op.logs != nullptr) {
    log = op.logs[at];
  } else if (op.rates != nullptr) {
    log = op.rates[of.head] * beta;
  }
  return {log, beta};
}

// All threads call; who reads waits for a barrier first.
__device__ inline void put_gates(BackwardGates& to, const float2& mine) {
  if (threadIdx.x < kChunk) to.log[threadIdx.x] = mine.x, to.beta[threadIdx.x] = mine.y;
  __syncthreads();  // all rows' logarithms are there
  if (threadIdx.x >= kWarpLanes) return;
  const int lane = static_cast<int>(threadIdx.x);
  const float first = to.log[2 * lane], second = to.log[2 * lane + 1];
  float sum = first + second;
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const float other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  const float up = __shfl_up_sync(kAllLanes, sum, 1), before = lane == 0 ? 0.0f : up;
  const float last = __shfl_sync(kAllLanes, sum, kWarpLanes - 1);
  const float logs[2] = {before + first, sum};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to.log[2 * lane + i] = logs[i];
    to.left[2 * lane + i] = expf(logs[i]);
    to.until_end[2 * lane + i] = expf(last - logs[i]);
  }
}

// Columns [first, first + kColumns) of rows of one head, of arrays [tokens][heads][dim].
template <int kColumns, int kStride>
__device__ void load_rows(float* to, const float* from, const BackwardRows& rows, int32_t heads, int32_t head,
                          int32_t dim, int32_t first = 0) {
  load_tile<kChunk, kColumns, kStride>(to, from + (rows.row * heads + head) * dim + first,
                                       int64_t{heads} * dim, rows.rows, dim - first);
}

}  // namespace millrace::cuda
