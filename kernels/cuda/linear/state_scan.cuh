// The kernel of both scans. A CTA has 64 columns of one head's state of one sequence and goes over its chunks
// in order: four warps with 16 columns each, and, a step ahead of them, warps that copy and prepare the
// chunks (state_chunk.cuh). A step is as many chunks as there are such warps; between two there is a barrier.
#pragma once

#include "kernels/cuda/linear/state_chunk.cuh"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {

inline constexpr int kColumnWarps = 4, kCtaColumns = 16 * kColumnWarps;

// Decoding: one warp prepares, its copies are waited for at once. Prompts: two, whose copies are a step ahead
// of what they prepare.
template <int kKeys, int kPreparing>
struct ScanShared {
  static constexpr int kStages = kPreparing == 1 ? 2 : 3;
  ChunkOperands<kKeys> chunks[kStages][kPreparing];
};

template <int kKeys, bool kDelta, int kPreparing>
__global__ void __launch_bounds__((kColumnWarps + kPreparing) * kWarpLanes, kKeys <= 128 ? 2 : 1)
    state_scan_kernel(const __grid_constant__ StateScan op, int32_t strips) {
  using Shared = ScanShared<kKeys, kPreparing>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const auto task = static_cast<int64_t>(blockIdx.x) / strips;
  const HeadChunks of(op, static_cast<int32_t>(task / op.heads), static_cast<int32_t>(task % op.heads));
  const int32_t steps = (of.count + kPreparing - 1) / kPreparing;

  if (warp >= kColumnWarps) {
    const int own = warp - kColumnWarps;
    // Rows and heads begin on 16 bytes everywhere.
    const bool aligned =
        op.key_dim % 4 == 0 && op.q_stride % 4 == 0 && op.k_stride % 4 == 0 &&
        (reinterpret_cast<uintptr_t>(op.q) | reinterpret_cast<uintptr_t>(op.k)) % 16 == 0 &&
        (op.pool.layer_offset | op.pool.block_floats | op.pool.at.keys | op.pool.at.row_keys) % 4 == 0;
    const auto load = [&](int32_t step) {
      const int32_t chunk = step * kPreparing + own;
      if (chunk < of.count) load_chunk(op, of, chunk, shared.chunks[step % Shared::kStages][own], aligned);
    };
    if (kPreparing > 1 && steps > 0) load(0);
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t chunk = step * kPreparing + own;
      if constexpr (kPreparing == 1) {
        load(step);
        ptx::async_wait<0>();
      } else if ((step + 1) * kPreparing + own < of.count) {
        load(step + 1);
        ptx::async_wait<1>();
      } else {
        ptx::async_wait<0>();
      }
      __syncwarp();  // what other lanes have copied
      if (chunk < of.count)
        prepare_chunk<kKeys, kDelta>(op, of, chunk, shared.chunks[step % Shared::kStages][own]);
      __syncthreads();  // prepared; and the columns' warps are done with the step before
    }
    return;
  }

  StateColumns<kKeys> columns;
  columns.column = static_cast<int>(blockIdx.x % static_cast<unsigned>(strips)) * kCtaColumns + warp * 16;
  columns.columns = op.value_dim;
  const int64_t packed = (int64_t{of.sequence} * op.heads + of.head) * op.key_dim * int64_t{op.value_dim};
  if (op.pool.pool != nullptr) {
    const float* before = of.first_block > 0 ? of.block_of(op, of.first_block - 1) : nullptr;
    if (before != nullptr) before += op.pool.at.state + of.head * op.pool.at.head_state;
    columns.load(before, op.key_dim, op.pool.at.padded_dim);
  } else {
    columns.load(op.initial != nullptr ? op.initial + packed : nullptr, op.key_dim, op.value_dim);
  }
  RowTile values[2];
  ChunkRows rows[2];
  if (of.count > 0) {
    rows[0] = of.rows(op, 0);
    columns.load_values(op, of, rows[0], values[0]);
  }
  for (int32_t step = 0; step < steps; ++step) {
    __syncthreads();  // the step's chunks are prepared
#pragma unroll
    for (int i = 0; i < kPreparing; ++i) {
      const int32_t chunk = step * kPreparing + i;
      if (chunk >= of.count) break;
      const bool more = chunk + 1 < of.count;
      if (more) {
        rows[1] = of.rows(op, chunk + 1);
        columns.load_values(op, of, rows[1], values[1]);
      }
      const bool kept = rows[0].block != nullptr && rows[0].last == kStateChunk;
      columns.template advance<kDelta>(op, of, rows[0], shared.chunks[step % Shared::kStages][i], values[0],
                                       more || kept || op.final_state != nullptr);
      if (kept)
        columns.store(rows[0].block + op.pool.at.state + of.head * op.pool.at.head_state, op.key_dim,
                      op.pool.at.padded_dim);
      rows[0] = rows[1];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) values[0][n][e] = values[1][n][e];
      }
    }
  }
  if (op.final_state != nullptr) columns.store(op.final_state + packed, op.key_dim, op.value_dim);
}

template <int kKeys, bool kDelta, int kPreparing>
void launch_state_scan_as(const StateScan& op, const Launch& at) {
  const auto kernel = state_scan_kernel<kKeys, kDelta, kPreparing>;
  constexpr size_t kBytes = sizeof(ScanShared<kKeys, kPreparing>);
  allow_shared_memory(kernel, kBytes);
  const int32_t strips = (op.value_dim + kCtaColumns - 1) / kCtaColumns;
  const int64_t ctas = int64_t{op.sequences.count} * op.heads * strips;
  kernel<<<static_cast<unsigned>(ctas), (kColumnWarps + kPreparing) * kWarpLanes, kBytes, at.stream>>>(
      op, strips);
  check_launch(kDelta ? "gated_delta_kernel" : "selective_scan_kernel");
}

template <bool kDelta>
void launch_state_scan(const StateScan& op, const Launch& at) {
  if (op.sequences.count == 0) return;
  const bool decodes = op.most_tokens > 0 && op.most_tokens <= kStateChunk;
  const auto launch = [&]<int kKeys>() {
    if (decodes) return launch_state_scan_as<kKeys, kDelta, 1>(op, at);
    launch_state_scan_as<kKeys, kDelta, kKeys <= 128 ? 2 : 1>(op, at);
  };
  if (op.key_dim <= 32) return launch.template operator()<32>();
  if (op.key_dim <= 64) return launch.template operator()<64>();
  if (op.key_dim <= 128) return launch.template operator()<128>();
  launch.template operator()<kMaxStateKeyDim>();
}

}  // namespace millrace::cuda
