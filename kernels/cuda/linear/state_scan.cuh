// The kernel of both scans. A CTA has 64 or 128 columns of one head's state of one sequence and goes over its
// chunks in order: warps with 16 columns each, and, a step ahead of them, warps that copy and prepare the
// chunks (state_chunk.cuh). A step is as many chunks as there are such warps; between two there is a barrier.
#pragma once

#include "kernels/cuda/linear/state_chunk.cuh"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {

// How a CTA is made up. Columns: warps with 16 columns each, times kHalves; preparing: warps that do. With
// three stages what is prepared was copied a step ahead.
template <int kPreparingWarps, int kColumnTiles, int kHalvesOfKeys, int kStagesOfShared, int kCtas>
struct ScanShape {
  static constexpr int kPreparing = kPreparingWarps, kHalves = kHalvesOfKeys, kStages = kStagesOfShared;
  static constexpr int kColumnWarps = kColumnTiles * kHalves, kColumns = kColumnTiles * 16;
  static constexpr int kThreads = (kPreparing + kColumnWarps) * kWarpLanes, kCtasPerSm = kCtas;
};

template <int kKeys, bool kDelta, class Shape>
struct ScanShared {
  ChunkOperands<kKeys, kDelta> chunks[Shape::kStages][Shape::kPreparing];
  HalvesExchange exchange[Shape::kHalves == 1 ? 1 : Shape::kColumns / 16];
};

template <int kKeys, bool kDelta, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    state_scan_kernel(const __grid_constant__ StateScan op, int32_t strips) {
  using Shared = ScanShared<kKeys, kDelta, Shape>;
  constexpr int kPreparing = Shape::kPreparing, kColumnWarps = Shape::kColumnWarps, kStages = Shape::kStages;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const unsigned task = blockIdx.x / static_cast<unsigned>(strips), heads = static_cast<unsigned>(op.heads);
  const HeadChunks of(op, static_cast<int32_t>(task / heads), static_cast<int32_t>(task % heads));
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
      if (chunk < of.count) load_chunk(op, of, chunk, shared.chunks[step % kStages][own], aligned);
    };
    if constexpr (kStages == 3) load(0);
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t chunk = step * kPreparing + own;
      // The stage that is copied to was read two steps ago, behind the last barrier.
      load(kStages == 3 ? step + 1 : step);
      if (kStages == 3 && chunk + kPreparing < of.count) {
        ptx::async_wait<1>();
      } else {
        ptx::async_wait<0>();
      }
      __syncwarp();  // what other lanes have copied
      if (chunk < of.count) prepare_chunk(op, of, chunk, shared.chunks[step % kStages][own]);
      __syncthreads();  // prepared; and the columns' warps are done with the step before
    }
    return;
  }

  StateColumns<kKeys, kDelta, Shape::kHalves> columns;
  const int tile = warp / Shape::kHalves;
  columns.column = static_cast<int>(blockIdx.x % static_cast<unsigned>(strips)) * Shape::kColumns + tile * 16;
  columns.half = warp % Shape::kHalves;
  columns.exchange = &shared.exchange[Shape::kHalves == 1 ? 0 : tile];
  columns.turn = 0;
  columns.barrier = 1 + tile;
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
    columns.begin(op, of, rows[0]);
    columns.load_values(op, of, rows[0], values[0]);
  }
  for (int32_t step = 0; step < steps; ++step) {
    __syncthreads();  // the step's chunks are prepared
#pragma unroll 1
    for (int i = 0; i < kPreparing; ++i) {
      const int32_t chunk = step * kPreparing + i;
      if (chunk >= of.count) break;
      const bool more = chunk + 1 < of.count;
      if (more) {
        rows[1] = of.rows(op, chunk + 1);
        columns.load_values(op, of, rows[1], values[1]);
      }
      const bool kept = rows[0].block != nullptr && rows[0].last == kStateChunk;
      columns.advance(op, of, rows[0], shared.chunks[step % kStages][i], values[0],
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

template <int kKeys, bool kDelta, class Shape>
void launch_state_scan_as(const StateScan& op, const Launch& at) {
  const auto kernel = state_scan_kernel<kKeys, kDelta, Shape>;
  constexpr size_t kBytes = sizeof(ScanShared<kKeys, kDelta, Shape>);
  allow_shared_memory(kernel, kBytes);
  const int32_t strips = (op.value_dim + Shape::kColumns - 1) / Shape::kColumns;
  const int64_t ctas = int64_t{op.sequences.count} * op.heads * strips;
  kernel<<<static_cast<unsigned>(ctas), Shape::kThreads, kBytes, at.stream>>>(op, strips);
  check_launch(kDelta ? "gated_delta_kernel" : "selective_scan_kernel");
}

// Which kernel: no bit depends on it. Few heads are bound by what follows one another: two warps have the
// halves of the keys. Of many, warps of all columns share what is prepared.
template <bool kDelta>
void launch_state_scan(const StateScan& op, const Launch& at) {
  if (op.sequences.count == 0) return;
  const bool decodes = op.most_tokens > 0 && op.most_tokens <= kStateChunk;
  const int64_t heads = int64_t{op.sequences.count} * op.heads;
  const auto launch = [&]<int kKeys>() {
    constexpr bool kLong = kKeys > 128;
    if (decodes) return launch_state_scan_as<kKeys, kDelta, ScanShape<1, 4, 1, 2, kLong ? 1 : 2>>(op, at);
    if constexpr (kLong) {
      launch_state_scan_as<kKeys, kDelta, ScanShape<2, 4, 1, 2, 1>>(op, at);
    } else {
      if constexpr (kKeys >= 64) {
        if (heads * ((op.value_dim + 63) / 64) <= at.device.sm_count())
          return launch_state_scan_as<kKeys, kDelta, ScanShape<4, 4, 2, 2, 1>>(op, at);
      }
      if (kDelta && op.value_dim > 64)
        return launch_state_scan_as<kKeys, kDelta, ScanShape<4, 8, 1, 2, 1>>(op, at);
      launch_state_scan_as<kKeys, kDelta, ScanShape<2, 4, 1, kDelta ? 2 : 3, 2>>(op, at);
    }
  };
  if (op.key_dim <= 32) return launch.template operator()<32>();
  if (op.key_dim <= 64) return launch.template operator()<64>();
  if (op.key_dim <= 128) return launch.template operator()<128>();
  launch.template operator()<kMaxStateKeyDim>();
}

}  // namespace millrace::cuda
