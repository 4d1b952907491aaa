// The parts that the dense warpgroup kernels share (dense_wgmma.cu, dense_fp8.cu): tensor maps, the ring of
// stages, which tile is whose, and the way of a tile's outputs to memory.
//
// A CTA is two or three consumer warpgroups and a producer warp. A stage holds 128 bytes of K of both
// operands, 128-byte swizzle:
//     K-major    [rows][128 bytes]: one box of a map
//     MN-major   [64 outputs' chunk][64 rows of K][128 bytes]: a box for every 64 outputs
// Outputs leave through shared memory, 64 rows x 128 bytes of a warpgroup at a time, two such panels in turn,
// by tensor copies that leave out what lies outside.
#pragma once

#include <cuda.h>

#include "kernels/cuda/gemm/dense_epilogue.cuh"
#include "kernels/cuda/ptx/bulk_reduce.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/grid_dependency.cuh"
#include "kernels/cuda/ptx/prefetch.cuh"
#include "kernels/cuda/ptx/tensor_map.cuh"
#include "kernels/cuda/ptx/wgmma_dense.cuh"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {

inline constexpr int kPanelBytes = 64 * 128;
inline constexpr int kDenseSharedBytes = 232448;  // that a CTA of Hopper may have

// kM x kN outputs of a CTA, clusters of kCluster CTAs that share kN: consecutive kM. A consumer warpgroup has
// 64 rows; of a tile of 64 rows two have half of the columns each.
template <class Element, int kM, int kN, int kCluster, bool kMnA, bool kMnB>
struct DenseTile {
  static constexpr int kElementBytes = Element::kElementBytes;
  static constexpr int kStageK = 128 / kElementBytes;
  static constexpr int kRows = kM, kColumns = kN, kCtas = kCluster;
  static constexpr bool kTransposedA = kMnA, kTransposedB = kMnB;
  static constexpr int kABytes = kM * 128, kBBytes = kN * 128, kStageBytes = kABytes + kBBytes;
  static constexpr bool kSplitColumns = kM == 64;
  static constexpr int kConsumers = kSplitColumns ? 2 : kM / 64;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  // Of a thread, once the warpgroups have shared out the registers.
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160,
                       kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kWarpgroupColumns = kSplitColumns ? kN / 2 : kN;
  static constexpr int kSums = kWarpgroupColumns / 2;
  static constexpr int kPanelsBytes = kConsumers * 2 * kPanelBytes;
  static constexpr int kFits = (kDenseSharedBytes - 1024 - kPanelsBytes - 256) / kStageBytes;
  static constexpr int kStages = kFits < 8 ? kFits : 8;
  static constexpr int kBytes = 1024 + kStages * kStageBytes + kPanelsBytes + 256;
  static_assert(kStages >= 3 && kM % 64 == 0 && kN % 64 == 0 && kM <= 192);
  static_assert(kN / 64 % kCluster == 0);
};

struct DenseProblem {
  CUtensorMap a, b, c;
  DenseEpilogue epilogue;
  int32_t m, n, k_blocks;
  int32_t m_tiles, n_tiles;  // of a cluster
  const float *a_scales, *b_scales;
  int64_t a_scale_stride, b_scale_stride;
};

// Tile `index` of a cluster: its rows of tiles in groups, so that the tiles in flight share operands in L2.
struct DenseTileAt {
  int32_t m_tile, n_tile;
  __device__ DenseTileAt(int32_t index, int32_t m_tiles, int32_t n_tiles, int32_t group) {
    const int32_t per_group = group * n_tiles, first = index / per_group * group;
    const int32_t height = min(group, m_tiles - first), inside = index % per_group;
    m_tile = first + inside % height;
    n_tile = inside / height;
  }
};

#ifdef MILLRACE_HAS_WGMMA

template <class Tile>
struct DenseShared {
  uint8_t *stages, *panels;
  uint64_t *full, *empty;
  __device__ explicit DenseShared(uint8_t* base) {
    stages = base + (1024u - ptx::shared_address(base) % 1024u) % 1024u;
    panels = stages + Tile::kStages * Tile::kStageBytes;
    full = reinterpret_cast<uint64_t*>(panels + Tile::kPanelsBytes);
    empty = full + Tile::kStages;
  }
  __device__ void init() const {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, Tile::kCtas * Tile::kConsumers);
    }
    ptx::barrier_init_fence();
  }
};

// A box to shared memory of this CTA or of all of a cluster.
template <int kCtas>
__device__ inline void load_box(void* to, const CUtensorMap* map, int32_t inner, int32_t outer,
                                uint64_t* barrier) {
  if constexpr (kCtas == 1) {
    ptx::tma_load_box(to, map, inner, outer, barrier);
  } else {
    ptx::tma_load_box_multicast((1 << kCtas) - 1, to, map, inner, outer, barrier);
  }
}

template <class Tile>
__device__ DenseTileAt tile_at(const DenseProblem& p, int32_t index) {
  return DenseTileAt(index, p.m_tiles, p.n_tiles, 16 / Tile::kCtas);
}

// The producer, one thread: its CTA's rows of a, and its share of the columns of b to all CTAs of the
// cluster.
template <class Tile>
__device__ void produce(const DenseProblem& p, const DenseShared<Tile>& shared) {
  const int rank = static_cast<int>(blockIdx.x % Tile::kCtas);
  const int tiles = p.m_tiles * p.n_tiles;
  uint32_t stage = 0, parity = 1;
  for (int index = static_cast<int>(blockIdx.x) / Tile::kCtas; index < tiles;
       index += static_cast<int>(gridDim.x) / Tile::kCtas) {
    const DenseTileAt at = tile_at<Tile>(p, index);
    const int row = (at.m_tile * Tile::kCtas + rank) * Tile::kRows, column = at.n_tile * Tile::kColumns;
    for (int block = 0; block < p.k_blocks; ++block) {
      ptx::barrier_wait(shared.empty + stage, parity);
      uint64_t* full = shared.full + stage;
      uint8_t* to = shared.stages + stage * Tile::kStageBytes;
      const int k = block * Tile::kStageK;
      ptx::barrier_arrive_expect(full, Tile::kStageBytes);
      if constexpr (Tile::kTransposedA) {
#pragma unroll
        for (int i = 0; i < Tile::kRows / 64; ++i)
          load_box<1>(to + i * 64 * 128, &p.a, row + 64 * i, k, full);
      } else {
        load_box<1>(to, &p.a, k, row, full);
      }
      constexpr int kShare = Tile::kColumns / Tile::kCtas;
      uint8_t* mine = to + Tile::kABytes + rank * kShare * 128;
      if constexpr (Tile::kTransposedB) {
#pragma unroll
        for (int i = 0; i < kShare / 64; ++i)
          load_box<Tile::kCtas>(mine + i * 64 * 128, &p.b, column + rank * kShare + 64 * i, k, full);
      } else {
        load_box<Tile::kCtas>(mine, &p.b, k, column + rank * kShare, full);
      }
      if (++stage == Tile::kStages) stage = 0, parity ^= 1u;
    }
  }
}

// A consumer's place in the ring, and the descriptors of its operands there.
template <class Tile>
struct DenseCursor {
  const DenseShared<Tile>& shared;
  const int warpgroup;
  uint32_t stage = 0, parity = 0;
  uint32_t peer_empty = 0;

  __device__ DenseCursor(const DenseShared<Tile>& of, int warpgroup_index)
      : shared(of), warpgroup(warpgroup_index) {
    if constexpr (Tile::kCtas == 2)
      peer_empty = ptx::remote_address(blockIdx.x % 2 ^ 1u, ptx::shared_address(shared.empty));
  }
  __device__ void wait() const { ptx::barrier_wait(shared.full + stage, parity); }
  __device__ void advance() {
    if (++stage == Tile::kStages) stage = 0, parity ^= 1u;
  }
  // By one thread of the warpgroup: stage `read` has been read.
  __device__ void release(uint32_t read) const {
    ptx::barrier_arrive(shared.empty + read);
    if constexpr (Tile::kCtas == 2) ptx::barrier_arrive_remote(peer_empty + 8 * read);
  }
  __device__ uint64_t a() const {
    const uint8_t* at =
        shared.stages + stage * Tile::kStageBytes + (Tile::kSplitColumns ? 0 : warpgroup * 64 * 128);
    return Tile::kTransposedA ? ptx::wgmma_transposed_operand(at, 64 * 128) : ptx::wgmma_operand(at);
  }
  __device__ uint64_t b() const {
    const uint8_t* at = shared.stages + stage * Tile::kStageBytes + Tile::kABytes +
                        (Tile::kSplitColumns ? warpgroup * Tile::kWarpgroupColumns * 128 : 0);
    return Tile::kTransposedB ? ptx::wgmma_transposed_operand(at, 64 * 128) : ptx::wgmma_operand(at);
  }
};

// The four products of a stage, under way.
template <class Element, class Tile, class Sum, int kSums>
__device__ inline void multiply_stage(const DenseCursor<Tile>& at, Sum (&sum)[kSums], bool first) {
  constexpr uint64_t kNextA = Tile::kTransposedA ? 128 : 2, kNextB = Tile::kTransposedB ? 128 : 2;
  const uint64_t a = at.a(), b = at.b();
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::DenseWgmma<Element, Tile::kWarpgroupColumns, Tile::kTransposedA, Tile::kTransposedB>::multiply(
        sum, a + i * kNextA, b + i * kNextB, !first || i > 0);
  }
  ptx::wgmma_commit();
}

// A warpgroup's way out: two panels in turn.
template <class Tile>
struct DensePanels {
  uint8_t* const panels;
  const int warpgroup, warp, lane;  // warp of the warpgroup
  int turn = 0;

  __device__ DensePanels(const DenseShared<Tile>& shared, int warpgroup_index, int warp_index, int lane_index)
      : panels(shared.panels + warpgroup_index * 2 * kPanelBytes),
        warpgroup(warpgroup_index),
        warp(warp_index),
        lane(lane_index) {}

  __device__ bool leader() const { return warp == 0 && lane == 0; }
  // A panel that no copy reads any more.
  __device__ uint8_t* begin() const {
    if (leader()) ptx::bulk_store_wait<1>();
    ptx::named_barrier<128>(1 + warpgroup);
    return panels + turn * kPanelBytes;
  }
  __device__ void end(const CUtensorMap* map, int32_t column, int32_t row) {
    ptx::publish_to_async();
    ptx::named_barrier<128>(1 + warpgroup);
    if (leader()) {
      ptx::tma_store_box(map, column, row, panels + turn * kPanelBytes);
      ptx::bulk_store_commit();
    }
    turn ^= 1;
  }

  __device__ static uint32_t pack(float low, float high, DenseOut type) {
    if (type == DenseOut::kBf16) {
      const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&v);
    }
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }

  // sum[kSums]: 64 rows from `row` and columns from `column` on, both of the whole matrix. They go 64 columns
  // at a time by the same instructions, the next ones brought forward in registers: code that ran once for
  // every column would come from memory.
  template <class Sum, int kSums>
  __device__ void store(const DenseProblem& p, Sum (&sum)[kSums], int32_t row, int32_t column) {
    const DenseEpilogue& e = p.epilogue;
    const bool plain = e.row_scales == nullptr && e.column_scales == nullptr && e.bias == nullptr &&
                       e.activation == DenseActivation::kNone && e.residual == nullptr;
#pragma unroll 1
    for (int group = 0; group < kSums / 32; ++group, column += 64) {
      float y[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] = static_cast<float>(sum[i]);
#pragma unroll
      for (int i = 0; i < kSums - 32; ++i) sum[i] = sum[i + 32];
      if (!plain) {
        finish(p, y, row + 16 * warp + lane / 4, column + 2 * (lane % 4));
      } else if (e.alpha != 1.0f) {
#pragma unroll
        for (int i = 0; i < 32; ++i) y[i] *= e.alpha;
      }
      if (e.out == DenseOut::kF32) {
        store_floats(p, y, row, column);
      } else {
        store_halves(p, y, row, column);
      }
    }
  }

  // Lines of the residual on their way to L2 while the tile is multiplied; 64 rows x kColumns of this
  // warpgroup.
  template <int kColumns>
  __device__ void prefetch_residual(const DenseProblem& p, int32_t row, int32_t column) const {
    const DenseEpilogue& e = p.epilogue;
    if (e.residual == nullptr) return;
    const int bytes = e.out == DenseOut::kF32 ? 4 : 2, per_line = 128 / bytes;
    const int32_t r = row + (32 * warp + lane) / 2;  // two threads a row
    if (r >= p.m) return;
    const auto* from = static_cast<const uint8_t*>(e.residual) + r * e.residual_stride * bytes;
    for (int32_t c = column + lane % 2 * per_line; c < min(column + kColumns, p.n); c += 2 * per_line)
      ptx::prefetch_l2(from + int64_t{c} * bytes);
  }

  // dense_output of y[32], a lane's part of 64 columns: rows `row` and + 8, columns `column`, + 1, and every
  // eighth on. What is outside reads what the last row or column does, so that all loads are under way at
  // once.
  __device__ static void finish(const DenseProblem& p, float (&y)[32], int32_t row, int32_t column) {
    const DenseEpilogue& e = p.epilogue;
    const auto at = [&](int i) { return min(column + i / 2 * 8 + i % 2, p.n - 1); };
    const int32_t rows[2] = {min(row, p.m - 1), min(row + 8, p.m - 1)};
    const float scale[2] = {e.row_scales != nullptr ? e.alpha * e.row_scales[rows[0]] : e.alpha,
                            e.row_scales != nullptr ? e.alpha * e.row_scales[rows[1]] : e.alpha};
    if (e.column_scales != nullptr) {
      float factor[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) factor[i] = e.column_scales[at(i)];
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] *= factor[i / 4 * 2 + i % 2];
    }
    float bias[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) bias[i] = e.bias != nullptr ? e.bias[at(i)] : 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) y[i] = fmaf(y[i], scale[i % 4 / 2], bias[i / 4 * 2 + i % 2]);
    activate_all(y, e.activation);
    if (e.residual == nullptr) return;
    const int64_t bytes = e.out == DenseOut::kF32 ? 4 : 2;
    const bool pairs = p.n % 2 == 0 && e.residual_stride % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(e.residual) % (2 * bytes) == 0;
    if (e.out == DenseOut::kF32) {
      add_residual<float>(e, y, rows, pairs, at);
    } else if (e.out == DenseOut::kBf16) {
      add_residual<__nv_bfloat16>(e, y, rows, pairs, at);
    } else {
      add_residual<__half>(e, y, rows, pairs, at);
    }
  }
  __device__ static void activate_all(float (&y)[32], DenseActivation activation) {
    if (activation == DenseActivation::kGelu) {
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] = dense_activate(y[i], DenseActivation::kGelu);
    } else if (activation == DenseActivation::kGeluTanh) {
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] = dense_activate(y[i], DenseActivation::kGeluTanh);
    } else if (activation == DenseActivation::kSilu) {
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] = dense_activate(y[i], DenseActivation::kSilu);
    }
  }
  template <class Value, class Columns>
  __device__ static void add_residual(const DenseEpilogue& e, float (&y)[32], const int32_t (&rows)[2],
                                      bool pairs, const Columns& at) {
    struct alignas(2 * sizeof(Value)) Pair {
      Value low, high;
    };
    const Value* from[2] = {static_cast<const Value*>(e.residual) + rows[0] * e.residual_stride,
                            static_cast<const Value*>(e.residual) + rows[1] * e.residual_stride};
    Pair value[16];
    if (pairs) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        value[i] = *reinterpret_cast<const Pair*>(from[i % 2] + (at(i / 2 * 2) & ~1));
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) value[i] = {from[i % 2][at(i / 2 * 2)], from[i % 2][at(i / 2 * 2 + 1)]};
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      y[2 * i] += static_cast<float>(value[i].low);
      y[2 * i + 1] += static_cast<float>(value[i].high);
    }
  }

  // y[32]: 64 columns from `column` on, two panels.
  __device__ void store_floats(const DenseProblem& p, const float (&y)[32], int32_t row, int32_t column) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      uint8_t* to = begin();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 16 * panel + 4 * j + 2 * half;
          const auto r = static_cast<uint32_t>(16 * warp + g + 8 * half);
          *reinterpret_cast<float2*>(to + ptx::swizzled(r, static_cast<uint32_t>(32 * j + 8 * t))) =
              make_float2(y[i], y[i + 1]);
        }
      }
      end(&p.c, column + 32 * panel, row);
    }
  }
  // The same in 16 bits, one panel.
  __device__ void store_halves(const DenseProblem& p, const float (&y)[32], int32_t row, int32_t column) {
    uint8_t* to = begin();
    const DenseOut out = p.epilogue.out;
    const auto r = static_cast<uint32_t>(16 * warp + lane / 8 % 2 * 8 + lane % 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns
      const int i = 8 * j;
      const uint32_t packed[4] = {pack(y[i], y[i + 1], out), pack(y[i + 2], y[i + 3], out),
                                  pack(y[i + 4], y[i + 5], out), pack(y[i + 6], y[i + 7], out)};
      ptx::store_matrices(
          ptx::shared_address(to) + ptx::swizzled(r, static_cast<uint32_t>(32 * j + lane / 16 * 16)), packed);
    }
    end(&p.c, column, row);
  }
};

#endif  // MILLRACE_HAS_WGMMA

// The map of a matrix of elements of `bytes`, [outer][inner] with rows `stride` elements apart, in boxes of
// box_outer x 128 bytes, swizzled.
inline CUtensorMap dense_map(const Device& device, const void* base, int bytes, int64_t inner, int64_t outer,
                             int64_t stride, int box_outer) {
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(device.tensor_map_encoder());
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  const CUtensorMapDataType type = bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  const CUresult status = encode(&map, type, 2, const_cast<void*>(base), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_call(status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
  return map;
}

template <class Tile>
DenseProblem dense_problem(const DenseGemm& op, const Launch& at) {
  DenseProblem p{};
  constexpr int kBytes = Tile::kElementBytes;
  p.a = Tile::kTransposedA ? dense_map(at.device, op.a, kBytes, op.m, op.k, op.lda, 64)
                           : dense_map(at.device, op.a, kBytes, op.k, op.m, op.lda, Tile::kRows);
  p.b = Tile::kTransposedB
            ? dense_map(at.device, op.b, kBytes, op.n, op.k, op.ldb, 64)
            : dense_map(at.device, op.b, kBytes, op.k, op.n, op.ldb, Tile::kColumns / Tile::kCtas);
  p.c = dense_map(at.device, op.c, op.epilogue.out == DenseOut::kF32 ? 4 : 2, op.n, op.m, op.ldc, 64);
  p.epilogue = op.epilogue;
  p.m = static_cast<int32_t>(op.m);
  p.n = static_cast<int32_t>(op.n);
  p.k_blocks = static_cast<int32_t>((op.k + Tile::kStageK - 1) / Tile::kStageK);
  constexpr int64_t kClusterRows = int64_t{Tile::kRows} * Tile::kCtas;
  p.m_tiles = static_cast<int32_t>((op.m + kClusterRows - 1) / kClusterRows);
  p.n_tiles = static_cast<int32_t>((op.n + Tile::kColumns - 1) / Tile::kColumns);
  p.a_scales = op.a_scales;
  p.b_scales = op.b_scales;
  p.a_scale_stride = op.a_scale_stride;
  p.b_scale_stride = op.b_scale_stride;
  return p;
}

template <class Tile, class Kernel>
void launch_dense_tile(const char* name, Kernel* kernel, const DenseGemm& op, const Launch& at) {
  const DenseProblem p = dense_problem<Tile>(op, at);
  const int clusters = at.device.sm_count() / Tile::kCtas;
  const int64_t tiles = int64_t{p.m_tiles} * p.n_tiles;
  const auto grid = static_cast<unsigned>((tiles < clusters ? tiles : clusters) * Tile::kCtas);
  allow_shared_memory(kernel, Tile::kBytes);
  launch_clusters(name, Tile::kCtas, kernel, dim3(grid), Tile::kThreads, Tile::kBytes, at, p);
}

}  // namespace millrace::cuda
