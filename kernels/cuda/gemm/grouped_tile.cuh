// What the grouped kernels (grouped_wgmma.cu, grouped_fp8.cu) add to the dense ones' tiles (dense_tile.cuh):
// items of experts, maps of experts' matrices, and outputs that end inside a tile.
//
// Two CTAs are a cluster with the same rows of `a` and neighbouring columns: an expert seldom has rows for
// two tiles. Each loads half of the rows to both, and its own columns of `b`.
#pragma once

#include "kernels/cuda/gemm/dense_launch.cuh"
#include "kernels/cuda/gemm/group_schedule.cuh"
#include "kernels/cuda/gemm/grouped.h"

namespace millrace::cuda {

struct GroupedProblem {
  DenseProblem dense;  // c, epilogue, n; m and k_blocks where they are the same for every expert
  CUtensorMap a;       // boxes of half of a tile's rows
  CUtensorMap b;       // [experts]; wgrad: of rows
  const int32_t* offsets;
  int32_t experts, m;
  int32_t row_tiles, column_tiles;  // of an expert (wgrad), of clusters
  int64_t ldc;
  void* c;
  int64_t b_scales_per_expert;
};

struct GroupedItem {
  int32_t expert;
  int32_t a_row;             // of a, its outputs' dimension
  int32_t c_row, rows;       // of c, and how many of them are the tile's
  int32_t column;            // this CTA's first
  int32_t k_first, k_count;  // rows that are summed (wgrad); else 0 and all of them
};

template <class Tile, bool kWgrad>
struct GroupedCursor {
  const GroupedProblem& p;
  GroupCursor rows;
  __device__ explicit GroupedCursor(const GroupedProblem& of)
      : p(of),
        rows(kWgrad ? nullptr : of.offsets, kWgrad ? 1 : of.experts, of.m, Tile::kRows, of.column_tiles, 8) {}
  __device__ bool find(int index, GroupedItem& item) {
    const int rank = static_cast<int>(blockIdx.x % Tile::kCtas);
    int32_t column_tile;
    if constexpr (kWgrad) {
      const int tiles = p.row_tiles * p.column_tiles;
      if (index >= p.experts * tiles) return false;
      const DenseTileAt at(index % tiles, p.row_tiles, p.column_tiles, 8);
      item.expert = index / tiles;
      item.a_row = at.m_tile * Tile::kRows;
      item.c_row = item.expert * p.dense.m + item.a_row;
      item.rows = min(Tile::kRows, p.dense.m - item.a_row);
      item.k_first = __ldg(p.offsets + item.expert);
      item.k_count = __ldg(p.offsets + item.expert + 1) - item.k_first;
      column_tile = at.n_tile;
    } else {
      GroupItem group;
      if (!rows.find(index, group)) return false;
      item.expert = group.expert;
      item.a_row = item.c_row = group.first_row;
      item.rows = group.rows;
      item.k_first = 0, item.k_count = p.dense.k_blocks * Tile::kStageK;
      column_tile = group.column_tile;
    }
    item.column = (column_tile * Tile::kCtas + rank) * Tile::kColumns;
    return true;
  }
};

#ifdef MILLRACE_HAS_WGMMA

// The producer, one thread.
template <class Tile, bool kWgrad>
__device__ void produce_grouped(const GroupedProblem& p, const DenseShared<Tile>& shared) {
  const int rank = static_cast<int>(blockIdx.x % Tile::kCtas);
  constexpr int kShare = Tile::kRows / Tile::kCtas;
  uint32_t stage = 0, parity = 1;
  GroupedCursor<Tile, kWgrad> cursor(p);
  GroupedItem item;
  for (int index = static_cast<int>(blockIdx.x) / Tile::kCtas; cursor.find(index, item);
       index += static_cast<int>(gridDim.x) / Tile::kCtas) {
    for (int at = 0; at < item.k_count; at += Tile::kStageK) {
      ptx::barrier_wait(shared.empty + stage, parity);
      uint64_t* full = shared.full + stage;
      uint8_t* to = shared.stages + stage * Tile::kStageBytes;
      const int k = item.k_first + at;
      ptx::barrier_arrive_expect(full, Tile::kStageBytes);
      uint8_t* mine = to + rank * kShare * 128;
      if constexpr (Tile::kTransposedA) {
        static_assert(kShare == 64);
        load_box<Tile::kCtas>(mine, &p.a, item.a_row + rank * kShare, k, full);
      } else {
        load_box<Tile::kCtas>(mine, &p.a, k, item.a_row + rank * kShare, full);
      }
      uint8_t* b = to + Tile::kABytes;
      if constexpr (Tile::kTransposedB) {
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 64; ++i) {
          ptx::tma_load_5d(b + i * 64 * 128, &p.b, item.column + 64 * i, k, kWgrad ? 0 : item.expert, 0, 0,
                           full);
        }
      } else {
        ptx::tma_load_5d(b, &p.b, k, item.column, item.expert, 0, 0, full);
      }
      if (++stage == Tile::kStages) stage = 0, parity ^= 1u;
    }
  }
}

// 64 rows of an item from `first` on, all or as many as there are.
template <class Tile, int kSums>
__device__ void store_grouped(const GroupedProblem& p, DensePanels<Tile>& panels, const GroupedItem& item,
                              int first, float (&sum)[kSums]) {
  const int rows = item.rows - first;
  if (rows <= 0 || item.column >= p.dense.n) return;
  if (rows >= 64) return panels.store_rounded(p.dense, sum, item.c_row + first, item.column);
  const DenseOut out = p.dense.epilogue.out;
  int column = item.column + 2 * (panels.lane % 4);
#pragma unroll 1
  for (int group = 0; group < kSums / 32; ++group, column += 64) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = 16 * panels.warp + panels.lane / 4 + i / 2 % 2 * 8, at = column + i / 4 * 8 + i % 2;
      if (row >= rows || at >= p.dense.n) continue;
      const float y = sum[i] * p.dense.epilogue.alpha;
      const int64_t to = int64_t{item.c_row + first + row} * p.ldc + at;
      if (out == DenseOut::kF32) static_cast<float*>(p.c)[to] = y;
      if (out == DenseOut::kBf16) static_cast<__nv_bfloat16*>(p.c)[to] = __float2bfloat16_rn(y);
      if (out == DenseOut::kF16) static_cast<__half*>(p.c)[to] = __float2half_rn(y);
    }
#pragma unroll
    for (int i = 0; i < kSums - 32; ++i) sum[i] = sum[i + 32];
  }
}

#endif  // MILLRACE_HAS_WGMMA

template <class Tile>
GroupedProblem grouped_problem(const GroupedDense& op, const Launch& at) {
  constexpr int kBytes = Tile::kElementBytes, kShare = Tile::kRows / Tile::kCtas;
  constexpr bool kWgrad = Tile::kTransposedA;
  GroupedProblem p{};
  p.offsets = op.offsets;
  p.experts = op.experts;
  p.m = static_cast<int32_t>(op.m);
  p.c = op.c;
  p.ldc = op.ldc;
  const int64_t columns = op.op == GroupedOp::kForward ? op.n : op.k;
  const int64_t reduced = op.op == GroupedOp::kForward ? op.k : op.op == GroupedOp::kDgrad ? op.n : op.m;
  const int64_t out_rows = kWgrad ? op.experts * op.n : op.m;
  p.dense.n = static_cast<int32_t>(columns);
  p.dense.m = static_cast<int32_t>(kWgrad ? op.n : op.m);
  p.dense.k_blocks = static_cast<int32_t>((reduced + Tile::kStageK - 1) / Tile::kStageK);
  p.dense.c = dense_map(at.device, op.c, op.out == DenseOut::kF32 ? 4 : 2, columns, out_rows, op.ldc, 64);
  p.dense.epilogue.alpha = op.alpha;
  p.dense.epilogue.out = op.out;
  p.dense.a_scales = op.a_scales;
  p.dense.b_scales = op.b_scales;
  p.dense.a_scale_stride = op.a_scale_stride;
  p.dense.b_scale_stride = p.dense.k_blocks;
  p.b_scales_per_expert = (op.n + 127) / 128 * p.dense.k_blocks;
  p.a = kWgrad ? dense_map(at.device, op.a, kBytes, op.n, op.m, op.lda, 64)
               : dense_map(at.device, op.a, kBytes, reduced, op.m, op.lda, kShare);
  const auto size = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  const int64_t row = op.ldb * kBytes;
  if (kWgrad) {
    const cuuint64_t sizes[5] = {size(op.k), size(op.m), 1, 1, 1};
    const cuuint64_t strides[4] = {size(row), size(row * op.m), size(row * op.m), size(row * op.m)};
    p.b = ptx::swizzled_map(at.device, op.b, kBytes == 1, sizes, strides, 128 / kBytes, 64);
  } else {
    const cuuint64_t sizes[5] = {size(op.k), size(op.n), size(op.experts), 1, 1};
    const cuuint64_t strides[4] = {size(row), size(row * op.n), size(row * op.n), size(row * op.n)};
    p.b = ptx::swizzled_map(at.device, op.b, kBytes == 1, sizes, strides, 128 / kBytes,
                            Tile::kTransposedB ? 64 : Tile::kColumns);
  }
  constexpr int64_t kClusterColumns = int64_t{Tile::kColumns} * Tile::kCtas;
  p.column_tiles = static_cast<int32_t>((columns + kClusterColumns - 1) / kClusterColumns);
  p.row_tiles = static_cast<int32_t>((op.n + Tile::kRows - 1) / Tile::kRows);
  return p;
}

template <class Tile, class Kernel>
void launch_grouped_tile(const char* name, Kernel* kernel, const GroupedDense& op, const Launch& at) {
  const GroupedProblem p = grouped_problem<Tile>(op, at);
  const int64_t rows = Tile::kTransposedA ? int64_t{op.experts} * p.row_tiles
                                          : (op.m + Tile::kRows - 1) / Tile::kRows + op.experts;
  const int64_t items = rows * p.column_tiles, clusters = at.device.sm_count() / Tile::kCtas;
  allow_shared_memory(kernel, Tile::kBytes);
  launch_clusters(name, Tile::kCtas, kernel,
                  dim3(static_cast<unsigned>((items < clusters ? items : clusters) * Tile::kCtas)),
                  Tile::kThreads, Tile::kBytes, at, p);
}

}  // namespace millrace::cuda
