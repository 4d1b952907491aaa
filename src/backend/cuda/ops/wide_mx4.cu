// Wide products with MXFP4 weights on Hopper's warpgroup instructions: weights are the rows of a product,
// tokens its columns. A warp decodes its 16 rows of weights in registers, exactly, into the very fragments
// that the tensor core takes from there; activations are bf16 in shared memory. A segment of the columns is
// one chain of products (mx4.cuh), and what the other units have to do is decode and, at the end of a
// segment, add.
//
// A CTA is persistent: two warpgroups multiply 64 rows of weights each by up to 128 tokens, one warp brings a
// pair of blocks a stage: raw weights as two boxes, tokens as bulk copies. A group of tokens is as wide as it
// has to be, in steps of 32.
//
// Roofline: 989 TFLOP/s of the tensor cores, 512 cycles per stage of 128 x 128 x 64; decoding takes some 160
// cycles of each scheduler's integer unit meanwhile, and shared memory is busy 450. All SMs' stages want 7
// TB/s from L2 at that rate, which is about what it gives.
#include "backend/cuda/ops/wide_wgmma.cuh"
#include "backend/cuda/ptx/tensor_map.cuh"

#if defined(__CUDA_ARCH__) && !defined(MILLRACE_HAS_WGMMA)
#pragma nv_diag_suppress 177  // unused: for this architecture the kernel is empty
#endif

namespace millrace::cuda {
namespace {

constexpr int kOutputs = 128, kMostTokens = 2 * kWgmmaRows;  // of a CTA
constexpr int kMultiplyWarps = kConsumers * kGroupWarps;
constexpr int kThreads =
    (kConsumers + 1) * kGroupThreads;  // of the last group one thread is at work: the loader
// Together what 384 threads of 168 registers start with.
constexpr int kConsumerRegisters = 232, kLoaderRegisters = 40;
static_assert(kConsumers * kConsumerRegisters + kLoaderRegisters == 3 * 168);
constexpr int kBoxTiles = kOutputs / kTileRows / 2;  // of raw weights, that one copy brings
constexpr int kBoxBytes = kBoxTiles * kMx4PairBytes;

// Shared memory: stages of [tokens][raw weights], barriers.
constexpr int kStages = 10;
constexpr int kRawAt = kMostTokens * ptx::kSwizzleRowBytes;
constexpr int kStageBytes = (kRawAt + 2 * kBoxBytes + 1023) / 1024 * 1024;
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStages * 8;
static_assert(kBoxBytes % 128 == 0 && kSharedBytes <= 232448);

// ---------------------------------------------------------------- what is multiplied

struct Mx4Linear : WgmmaLinear {
  CUtensorMap maps[3];  // of the parts

  __device__ const CUtensorMap* map(const WgmmaItem& item, int) const { return maps + item.matrix; }
  __device__ int first_tile(const WgmmaItem& item, int half) const { return item.first_n + half * kBoxTiles; }
  // Which of a stage's tiles are rows 0-7 and 8-15 of a warp.
  __device__ static int raw_tile(int warp, int half) { return 2 * warp + half; }

  // sum: of rows g and g + 8 of the warp's, tokens 8j + 2t and + 1.
  template <int kTokens>
  __device__ void store(const WgmmaItem& item, int warp, int g, int t,
                        const float (&sum)[kTokens / 2]) const {
    const Part& part = parts[item.matrix];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (item.first_n + raw_tile(warp, half)) * kTileRows + g;
      if (column >= part.rows) continue;
      const float bias = part.bias != nullptr ? part.bias[column] : 0.0f;
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        const int token = i / 2 * 8 + 2 * t + i % 2;
        if (token >= item.rows) continue;
        float* to = part.out + (int64_t{item.first_tile} * kWgmmaRows + token) * part.rows + column;
        const float value = sum[i / 2 * 4 + 2 * half + i % 2] + bias;
        *to = add ? *to + value : value;
      }
    }
  }
};

struct Mx4Down : WgmmaExperts<false> {
  CUtensorMap maps[1];

  __device__ const CUtensorMap* map(const WgmmaItem&, int) const { return maps; }
  __device__ int first_tile(const WgmmaItem& item, int half) const {
    return item.matrix * op.gate.tiles_per_expert + item.first_n + half * kBoxTiles;
  }
  __device__ static int raw_tile(int warp, int half) { return 2 * warp + half; }

  template <int kTokens>
  __device__ void store(const WgmmaItem& item, int warp, int g, int t,
                        const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int32_t* order = op.groups.order + int64_t{item.first_tile} * kWgmmaRows + 2 * t;
    const int column = (item.first_n + raw_tile(warp, 0)) * kTileRows + g;
    float bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (op.gate_bias != nullptr && column + half * kTileRows < columns) {
        bias[half] = op.gate_bias[int64_t{item.matrix} * columns + column + half * kTileRows];
      }
    }
    int32_t pair[kTokens / 4];
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) pair[i] = order[i / 2 * 8 + i % 2];
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      if (pair[i] < 0) continue;
      float* to = op.out + int64_t{pair[i]} * columns + column;
      if (column < columns) to[0] = sum[i / 2 * 4 + i % 2] + bias[0];
      if (column + kTileRows < columns) to[kTileRows] = sum[i / 2 * 4 + 2 + i % 2] + bias[1];
    }
  }
};

struct Mx4GateUp : WgmmaExperts<true> {
  CUtensorMap maps[2];  // of gate and up

  __device__ const CUtensorMap* map(const WgmmaItem&, int half) const { return maps + half; }
  __device__ int first_tile(const WgmmaItem& item, int) const {
    return item.matrix * op.gate.tiles_per_expert + item.first_n;
  }
  __device__ static int raw_tile(int warp, int half) { return warp + half * kBoxTiles; }

  template <int kTokens>
  __device__ void store(const WgmmaItem& item, int warp, int g, int t,
                        const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int column = (item.first_n + warp) * kTileRows + g;
    const bool there = column < columns;
    const int64_t bias_at = int64_t{item.matrix} * columns + column;
    const float gate_bias = there && op.gate_bias != nullptr ? op.gate_bias[bias_at] : 0.0f;
    const float up_bias = there && op.up_bias != nullptr ? op.up_bias[bias_at] : 0.0f;
    if (op.act.codes == nullptr) return store_plain<kTokens>(item, column, t, gate_bias, up_bias, sum);
    // Straight into the operand of down, whose rows are in the same order. A lane and its neighbour of the
    // next row exchange tokens, so that each has two columns of one. Columns past the last are zeros.
    const bool odd = g % 2 == 1;
    const uint32_t byte = mx4_position(static_cast<uint32_t>(warp * kTileRows + g - (odd ? 1 : 0))) * 2;
    uint8_t* tile =
        op.act.codes +
        (int64_t{item.first_tile} * packed_pairs(columns) + column / kPairColumns) * kMx4TileBytes;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      float a = activate(op.activation, sum[4 * j] + gate_bias, sum[4 * j + 2] + up_bias);
      float b = activate(op.activation, sum[4 * j + 1] + gate_bias, sum[4 * j + 3] + up_bias);
      if (!there) a = b = 0.0f;
      const float other = __shfl_xor_sync(kAllLanes, odd ? a : b, 4);
      const uint32_t token = static_cast<uint32_t>(8 * j + 2 * t) + (odd ? 1u : 0u), row = token % kWgmmaRows;
      uint8_t* to = tile + (token >= kWgmmaRows ? int64_t{packed_pairs(columns)} * kMx4TileBytes : 0);
      *reinterpret_cast<uint32_t*>(to + ptx::swizzled(row, byte)) =
          odd ? bf16_pair(other, b) : bf16_pair(a, other);
    }
  }
  template <int kTokens>
  __device__ void store_plain(const WgmmaItem& item, int column, int t, float gate_bias, float up_bias,
                              const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int32_t* order = op.groups.order + int64_t{item.first_tile} * kWgmmaRows + 2 * t;
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      const int32_t pair = order[i / 2 * 8 + i % 2];
      const int at = i / 2 * 4 + i % 2;
      if (pair < 0 || column >= columns) continue;
      op.out[int64_t{pair} * columns + column] =
          activate(op.activation, sum[at] + gate_bias, sum[at + 2] + up_bias);
    }
  }
};

// How many tokens a product is wide. More widths than two would not fit the registers: the fragments of each
// have their own.
template <int kMost>
__device__ inline int width_of(const WgmmaItem& item) {
  return item.rows <= kMost / 2 ? kMost / 2 : kMost;
}

#ifdef MILLRACE_HAS_WGMMA

// Stages are numbered through, over all items of a CTA; stage n lies at n % kStages. full completes when its
// operands are there, empty when all warps have read them.
struct Mx4Ring {
  uint8_t* stages;
  uint64_t *full, *empty;

  __device__ explicit Mx4Ring(uint8_t* shared) : stages(shared) {
    full = reinterpret_cast<uint64_t*>(shared + kStages * kStageBytes);
    empty = full + kStages;
  }
  __device__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, kMultiplyWarps);
    }
    ptx::barrier_init_fence();
  }
  __device__ uint8_t* stage(uint32_t n) const { return stages + n % kStages * kStageBytes; }
  __device__ void wait_full(uint32_t n) const { ptx::barrier_wait(full + n % kStages, n / kStages % 2); }
  __device__ void wait_empty(uint32_t n) const {
    ptx::barrier_wait(empty + n % kStages, n / kStages % 2 ^ 1);
  }
};

// One thread.
template <int kMost, class Problem>
__device__ void load_items(const Problem& p, const Mx4Ring& ring) {
  uint32_t n = 0;
  const int items = p.template items<kOutputs>();
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const WgmmaItem item = p.template item<kOutputs>(i);
    const int width = width_of<kMost>(item), first = min(width, kWgmmaRows);
    const auto bytes = static_cast<uint32_t>(width * ptx::kSwizzleRowBytes + 2 * kBoxBytes);
    const uint8_t* rows = p.x.codes + int64_t{item.first_tile} * p.pairs * kMx4TileBytes;
    const int tiles[2] = {p.first_tile(item, 0), p.first_tile(item, 1)};
    for (int pair = 0; pair < p.pairs; ++pair, ++n) {
      ring.wait_empty(n);
      uint64_t* full = ring.full + n % kStages;
      uint8_t* stage = ring.stage(n);
      ptx::barrier_arrive_expect(full, bytes);
      for (int half = 0; half < 2; ++half) {
        ptx::box_copy(stage + kRawAt + half * kBoxBytes, p.map(item, half), pair * kMx4PairBytes, tiles[half],
                      full);
      }
      const uint8_t* from = rows + pair * kMx4TileBytes;
      ptx::bulk_copy_kept(stage, from, static_cast<uint32_t>(first * ptx::kSwizzleRowBytes), full);
      if (width > first) {
        ptx::bulk_copy_kept(stage + kMx4TileBytes, from + int64_t{p.pairs} * kMx4TileBytes,
                            static_cast<uint32_t>((width - first) * ptx::kSwizzleRowBytes), full);
      }
    }
  }
}

// A lane's fragments of a pair of blocks: four steps of 16 columns.
struct Fragments {
  uint32_t a[4][4];

  __device__ void decode(const uint8_t* low_tile, const uint8_t* high_tile, int lane) {
    const uint2 low = reinterpret_cast<const uint2*>(low_tile)[lane],
                high = reinterpret_cast<const uint2*>(high_tile)[lane];
    const uint32_t low_scales = *reinterpret_cast<const uint16_t*>(low_tile + kMx4ScalesAt + lane / 4 * 2),
                   high_scales = *reinterpret_cast<const uint16_t*>(high_tile + kMx4ScalesAt + lane / 4 * 2);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint4 l = mx4_weights(odd ? low.y : low.x, mx4_scale(odd ? low_scales >> 8 : low_scales & 255u));
      const uint4 h =
          mx4_weights(odd ? high.y : high.x, mx4_scale(odd ? high_scales >> 8 : high_scales & 255u));
      a[2 * odd][0] = l.x, a[2 * odd][1] = h.x, a[2 * odd][2] = l.y, a[2 * odd][3] = h.y;
      a[2 * odd + 1][0] = l.z, a[2 * odd + 1][1] = h.z, a[2 * odd + 1][2] = l.w, a[2 * odd + 1][3] = h.w;
    }
  }
};

template <int kTokens, class Problem>
struct Multiplier {
  const Problem& p;
  const Mx4Ring& ring;
  const int warp, lane;
  float sum[kTokens / 2];

  // The products of stage n, left under way; those of the stage before are done after it, and its operands
  // read.
  __device__ void step(Fragments& f, uint32_t n, bool first) {
    const uint8_t* stage = ring.stage(n);
    ring.wait_full(n);
    f.decode(stage + kRawAt + Problem::raw_tile(warp, 0) * kMx4PairBytes,
             stage + kRawAt + Problem::raw_tile(warp, 1) * kMx4PairBytes, lane);
    const uint64_t b = ptx::wgmma_operand(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::wgmma_bf16(sum, f.a[i], b + 2 * i, !first || i > 0);
    ptx::wgmma_commit();
    if (first) return;
    ptx::wgmma_wait<1>();
    release(n - 1);
  }
  __device__ void release(uint32_t n) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ring.empty + n % kStages);
  }

  __device__ void run(const WgmmaItem& item, uint32_t n) {
    const int per = pairs_per_segment(p.pairs);
    float total[kTokens / 2];
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) total[j] = 0.0f;
    Fragments even, odd;
    for (int first = 0; first < p.pairs; first += per) {
      const int last = min(first + per, p.pairs);
      for (int pair = first; pair < last; pair += 2) {
        step(even, n++, pair == first);
        if (pair + 1 < last) step(odd, n++, false);
      }
      ptx::wgmma_wait<0>();
      ptx::hold_sums(sum);
      release(n - 1);
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) total[j] += sum[j];
    }
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) total[j] *= kMx4Unscale;
    p.template store<kTokens>(item, warp, lane / 4, lane % 4, total);
  }
};

template <int kMost, class Problem>
__device__ void multiply_items(const Problem& p, const Mx4Ring& ring) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  uint32_t n = 0;
  const int items = p.template items<kOutputs>();
  for (int i = blockIdx.x; i < items; i += gridDim.x, n += static_cast<uint32_t>(p.pairs)) {
    const WgmmaItem item = p.template item<kOutputs>(i);
    if (width_of<kMost>(item) == kMost) {
      Multiplier<kMost, Problem>{p, ring, warp, lane, {}}.run(item, n);
    } else {
      Multiplier<kMost / 2, Problem>{p, ring, warp, lane, {}}.run(item, n);
    }
  }
}

#endif  // MILLRACE_HAS_WGMMA

template <int kMost, class Problem>
__global__ void __launch_bounds__(kThreads, 1) mx4_wgmma_kernel(const __grid_constant__ Problem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const Mx4Ring ring(shared);
  if (threadIdx.x == 0) ring.init();
  ptx::let_dependents_start();
  __syncthreads();  // the barriers are there
  ptx::wait_for_previous();
  if (threadIdx.x / kWarpLanes < kMultiplyWarps) {
    ptx::more_registers<kConsumerRegisters>();
    multiply_items<kMost>(p, ring);
  } else {
    ptx::fewer_registers<kLoaderRegisters>();
    if (threadIdx.x % kGroupThreads == 0) load_items<kMost>(p, ring);
  }
#else
  __trap();
#endif
}

template <int kMost, class Problem>
void launch_as(const Problem& p, int64_t items, cudaStream_t stream) {
  const auto kernel = mx4_wgmma_kernel<kMost, Problem>;
  allow_shared_memory(kernel, kSharedBytes);
  const int64_t ctas = items < multiprocessors() ? items : multiprocessors();
  launch_dependent("mx4_wgmma_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads, kSharedBytes,
                   stream, p);
}
template <class Problem>
void launch_for(const Problem& p, int32_t most_rows, int64_t items, cudaStream_t stream) {
  most_rows <= kWgmmaRows ? launch_as<kWgmmaRows>(p, items, stream)
                          : launch_as<2 * kWgmmaRows>(p, items, stream);
}

CUtensorMap map_of(const PackedMatrix& w, int64_t experts) {
  return ptx::byte_rows_map(w.tiles, static_cast<uint64_t>(experts * w.tiles_per_expert), w.tile_bytes,
                            kBoxTiles, kMx4PairBytes);
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void launch_mx4_linear(const WgmmaLinear& linear, cudaStream_t stream) {
  Mx4Linear p{linear, {}};
  for (int i = 0; i < p.num_parts; ++i) {
    p.maps[i] = ptx::byte_rows_map(p.parts[i].tiles, static_cast<uint64_t>(p.parts[i].num_tiles),
                                   p.tile_bytes, kBoxTiles, kMx4PairBytes);
  }
  launch_for(p, static_cast<int32_t>(p.rows < kMostTokens ? p.rows : kMostTokens), p.items<kOutputs>(),
             stream);
}

void launch_mx4_experts(const WideExperts& op, cudaStream_t stream) {
  const int64_t tiles = op.gate.tiles_per_expert, chunks = op.groups.max_chunks;
  const int32_t most_rows = op.groups.tiles_per_chunk * op.groups.tile_rows;
  if (op.up.format == PackedFormat::kNone) {
    const Mx4Down p{{op, op.x, op.gate.pairs}, {map_of(op.gate, op.experts)}};
    return launch_for(p, most_rows, divide_up(tiles, 2 * kBoxTiles) * chunks, stream);
  }
  const Mx4GateUp p{{op, op.x, op.gate.pairs}, {map_of(op.gate, op.experts), map_of(op.up, op.experts)}};
  launch_for(p, most_rows, divide_up(tiles, kBoxTiles) * chunks, stream);
}

}  // namespace millrace::cuda
