// A CTA has a row of a shift, a warp a head of a row. Roofline of each: memory, of activations that are
// mostly in L2.
#include "kernels/cuda/linear/time_mix.h"

#include <algorithm>

#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpLanes;

// This layer's part of the block of a row's position; null where nothing is kept.
__device__ inline float* block_of(const StatePool& pool, int32_t sequence, int32_t position) {
  const int32_t id = pool.tables[pool.table_starts[sequence] + position / kStateChunk];
  return id < 0 ? nullptr : pool.pool + id * pool.block_floats + pool.layer_offset;
}

// Rows of this step are read where they are, never in the blocks that other CTAs write.
__global__ void __launch_bounds__(kThreads) token_shift_kernel(const __grid_constant__ TokenShift op) {
  const int64_t row = blockIdx.x;
  const int32_t sequence = op.sequence_of[row], position = op.positions[row];
  const StatePlaces& at = op.pool.at;
  const float* x = op.x + row * op.cols;
  const float* before = nullptr;
  if (row > 0 && op.sequence_of[row - 1] == sequence) {
    before = x - op.cols;
  } else if (position > 0) {
    before = block_of(op.pool, sequence, position - 1) + at.inputs +
             (position - 1) % kStateChunk * at.row_inputs + op.place;
  }
  float* block = op.keep ? block_of(op.pool, sequence, position) : nullptr;
  float* kept =
      block != nullptr ? block + at.inputs + position % kStateChunk * at.row_inputs + op.place : nullptr;
  for (int64_t c = threadIdx.x; c < op.cols; c += kThreads) {
    const float was = before != nullptr ? before[c] : 0.0f;
    op.out[row * op.cols + c] = fmaf(was - x[c], op.by[c], x[c]);
    if (kept != nullptr) kept[c] = x[c];
  }
}

__global__ void __launch_bounds__(kThreads) squash_kernel(Squash kind, int64_t size, float* x) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += int64_t{gridDim.x} * kThreads)
    x[i] = kind == Squash::kTanh ? tanhf(x[i]) : sigmoid(x[i]);
}

__global__ void __launch_bounds__(kThreads)
    prepare_time_mix_kernel(const __grid_constant__ PrepareTimeMix op) {
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpLanes;  // [rows][heads]
  if (i >= op.rows * op.heads) return;                                        // whole warps
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t row = i / op.heads, first = i % op.heads * op.dim, cols = int64_t{op.heads} * op.dim;
  const int32_t position = op.positions[row], r = position % kStateChunk;
  float* block = block_of(op.pool, op.sequence_of[row], position);
  const StatePlaces& at = op.pool.at;
  float squares = 0.0f;
  for (int64_t c = first + lane; c < first + op.dim; c += kWarpLanes) {
    const float key = op.k[row * cols + c] * op.k_k[c];
    squares = fmaf(key, key, squares);
  }
  const float length = fmaxf(sqrtf(warp_sum(squares)), 1e-12f);
  for (int64_t c = first + lane; c < first + op.dim; c += kWarpLanes) {
    const int64_t to = row * cols + c;
    const float k = op.k[to], key = k * op.k_k[c] / length, rate = sigmoid(op.rate[to]);
    const float new_k = k * fmaf(rate - 1.0f, op.k_a[c], 1.0f), b = key * rate;
    const float decay = expf(-0.60653066f * sigmoid(op.decay[to]));  // e^-0.5
    if (op.first) {
      op.first_values[to] = op.v[to];
    } else {
      op.v[to] = fmaf(op.first_values[to] - op.v[to], sigmoid(op.mixed[to]), op.v[to]);
    }
    op.k[to] = new_k;
    op.rate[to] = b;
    op.mixed[to] = -key;
    op.decay[to] = decay;
    if (block == nullptr) continue;
    block[at.keys + r * at.row_keys + c] = new_k;
    block[at.keys + r * at.row_keys + cols + c] = b;
    block[at.decays + r * at.row_decays + c] = decay;
  }
}

__global__ void __launch_bounds__(kThreads) finish_time_mix_kernel(const __grid_constant__ FinishTimeMix op) {
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpLanes;  // [rows][heads]
  if (i >= op.rows * op.heads) return;                                        // whole warps
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t head = i % op.heads * op.dim, at = i * op.dim;
  float sum = 0.0f, own = 0.0f, squares = 0.0f;
  for (int c = lane; c < op.dim; c += kWarpLanes) {
    sum += op.y[at + c];
    own = fmaf(op.r[at + c] * op.k[at + c], op.r_k[head + c], own);
  }
  const auto size = static_cast<float>(op.dim);
  const float mean = warp_sum(sum) / size;
  own = warp_sum(own);
  for (int c = lane; c < op.dim; c += kWarpLanes)
    squares = fmaf(op.y[at + c] - mean, op.y[at + c] - mean, squares);
  const float by = 1.0f / sqrtf(warp_sum(squares) / size + op.eps);
  for (int c = lane; c < op.dim; c += kWarpLanes) {
    const float normed = fmaf((op.y[at + c] - mean) * by, op.norm[head + c], op.norm_bias[head + c]);
    op.y[at + c] = fmaf(own, op.v[at + c], normed) * op.gate[at + c];
  }
}

unsigned warps_for(int64_t count) { return static_cast<unsigned>((count + kWarps - 1) / kWarps); }

}  // namespace

void launch_token_shift(const TokenShift& op, const Launch& at) {
  if (op.rows == 0) return;
  token_shift_kernel<<<static_cast<unsigned>(op.rows), kThreads, 0, at.stream>>>(op);
  check_launch("token_shift_kernel");
}

void launch_squash(Squash kind, int64_t size, float* x, const Launch& at) {
  if (size == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 16;  // beyond, a CTA takes several turns
  const int64_t blocks = std::min((size + kThreads - 1) / kThreads, kMaxBlocks);
  squash_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, at.stream>>>(kind, size, x);
  check_launch("squash_kernel");
}

void launch_prepare_time_mix(const PrepareTimeMix& op, const Launch& at) {
  if (op.rows == 0) return;
  prepare_time_mix_kernel<<<warps_for(op.rows * op.heads), kThreads, 0, at.stream>>>(op);
  check_launch("prepare_time_mix_kernel");
}

void launch_finish_time_mix(const FinishTimeMix& op, const Launch& at) {
  if (op.rows == 0) return;
  finish_time_mix_kernel<<<warps_for(op.rows * op.heads), kThreads, 0, at.stream>>>(op);
  check_launch("finish_time_mix_kernel");
}

}  // namespace millrace::cuda
