// The parts that the dense warpgroup kernels share (dense_wgmma.cu, dense_fp8.cu): tensor maps, the ring of
// stages, which tile is whose, and the way of a tile's outputs to memory.
//
// A CTA is one to three consumer warpgroups and a producer warp. A stage holds 128 bytes of K of both
// operands, 128-byte swizzle:
//     K-major    [rows][128 bytes]: one box of a map
//     MN-major   [64 outputs' chunk][64 rows of K][128 bytes]: a box for every 64 outputs
// Sums are finished in registers, 64 columns at a time (128 of e4m3), and leave through shared memory, 64
// rows x 128 bytes of a warpgroup at a time, two such panels in turn, by tensor copies that leave out what
// lies outside. A residual of 16 bits comes into the panels first, by the same copies. Where it is float32,
// or not aligned, sums leave by the same memory a warp at a time, four rows of float32, and are finished as a
// lane reads four neighbours of a row: whole lines of the residual.
#pragma once

#include <cuda.h>

#include "kernels/cuda/gemm/dense_epilogue.cuh"
#include "kernels/cuda/tile/tensor_map.cuh"
#include "millrace/kernels/tile/grid.cuh"
#include "millrace/kernels/tile/ptx/bulk_reduce.cuh"
#include "millrace/kernels/tile/ptx/cluster_shared.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"
#include "millrace/kernels/tile/ptx/prefetch.cuh"
#include "millrace/kernels/tile/ptx/wgmma_dense.cuh"
#include "millrace/kernels/tile/ring.cuh"

namespace millrace::cuda {

inline constexpr int kPanelBytes = 64 * 128;
inline constexpr int kDenseSharedBytes = 232448;  // that a CTA of Hopper may have

// kM x kN outputs of a CTA, clusters of kCluster CTAs that share kN: consecutive kM. A consumer warpgroup has
// kTallness times 64 rows; of a tile of as many rows and 128 or more columns two have half of the columns.
template <class Element, int kM, int kN, int kCluster, bool kMnA, bool kMnB, int kTallness = 1>
struct DenseTile {
  using Of = Element;
  static constexpr int kElementBytes = Element::kElementBytes;
  static constexpr int kStageK = 128 / kElementBytes;
  static constexpr int kRows = kM, kColumns = kN, kCtas = kCluster;
  static constexpr bool kTransposedA = kMnA, kTransposedB = kMnB;
  static constexpr int kABytes = kM * 128, kBBytes = kN * 128, kStageBytes = kABytes + kBBytes;
  static constexpr int kTall = kTallness;
  static constexpr bool kSplitColumns = kM == 64 * kTall && kN > 64 && kN / 2 % 32 == 0;
  static constexpr int kConsumers = kSplitColumns ? 2 : kM / 64 / kTall;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  // Of a thread, once the warpgroups have shared out the registers; one consumer has all that it can use.
  static constexpr bool kSharesRegisters = kConsumers > 1;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160,
                       kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kWarpgroupColumns = kSplitColumns ? kN / 2 : kN;
  static constexpr int kSums = kWarpgroupColumns / 2;
  // They leave 64 columns at a time, the last perhaps only 32.
  static constexpr bool kEndsHalf = kWarpgroupColumns % 64 != 0;
  static_assert(!(kEndsHalf && kMnB));
  static constexpr int kPanelsBytes = kConsumers * 2 * kPanelBytes;
  static constexpr int kFits = (kDenseSharedBytes - 1024 - kPanelsBytes - 256) / kStageBytes;
  static constexpr int kStages = kFits < 12 ? kFits : 12;
  static constexpr int kBytes = 1024 + kStages * kStageBytes + kPanelsBytes + 256;
  static_assert(kStages >= 3 && kM % (64 * kTall) == 0 && kN % 32 == 0 && kConsumers <= 3);
  static_assert(kN / (kMnB ? 64 : 8) % kCluster == 0);
  using Ring = tile::RingBarriers<kStages, kCtas>;
  static_assert(sizeof(Ring) + kConsumers * 2 * sizeof(uint64_t) <= 256);
  // Whether the epilogue can go by rows: parts of 128 columns, or one of 64.
  static constexpr bool kGoesByRows = kWarpgroupColumns == 64 || kWarpgroupColumns % 128 == 0;
  // Of gates and what they multiply a cluster's first CTA loads the ones, its second the others.
  static constexpr bool kTakesGates = kN == 256 && kCtas == 2;
};

struct DenseProblem {
  CUtensorMap a, b, c, residual;
  CUtensorMap c_half, residual_half;  // of 16 bits, in boxes of 32 columns
  DenseEpilogue epilogue;
  void* out;
  int64_t ldc;
  int32_t m, n, outputs, k_blocks;
  tile::TileOrder order;  // of a cluster's tiles
  int32_t gate_columns;   // of a tile, 0: all; its other half is `outputs` further on
  bool by_rows;           // the epilogue goes by rows through shared memory
  // Stage of a tile at which the residual's first boxes are loaded; -1: it does not come by boxes.
  int32_t residual_at = -1;
  const float *a_scales, *b_scales;
  int64_t a_scale_stride, b_scale_stride;
};

// Tile `index` of an order of tiles.
struct DenseTileAt {
  int32_t m_tile, n_tile;
  __device__ DenseTileAt(int32_t index, int32_t m_tiles, int32_t n_tiles, int32_t group) {
    const tile::TileOrder::At at = tile::TileOrder{m_tiles, n_tiles, group}.at(index);
    m_tile = at.m, n_tile = at.n;
  }
};

#ifdef MILLRACE_HAS_WGMMA

template <class Tile>
struct DenseShared {
  uint8_t *stages, *panels;
  typename Tile::Ring* ring;
  uint64_t *full, *empty;  // its barriers
  uint64_t* residual;      // of the panels: two of each consumer
  __device__ explicit DenseShared(uint8_t* base) {
    stages = base + (1024u - ptx::shared_address(base) % 1024u) % 1024u;
    panels = stages + Tile::kStages * Tile::kStageBytes;
    ring = reinterpret_cast<typename Tile::Ring*>(panels + Tile::kPanelsBytes);
    full = ring->full, empty = ring->empty;
    residual = reinterpret_cast<uint64_t*>(ring + 1);
  }
  __device__ void init() const {
    for (int i = 0; i < 2 * Tile::kConsumers; ++i) ptx::barrier_init(residual + i, 1);
    ring->init(Tile::kConsumers);
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

// A stage on its way: this CTA's rows of a from `row` on, and its share of the columns of b, from `column`
// on, to all CTAs of the cluster.
template <class Tile>
__device__ inline void load_stage(const DenseProblem& p, const DenseShared<Tile>& shared,
                                  typename Tile::Ring::Cursor at, int row, int column, int rank, int block) {
  constexpr int kShare = Tile::kColumns / Tile::kCtas;
  shared.ring->wait_empty(at);
  uint64_t* full = shared.ring->full + at.stage;
  uint8_t* to = shared.stages + at.stage * Tile::kStageBytes;
  const int k = block * Tile::kStageK;
  shared.ring->expect(at, Tile::kStageBytes);
  if constexpr (Tile::kTransposedA) {
#pragma unroll
    for (int i = 0; i < Tile::kRows / 64; ++i) load_box<1>(to + i * 64 * 128, &p.a, row + 64 * i, k, full);
  } else {
    load_box<1>(to, &p.a, k, row, full);
  }
  uint8_t* mine = to + Tile::kABytes + rank * kShare * 128;
  if constexpr (Tile::kTransposedB) {
#pragma unroll
    for (int i = 0; i < kShare / 64; ++i)
      load_box<Tile::kCtas>(mine + i * 64 * 128, &p.b, column + 64 * i, k, full);
  } else {
    load_box<Tile::kCtas>(mine, &p.b, k, column, full);
  }
}
// The producer, one thread.
template <class Tile>
__device__ void produce(const DenseProblem& p, const DenseShared<Tile>& shared) {
  const int rank = static_cast<int>(blockIdx.x % Tile::kCtas);
  typename Tile::Ring::Cursor at;
  tile::each_tile<Tile::kCtas>(p.order, [&](tile::TileOrder::At tile) {
    const int row = (tile.m * Tile::kCtas + rank) * Tile::kRows;
    const int column = p.gate_columns > 0 ? tile.n * p.gate_columns + rank * p.outputs
                                          : tile.n * Tile::kColumns + rank * (Tile::kColumns / Tile::kCtas);
    for (int block = 0; block < p.k_blocks; ++block, ++at)
      load_stage(p, shared, at, row, column, rank, block);
  });
}

// A consumer's place in the ring, and the descriptors of its operands there.
template <class Tile>
struct DenseCursor : Tile::Ring::Cursor {
  const DenseShared<Tile>& shared;
  const int warpgroup;

  __device__ DenseCursor(const DenseShared<Tile>& of, int warpgroup_index)
      : shared(of), warpgroup(warpgroup_index) {}
  __device__ void wait() const { shared.ring->wait_full(*this); }
  __device__ void advance() { ++*this; }
  // By one thread of the warpgroup: stage `read` has been read.
  __device__ void release(uint32_t read) const { shared.ring->release({read, 0}); }
  __device__ uint64_t a() const {
    const uint8_t* at = shared.stages + this->stage * Tile::kStageBytes +
                        (Tile::kSplitColumns ? 0 : warpgroup * Tile::kTall * 64 * 128);
    return Tile::kTransposedA ? ptx::wgmma_transposed_operand(at, 64 * 128) : ptx::wgmma_operand(at);
  }
  __device__ uint64_t b() const {
    const uint8_t* at = shared.stages + this->stage * Tile::kStageBytes + Tile::kABytes +
                        (Tile::kSplitColumns ? warpgroup * Tile::kWarpgroupColumns * 128 : 0);
    return Tile::kTransposedB ? ptx::wgmma_transposed_operand(at, 64 * 128) : ptx::wgmma_operand(at);
  }
};

// The four products of a stage, under way: all of a warpgroup's rows, 64 at a time.
template <class Element, class Tile, class Sum, int kTall, int kSums>
__device__ inline void multiply_stage(const DenseCursor<Tile>& at, Sum (&sum)[kTall][kSums], bool first) {
  constexpr uint64_t kNextA = Tile::kTransposedA ? 128 : 2, kNextB = Tile::kTransposedB ? 128 : 2;
  constexpr uint64_t kNextRows = 64 * 128 / 16;
  const uint64_t a = at.a(), b = at.b();
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int rows = 0; rows < kTall; ++rows) {
      ptx::DenseWgmma<Element, Tile::kWarpgroupColumns, Tile::kTransposedA, Tile::kTransposedB>::multiply(
          sum[rows], a + rows * kNextRows + i * kNextA, b + i * kNextB, !first || i > 0);
    }
  }
  ptx::wgmma_commit();
}

// A warpgroup's way out: two panels in turn.
template <class Tile>
struct DensePanels {
  uint8_t* const panels;
  uint64_t* const arrived;          // the residual, on each panel
  const int warpgroup, warp, lane;  // warp of the warpgroup
  int turn = 0;
  uint32_t phases = 0;  // of `arrived`, a bit each

  __device__ DensePanels(const DenseShared<Tile>& shared, int warpgroup_index, int warp_index, int lane_index)
      : panels(shared.panels + warpgroup_index * 2 * kPanelBytes),
        arrived(shared.residual + warpgroup_index * 2),
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

  // 64 rows and columns of the residual on their way to a panel that no copy reads any more; by the leader.
  // half: 32 columns.
  __device__ void load_panel(const DenseProblem& p, int panel, int32_t row, int32_t column,
                             bool half = false) const {
    ptx::barrier_arrive_expect(arrived + panel, half ? kPanelBytes / 2 : kPanelBytes);
    ptx::tma_load_box(panels + panel * kPanelBytes, half ? &p.residual_half : &p.residual, column, row,
                      arrived + panel);
  }
  // Where 16 bytes of columns 8j and on of a panel's row lie; of one of 32 columns in rows of 64 bytes, whose
  // chunks are exchanged as its copies do.
  __device__ static uint32_t place(uint32_t row, uint32_t at, bool half) {
    const uint32_t narrow = row * 64 + at;
    return half ? narrow ^ (narrow >> 3 & 0x30u) : ptx::swizzled(row, at);
  }
  // Groups of 64 columns in which kSums leave, and whether one is the last and has 32.
  template <int kSums>
  static constexpr int kGroupsOf = (kSums + 31) / 32;
  template <int kSums>
  __device__ static bool ends_half(int group) {
    return kSums % 32 != 0 && group + 1 == kGroupsOf<kSums>;
  }
  // Those of a tile's first two groups of columns, under its products.
  __device__ void load_residual(const DenseProblem& p, int32_t row, int32_t column) const {
    if (!leader()) return;
    const bool gated = p.gate_columns > 0;
    ptx::bulk_store_wait();
    const int groups = gated ? Tile::kSums / 64 : kGroupsOf<Tile::kSums>;
    for (int i = 0; i < min(groups, 2); ++i)
      load_panel(p, turn ^ i, row, (gated ? column / 2 : column) + 64 * i, ends_half<Tile::kSums>(i));
  }
  // Of 64 columns alone, and their way out.
  __device__ void load_block(const DenseProblem& p, int32_t row, int32_t column) const {
    if (!leader()) return;
    ptx::bulk_store_wait();
    load_panel(p, turn, row, column);
  }
  __device__ void store_block(const DenseProblem& p, float (&y)[32], int32_t row, int32_t column) {
    p.epilogue.plain() ? store_rounded(p, y, row, column) : finish_registers(p, y, row, column);
  }
  // y += the residual that has come to the panel whose turn it is, of the places where y will lie in it.
  __device__ void add_panel(const DenseProblem& p, float (&y)[32], bool half) {
    ptx::barrier_wait(arrived + turn, phases >> turn & 1u);
    phases ^= 1u << turn;
    const uint8_t* from = panels + turn * kPanelBytes;
    const auto r = static_cast<uint32_t>(16 * warp + lane / 8 % 2 * 8 + lane % 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (half && j == 2) break;
      const uint4 four =
          ptx::ldmatrix_x4(from + place(r, static_cast<uint32_t>(32 * j + lane / 16 * 16), half));
      const uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(pairs[i], p.epilogue.out);
        y[8 * j + 2 * i] += pair.x, y[8 * j + 2 * i + 1] += pair.y;
      }
    }
  }

  __device__ static float2 unpack(uint32_t pair, DenseOut type) {
    if (type == DenseOut::kBf16) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  __device__ static uint32_t pack(float low, float high, DenseOut type) {
    if (type == DenseOut::kBf16) {
      const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&v);
    }
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }

  // How finish goes over a warp's 16 rows: four passes of four rows, each in parts of 128 columns (of gates
  // one, both of whose halves a lane has). A lane has four neighbouring columns of 4 rows, of 64 columns
  // those of 2.
  static constexpr int kParts = Tile::kWarpgroupColumns < 128 ? 1 : Tile::kWarpgroupColumns / 128;
  static constexpr int kLanes = Tile::kWarpgroupColumns < 128 ? Tile::kWarpgroupColumns / 4 : 32;
  static constexpr int kLaneRows = kLanes / 8;
  __device__ int lane_row(int i) const { return lane / kLanes + i * (32 / kLanes); }

  // What is read ahead of a tile's end, under its last products: vectors of columns, of gates [1] for what
  // they multiply; the residual of the first step.
  struct Ahead {
    Float4 bias[kParts], scales[kParts];
    uint4 residual[kLaneRows];
  };

  // sum[kSums]: 64 rows from `row` and columns from `column` on, both of the sums' matrix.
  template <class Sum, int kSums>
  __device__ void store(const DenseProblem& p, Sum (&sum)[kSums], int32_t row, int32_t column) {
    Ahead ahead = read_ahead(p, row, column);
    store(p, sum, row, column, ahead);
  }
  template <class Sum, int kSums>
  __device__ void store(const DenseProblem& p, Sum (&sum)[kSums], int32_t row, int32_t column, Ahead& ahead) {
    if (p.epilogue.plain()) {
      store_rounded(p, sum, row, column);
    } else if (p.by_rows) {
      if constexpr (Tile::kGoesByRows) finish(p, sum, row, column, ahead);  // by_rows is of no others
    } else if (p.epilogue.out != DenseOut::kE4m3) {
      finish_registers(p, sum, row, column);
    } else if constexpr (Tile::kWarpgroupColumns % 128 == 0) {  // no others have e4m3 outputs
      finish_codes(p, sum, row, column);
    }
  }
  // They go 64 columns at a time by the same instructions, the next ones brought forward in registers: code
  // that ran once for every column would come from memory.
  template <class Sum, int kSums>
  __device__ void store_rounded(const DenseProblem& p, Sum (&sum)[kSums], int32_t row, int32_t column) {
    const DenseEpilogue& e = p.epilogue;
#pragma unroll 1
    for (int group = 0; group < kGroupsOf<kSums>; ++group, column += 64) {
      const bool half = ends_half<kSums>(group);
      float y[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] = static_cast<float>(sum[i]);
#pragma unroll
      for (int i = 0; i < kSums - 32; ++i) sum[i] = sum[i + 32];
      if (e.alpha != 1.0f) {
#pragma unroll
        for (int i = 0; i < 32; ++i) y[i] *= e.alpha;
      }
      if (e.out == DenseOut::kF32) {
        store_floats(p, y, row, column, half);
      } else {
        store_halves(p, y, row, column, begin(), half);
      }
    }
  }

  // Bias, factors and activation where the sums are: 64 columns of outputs at a time, then the same way out
  // as sums that are only rounded.
  template <class Sum, int kSums>
  __device__ void finish_registers(const DenseProblem& p, Sum (&sum)[kSums], int32_t row, int32_t column) {
    const DenseEpilogue& e = p.epilogue;
    const bool gated = p.gate_columns > 0;
    const int g = lane / 4, t = lane % 4;
    const int32_t first_row = row + 16 * warp + g;
    float scale[2];
    row_factors(p, first_row, scale);
    int32_t at = gated ? column / 2 : column;
    const int groups = gated ? kSums / 64 : kGroupsOf<kSums>;
    const bool boxes = p.residual_at >= 0;
#pragma unroll 1
    for (int group = 0; group < groups; ++group, at += 64) {
      const bool half = ends_half<kSums>(group);
      float y[32];
      scale_and_bias<0>(p, sum, scale, at + 2 * t, gated ? p.outputs : p.n, y);
      with_activation(e.activation, [&]<DenseActivation kActivation>() {
        activate<kActivation, 0>(p, sum, scale, at + 2 * t, y);
      });
#pragma unroll
      for (int i = 0; i < kSums - 32; ++i) sum[i] = sum[i + 32];
      if (boxes) {
        add_panel(p, y, half);
        if (group > 0 && group + 1 < groups && leader()) {
          ptx::bulk_store_wait();
          load_panel(p, turn ^ 1, row, at + 64, ends_half<kSums>(group + 1));
        }
        store_halves(p, y, row, at, panels + turn * kPanelBytes, half);
      } else if (e.out == DenseOut::kF32) {
        store_floats(p, y, row, at, half);
      } else {
        store_halves(p, y, row, at, begin(), half);
      }
    }
  }
  // y[32] of the sums from kFirst on, which have their bias; of gates with what they multiply.
  template <DenseActivation kActivation, int kFirst, class Sum, int kSums>
  __device__ void activate(const DenseProblem& p, const Sum (&sum)[kSums], const float (&scale)[2],
                           int32_t at, float (&y)[32]) const {
    if constexpr (is_gated(kActivation)) {
      if constexpr (Tile::kTakesGates) {
        float u[32];
        scale_and_bias<kSums / 2 + kFirst>(p, sum, scale, at + p.outputs, p.n, u);
        each_four(y, [&](Float4& v, const int(&i)[4]) {
          v = dense_gate<kActivation>(p.epilogue, v, {{u[i[0]], u[i[1]], u[i[2]], u[i[3]]}});
        });
      }
    } else if constexpr (kActivation != DenseActivation::kNone) {
      each_four(y, [&](Float4& v, const int(&)[4]) { dense_activate<kActivation>(v); });
    }
  }
  // The same to e4m3: 128 columns of outputs at a time, one panel, whose largest magnitude four lanes have.
  template <class Sum, int kSums>
  __device__ void finish_codes(const DenseProblem& p, Sum (&sum)[kSums], int32_t row, int32_t column) {
    static_assert(kSums % 64 == 0);
    const DenseEpilogue& e = p.epilogue;
    const bool gated = p.gate_columns > 0;
    const int g = lane / 4, t = lane % 4;
    const int32_t first_row = row + 16 * warp + g, past = gated ? p.outputs : p.n;
    float scale[2];
    row_factors(p, first_row, scale);
    int32_t at = gated ? column / 2 : column;
#pragma unroll 1
    for (int chunk = 0; chunk < (gated ? kSums / 128 : kSums / 64); ++chunk, at += 128) {
      float low[32], high[32];
      scale_and_bias<0>(p, sum, scale, at + 2 * t, past, low);
      scale_and_bias<32>(p, sum, scale, at + 64 + 2 * t, past, high);
      with_activation(e.activation, [&]<DenseActivation kActivation>() {
        activate<kActivation, 0>(p, sum, scale, at + 2 * t, low);
        activate<kActivation, 32>(p, sum, scale, at + 64 + 2 * t, high);
      });
#pragma unroll
      for (int i = 0; i < kSums - 64; ++i) sum[i] = sum[i + 64];
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if (i / 2 % 2 == half) most = fmaxf(fmaxf(most, fabsf(low[i])), fabsf(high[i]));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        const float of = most / 448.0f;
        inverse[half] = of > 0.0f ? 1.0f / of : 0.0f;
        if (t == 0 && first_row + 8 * half < p.m && at < p.outputs)
          e.out_scales[(first_row + 8 * half) * e.out_scale_stride + at / 128] = of;
      }
      uint8_t* const to = begin();
#pragma unroll
      for (int i = 0; i < 32; ++i) {  // columns 8 (i / 2) + 2t and + 1 of row g + 8 (i % 2)
        const auto r = static_cast<uint32_t>(16 * warp + g + i % 2 * 8);
        const int k = i % 16 * 2;
        const float2 pair = {(i < 16 ? low[k] : high[k]) * inverse[i % 2],
                             (i < 16 ? low[k + 1] : high[k + 1]) * inverse[i % 2]};
        *reinterpret_cast<uint16_t*>(to + ptx::swizzled(r, static_cast<uint32_t>(i / 2 * 8 + 2 * t))) =
            __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      }
      end(&p.c, at, row);
    }
  }
  __device__ static void row_factors(const DenseProblem& p, int32_t row, float (&scale)[2]) {
    const DenseEpilogue& e = p.epilogue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t r = min(row + 8 * half, p.m - 1);
      scale[half] = e.row_scales != nullptr ? e.alpha * e.row_scales[r] : e.alpha;
    }
  }
  // f(four, where they are in y) of all fours in y[32]: columns 8j + 2t and + 1 of j and j + 1, of one row.
  // They share a reciprocal, so they must be of one row, and the same four whatever the tile is.
  template <class F>
  __device__ static void each_four(float (&y)[32], F&& f) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int first = k / 2 * 8 + k % 2 * 2;  // of two j a four of row g, then of row g + 8
      const int i[4] = {first, first + 1, first + 4, first + 5};
      Float4 v = {{y[i[0]], y[i[1]], y[i[2]], y[i[3]]}};
      f(v, i);
#pragma unroll
      for (int n = 0; n < 4; ++n) y[i[n]] = v.v[n];
    }
  }
  // y = sum * factors + bias of sums from kFirst on; at: this lane's first column.
  template <int kFirst, class Sum, int kSums>
  __device__ void scale_and_bias(const DenseProblem& p, const Sum (&sum)[kSums], const float (&scale)[2],
                                 int32_t at, int32_t past, float (&y)[32]) const {
    const DenseEpilogue& e = p.epilogue;
#pragma unroll
    for (int i = 0; i < 32; ++i) y[i] = static_cast<float>(sum[kFirst + i]);
    float by[16];  // of columns 8 (k / 2) + k % 2
    if (e.column_scales != nullptr) {
      read_columns(e.column_scales, at, past, by);
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] *= by[i / 4 * 2 + i % 2];
    }
    read_columns(e.bias, at, past, by);
#pragma unroll
    for (int i = 0; i < 32; ++i) y[i] = fmaf(y[i], scale[i / 2 % 2], by[i / 4 * 2 + i % 2]);
  }
  // Zeros behind the end, or where there is no vector.
  __device__ static void read_columns(const float* from, int32_t at, int32_t past, float (&to)[16]) {
    const bool pairs = reinterpret_cast<uintptr_t>(from) % 8 == 0 && past % 2 == 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int32_t c = at + k * 8;
      if (from != nullptr && pairs && c < past) {
        const float2 v = __ldg(reinterpret_cast<const float2*>(from + c));
        to[2 * k] = v.x, to[2 * k + 1] = v.y;
      } else {
        to[2 * k] = from != nullptr && c < past ? __ldg(from + c) : 0.0f;
        to[2 * k + 1] = from != nullptr && c + 1 < past ? __ldg(from + c + 1) : 0.0f;
      }
    }
  }
  // The vectors' lines of a tile's columns into L1, before its products: nothing else goes there meanwhile.
  __device__ void warm_columns(const DenseProblem& p, int32_t column) const {
    const DenseEpilogue& e = p.epilogue;
    const float* from = warp == 0 ? e.bias : e.column_scales;
    if (from == nullptr || warp > 1) return;
    const bool gated = p.gate_columns > 0;
    const int32_t part = lane * 8;  // a sector of L1
    const int32_t half = gated && part >= Tile::kColumns / 2 ? 1 : 0;
    const int32_t at = (gated ? column / 2 : column) + part + half * (p.outputs - Tile::kColumns / 2);
    if (part < Tile::kColumns && at < p.n) ptx::warm_l1(from + at);
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
    const int32_t begin = p.gate_columns > 0 ? column / 2 : column,
                  past = min(begin + (p.gate_columns > 0 ? kColumns / 2 : kColumns), p.outputs);
    for (int32_t c = begin + lane % 2 * per_line; c < past; c += 2 * per_line)
      ptx::prefetch_l2(from + int64_t{c} * bytes);
  }

  __device__ Ahead read_ahead(const DenseProblem& p, int32_t row, int32_t column) const {
    Ahead ahead{};
    const DenseEpilogue& e = p.epilogue;
    if (!p.by_rows) return ahead;
    const bool gated = p.gate_columns > 0;
    const int32_t first = (gated ? column / 2 : column) + 4 * (lane % kLanes);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int32_t at = first + part * (gated ? p.outputs : 128),
                    past = gated && part == 0 ? p.outputs : p.n;
      ahead.bias[part] = load_columns(e.bias, at, past);
      ahead.scales[part] = load_columns(e.column_scales, at, past);
    }
    if (e.residual != nullptr) {
      read_residual(p, DenseStore(e, p.out, p.ldc, p.outputs), row + 16 * warp, first, ahead.residual);
    }
    return ahead;
  }
  __device__ void read_residual(const DenseProblem& p, const DenseStore& out, int32_t row, int32_t column,
                                uint4 (&to)[kLaneRows]) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (row + lane_row(i) < p.m) to[i] = out.load_residual(row + lane_row(i), column);
    }
  }

  // A warp's 16 rows, four at a time: from the lanes that have them to [4][kColumns] of its own
  // quarter of the panels, chunk c of 16 bytes of row i at c ^ 2i, so that 16 lanes' pairs and 32 lanes'
  // fours lie in different banks; then a lane has four neighbours of a row. All steps are the same few
  // instructions, which stay in the first instruction caches.
  template <class Sum, int kSums>
  __device__ void finish(const DenseProblem& p, const Sum (&sum)[kSums], int32_t row, int32_t column,
                         Ahead& ahead) const {
    static_assert(4 * 2 * kSums * 4 <= 2 * kPanelBytes / 4);
    uint8_t* const rows = panels + warp * (2 * kPanelBytes / 4);
    const DenseEpilogue& e = p.epilogue;
    const DenseStore out(e, p.out, p.ldc, p.outputs);
    const int parts = p.gate_columns > 0 ? 1 : kParts;
    const int32_t first = (p.gate_columns > 0 ? column / 2 : column) + 4 * (lane % kLanes);
#pragma unroll 1
    for (int step = 0; step < 4 * parts; ++step) {
      const int pass = step / parts, part = step % parts;
      if (part == 0) put_rows(rows, pass, sum);
      uint4 residual[kLaneRows];
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) residual[i] = ahead.residual[i];
      if (e.residual != nullptr && step + 1 < 4 * parts) {  // the next step's, on their way under this one
        read_residual(p, out, row + 16 * warp + (step + 1) / parts * 4, first + (step + 1) % parts * 128,
                      ahead.residual);
      }
      const int32_t first_row = row + 16 * warp + 4 * pass, at = first + 128 * part;
      with_activation(e.activation, [&]<DenseActivation kActivation>() {
        constexpr int kRows = is_gated(kActivation) && !Tile::kTakesGates ? 0 : kLaneRows;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int32_t r = first_row + lane_row(i);
          if (r >= p.m) break;  // with 32 lanes a row, for all of them alike
          Float4 y = scaled<Sum>(p, rows, lane_row(i), part, ahead, r, part);
          if constexpr (is_gated(kActivation)) {
            y = dense_gate<kActivation>(e, y, scaled<Sum>(p, rows, lane_row(i), 1, ahead, r, kParts - 1));
          } else {
            dense_activate<kActivation>(y);
          }
          if (e.residual != nullptr) out.add_residual(y, residual[i]);
          out.store(y, r, at);
        }
      });
    }
  }
  // Four sums of row i of the pass, of columns from 128 `part` on, with factors and bias.
  template <class Sum>
  __device__ Float4 scaled(const DenseProblem& p, const uint8_t* rows, int i, int part, const Ahead& ahead,
                           int32_t row, int vector) const {
    const DenseEpilogue& e = p.epilogue;
    const int chunk = lane % kLanes + 32 * part;
    struct alignas(16) Four {
      Sum v[4];
    };
    const Four x =
        *reinterpret_cast<const Four*>(rows + i * Tile::kWarpgroupColumns * 4 + (chunk ^ (2 * i)) * 16);
    Float4 y;
#pragma unroll
    for (int k = 0; k < 4; ++k) y.v[k] = static_cast<float>(x.v[k]);
    const bool last = kParts > 1 && vector > 0;
    const float scale = e.row_scales != nullptr ? e.alpha * e.row_scales[row] : e.alpha;
    if (e.column_scales != nullptr) {
#pragma unroll
      for (int k = 0; k < 4; ++k) y.v[k] *= last ? ahead.scales[kParts - 1].v[k] : ahead.scales[0].v[k];
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      y.v[k] = fmaf(y.v[k], scale, last ? ahead.bias[kParts - 1].v[k] : ahead.bias[0].v[k]);
    }
    return y;
  }
  // Rows 4 pass to 4 pass + 3 from the lanes (g, t) that have them: chunk 2j + t / 2 has columns 8j + 2t and
  // + 1.
  template <class Sum, int kSums>
  __device__ void put_rows(uint8_t* rows, int pass, const Sum (&sum)[kSums]) const {
    const int g = lane / 4, t = lane % 4;
    __syncwarp();  // all lanes have read the rows before
    if (g / 4 == pass % 2) {
      uint8_t* const to = rows + g % 4 * (2 * kSums * 4) + t % 2 * 8;
      if (pass < 2) {
        put_half<0>(to, g % 4 * 2, sum);
      } else {
        put_half<1>(to, g % 4 * 2, sum);
      }
    }
    __syncwarp();  // the rows are there
  }
  template <int kHalf, class Sum, int kSums>
  __device__ void put_half(uint8_t* to, int flip, const Sum (&sum)[kSums]) const {
    struct alignas(8) Pair {
      Sum low, high;
    };
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      *reinterpret_cast<Pair*>(to + ((2 * j + lane % 4 / 2) ^ flip) * 16) = {sum[4 * j + 2 * kHalf],
                                                                             sum[4 * j + 2 * kHalf + 1]};
    }
  }

  // y[32]: 64 columns from `column` on, two panels.
  __device__ void store_floats(const DenseProblem& p, const float (&y)[32], int32_t row, int32_t column,
                               bool half) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      if (half && panel == 1) break;
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
  __device__ void store_halves(const DenseProblem& p, const float (&y)[32], int32_t row, int32_t column,
                               uint8_t* to, bool half) {
    const DenseOut out = p.epilogue.out;
    const auto r = static_cast<uint32_t>(16 * warp + lane / 8 % 2 * 8 + lane % 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns
      if (half && j == 2) break;
      const int i = 8 * j;
      const uint32_t packed[4] = {pack(y[i], y[i + 1], out), pack(y[i + 2], y[i + 3], out),
                                  pack(y[i + 4], y[i + 5], out), pack(y[i + 6], y[i + 7], out)};
      ptx::store_matrices(
          ptx::shared_address(to) + place(r, static_cast<uint32_t>(32 * j + lane / 16 * 16), half), packed);
    }
    end(half ? &p.c_half : &p.c, column, row);
  }
};

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda
