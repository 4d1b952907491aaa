// What goes from chunk to chunk (linear_backward.h): states forwards and gradients of states backwards, at
// the same time. A warpgroup has 64 columns of a head's state, transposed: S^T [64 values][keys] is sums in
// registers, and rounded to bf16 the left operand of the products that read it; so are X^T, U^T, dW^T and
// dY^T. Nothing of the chain goes through shared memory, and its warps wait for one another only in the
// products.
//
// One more warp copies what the workspace has of the next chunks.
#pragma once

#include "kernels/cuda/linear/backward_tiles.cuh"

namespace millrace::cuda {

template <int kKeys, bool kDelta, int kStrips>
struct ChainStage {
  unsigned char k[kKeys * kTile * 2];
  unsigned char solved[kDelta ? kTileBytes : 1024];  // rho
  unsigned char rows[kStrips][kTileBytes];           // V or dO
  unsigned char q[kKeys * kTile * 2];                // from here on backwards alone
  unsigned char pairs[kTileBytes];                   // A
};

template <int kKeys, bool kDelta, int kStrips>
struct ChainShared {
  // As many chunks as hide a copy's way: it takes longer than a chunk.
  static constexpr int kStages = kStrips == 1 && (kKeys == kTile || !kDelta) ? 4 : 3;
  ChainStage<kKeys, kDelta, kStrips> stages[kStages];
  unsigned char state[kStrips][kKeys / kTile][kTileBytes];  // on its way to the workspace
  struct {
    float left[kTile], until_end[kTile], beta[kTile];
  } gates[kStages];
  uint64_t full[kStages], empty[kStages];
};

#ifdef MILLRACE_HAS_WGMMA

// A warp's part of a chain: what both directions do.
template <int kKeys, bool kDelta, int kStrips>
struct ChainWarp {
  using Shared = ChainShared<kKeys, kDelta, kStrips>;
  using Stage = ChainStage<kKeys, kDelta, kStrips>;
  static constexpr int kKeyTiles = kKeys / kTile, kStages = Shared::kStages;

  __device__ ChainWarp(const LinearBackward& of_op, const TileHead& of_head, Shared& shared, int first_strip)
      : op(of_op), of(of_head), s(shared) {
    const int of_cta = static_cast<int>(threadIdx.x) / kWarpLanes;
    lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    t = lane % 4;
    warp = of_cta % 4;
    own = of_cta / 4;
    strip = first_strip + own;
    value = strip * kTile + warp * 16 + lane / 4;
  }

  // The state [key_dim][value_dim] of memory, null: zeros.
  __device__ void load(const float* from) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int d = i / 4 * 8 + 2 * t + i % 2, v = value + i / 2 % 2 * 8;
      state[i] =
          from != nullptr && d < op.key_dim && v < op.value_dim ? from[int64_t{d} * op.value_dim + v] : 0.0f;
    }
  }
  __device__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int d = i / 4 * 8 + 2 * t + i % 2, v = value + i / 2 % 2 * 8;
      if (d < op.key_dim && v < op.value_dim) to[int64_t{d} * op.value_dim + v] = state[i];
    }
  }
  // The state, rounded, to the workspace.
  __device__ void keep_state(int64_t array, int32_t chunk) {
    pack_operand(operand, state, [](int, float x) { return x; });
    if (lane == 0) ptx::bulk_store_wait<0>();
    __syncwarp();  // the state before has been read
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
      store_operand(ptx::shared_address(s.state[own][tile]) + static_cast<uint32_t>(warp * kWarpTileBytes),
                    operand + 4 * tile);
    ptx::publish_to_async();
    __syncwarp();
    if (lane == 0) {
      unsigned char* to = of.at(array, of.places.state_bytes, chunk) + (strip * kKeyTiles) * kTileBytes +
                          warp * kWarpTileBytes;
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile)
        bulk_store(to + tile * kTileBytes,
                   ptx::shared_address(s.state[own][tile]) + static_cast<uint32_t>(warp * kWarpTileBytes),
                   kWarpTileBytes);
      ptx::bulk_store_commit();
    }
  }
  // U^T or dY^T of the chunk, likewise.
  __device__ void keep_rows(int64_t array, int32_t chunk, const float (&x)[kTile / 2]) const {
    unsigned char* const to = of.at(array, of.places.value_bytes, chunk) + strip * kTileBytes;
#pragma unroll
    for (int i = 0; i < kTile / 2; i += 2) {
      const auto row = static_cast<uint32_t>(warp * 16 + lane / 4 + i / 2 % 2 * 8);
      *reinterpret_cast<uint32_t*>(to + ptx::swizzled(row, static_cast<uint32_t>(i / 4 * 16 + 4 * t))) =
          pack_pair(x[i], x[i + 1]);
    }
  }
  // Of pairs as an operand has them, sum `i` of a product.
  __device__ static float value_at(const uint32_t (&a)[4][4], int i) {
    const uint32_t pair = a[i / 8][i / 2 % 4];
    return i % 2 == 0 ? low_of(pair) : high_of(pair);
  }
  __device__ void scale_state(float left) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) state[i] *= left;
  }
  // x (+)= S^T K^T; not waited for.
  __device__ void read_state(float (&x)[kTile / 2], const Stage& in) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const uint64_t k = ptx::wgmma_operand(in.k + tile * kTileBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::wgmma_16bit<Bf16, 0>(x, operand[4 * tile + step], k + 2 * step, tile + step > 0);
    }
  }
  // S^T += a K, of rows of keys or queries; not waited for.
  __device__ void write_state(const uint32_t (&a)[4][4], const unsigned char* rows) {
    const uint64_t b = ptx::wgmma_transposed_operand(rows, kTileBytes);
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::wgmma_16bit<Bf16, 1>(state, a[step], b + 128 * step, true);
  }
  // V^T or dO^T as an operand, which is as pairs of sums.
  __device__ void load_rows(uint32_t (&a)[4][4], const Stage& in) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const auto row = static_cast<uint32_t>(16 * step + lane / 16 * 8 + lane % 8);
      const auto at = static_cast<uint32_t>(32 * warp + lane / 8 % 2 * 16);
      const uint4 x = ptx::ldmatrix_x4_transposed(in.rows[own] + ptx::swizzled(row, at));
      a[step][0] = x.x, a[step][1] = x.y, a[step][2] = x.z, a[step][3] = x.w;
    }
  }
  __device__ void release(int stage) {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&s.empty[stage]);
  }

  __device__ void forwards();
  __device__ void backwards();

  const LinearBackward& op;
  const TileHead& of;
  Shared& s;
  int lane, t, warp, own, strip, value;
  float state[kKeys / 2];
  uint32_t operand[kKeys / 16][4];
};

template <int kKeys, bool kDelta, int kStrips>
__device__ void ChainWarp<kKeys, kDelta, kStrips>::forwards() {
  const int64_t packed = (int64_t{of.sequence} * op.heads + of.head) * op.key_dim * int64_t{op.value_dim};
  load(op.initial != nullptr ? op.initial + packed : nullptr);
  for (int32_t chunk = 0; chunk < of.count; ++chunk) {
    const int stage = chunk % kStages;
    const Stage& in = s.stages[stage];
    ptx::barrier_wait(&s.full[stage], static_cast<uint32_t>(chunk / kStages % 2));
    const auto& gates = s.gates[stage];
    float x[kTile / 2];
    uint32_t v[4][4];
    load_rows(v, in);
    keep_state(of.places.states, chunk);
    const float left_last = gates.left[kTile - 1];
    if constexpr (kDelta) {
      ptx::fence_registers(operand);
      ptx::wgmma_fence();
      read_state(x, in);
      ptx::wgmma_commit();
      scale_state(left_last);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(x);
      ptx::fence_registers(operand);
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i)
        x[i] = fmaf(-gates.left[i / 4 * 8 + 2 * t + i % 2], x[i], value_at(v, i));
      uint32_t a[4][4];
      pack_operand(a, x, [&](int row, float value_of) { return gates.beta[row] * value_of; });
      ptx::fence_registers(x);
      ptx::fence_registers(a);
      ptx::wgmma_fence();
      const uint64_t solved = ptx::wgmma_operand(in.solved);
#pragma unroll
      for (int step = 0; step < 4; ++step) ptx::wgmma_16bit<Bf16, 0>(x, a[step], solved + 2 * step, true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::fence_registers(x);
      ptx::fence_registers(a);
    } else {
      scale_state(left_last);
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) x[i] = value_at(v, i);
    }
    uint32_t w[4][4];
    pack_operand(
        w, x, [&](int row, float value_of) { return gates.until_end[row] * (gates.beta[row] * value_of); });
    ptx::fence_registers(state);
    ptx::fence_registers(w);
    ptx::wgmma_fence();
    write_state(w, in.k);
    ptx::wgmma_commit();
    keep_rows(of.places.u, chunk, x);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(state);
    ptx::fence_registers(w);
    release(stage);
  }
  ptx::bulk_written();
}

template <int kKeys, bool kDelta, int kStrips>
__device__ void ChainWarp<kKeys, kDelta, kStrips>::backwards() {
  const int64_t packed = (int64_t{of.sequence} * op.heads + of.head) * op.key_dim * int64_t{op.value_dim};
  load(op.d_final != nullptr ? op.d_final + packed : nullptr);
  for (int32_t turn = 0; turn < of.count; ++turn) {
    const int32_t chunk = of.count - 1 - turn;
    const int stage = turn % kStages;
    const Stage& in = s.stages[stage];
    ptx::barrier_wait(&s.full[stage], static_cast<uint32_t>(turn / kStages % 2));
    const auto& gates = s.gates[stage];
    uint32_t o[4][4], scaled[4][4];
    load_rows(o, in);
    keep_state(of.places.d_states, chunk);
    float x[kTile / 2], y[kTile / 2];
    ptx::fence_registers(operand);
    ptx::fence_registers(o);
    ptx::wgmma_fence();
    const uint64_t pairs = ptx::wgmma_transposed_operand(in.pairs, kTileBytes);
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::wgmma_16bit<Bf16, 1>(y, o[step], pairs + 128 * step, step > 0);
    read_state(x, in);
    ptx::wgmma_commit();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * step + i / 2 * 8 + 2 * t;
        scaled[step][i] = pack_pair(op.scale * gates.left[row] * low_of(o[step][i]),
                                    op.scale * gates.left[row + 1] * high_of(o[step][i]));
      }
    }
    scale_state(gates.left[kTile - 1]);
    ptx::fence_registers(state);
    ptx::fence_registers(scaled);
    ptx::wgmma_fence();
    write_state(scaled, in.q);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::fence_registers(x);
    ptx::fence_registers(y);
    ptx::fence_registers(operand);
    ptx::fence_registers(o);
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) x[i] = fmaf(gates.until_end[i / 4 * 8 + 2 * t + i % 2], x[i], y[i]);
    if constexpr (kDelta) {
      uint32_t a[4][4];
      pack_operand(a, x, [&](int row, float value_of) { return gates.beta[row] * value_of; });
      ptx::fence_registers(x);
      ptx::fence_registers(a);
      ptx::wgmma_fence();
      const uint64_t solved = ptx::wgmma_transposed_operand(in.solved, kTileBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step) ptx::wgmma_16bit<Bf16, 1>(x, a[step], solved + 128 * step, true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::fence_registers(x);
      ptx::fence_registers(a);
      ptx::fence_registers(scaled);
      pack_operand(a, x,
                   [&](int row, float value_of) { return -gates.left[row] * (gates.beta[row] * value_of); });
      ptx::fence_registers(state);
      ptx::fence_registers(a);
      ptx::wgmma_fence();
      write_state(a, in.k);
      ptx::wgmma_commit();
      keep_rows(of.places.dy, chunk, x);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(a);
    } else {
      keep_rows(of.places.dy, chunk, x);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(scaled);
    }
    ptx::fence_registers(state);
    release(stage);
  }
  if (op.d_initial != nullptr) store(op.d_initial + packed);
  ptx::bulk_written();
}

// One thread: chunks in the chain's order.
template <int kKeys, bool kDelta, int kStrips>
__device__ inline void copy_chain(const TileHead& of, ChainShared<kKeys, kDelta, kStrips>& s, int first_strip,
                                  bool backwards) {
  constexpr int kStages = ChainShared<kKeys, kDelta, kStrips>::kStages;
  constexpr uint32_t kKeyBytes = kKeys * kTile * 2;
  for (int32_t turn = 0; turn < of.count; ++turn) {
    const int32_t chunk = backwards ? of.count - 1 - turn : turn;
    const int stage = turn % kStages;
    auto& to = s.stages[stage];
    uint64_t* const full = &s.full[stage];
    if (turn >= kStages) ptx::barrier_wait(&s.empty[stage], static_cast<uint32_t>((turn / kStages - 1) % 2));
    uint32_t bytes = kKeyBytes + kChainGatesBytes + (kDelta ? kTileBytes : 0) + kStrips * kTileBytes;
    if (backwards) bytes += kKeyBytes + kTileBytes;
    ptx::barrier_arrive_expect(full, bytes);
    ptx::bulk_copy_kept(to.k, of.keys(of.places.keys, chunk), kKeyBytes, full);
    ptx::bulk_copy_kept(&s.gates[stage], of.at(of.places.gates, sizeof(TileGates), chunk), kChainGatesBytes,
                        full);
    if constexpr (kDelta)
      ptx::bulk_copy_kept(to.solved, of.at(of.places.solved, kTileBytes, chunk), kTileBytes, full);
    const int64_t rows = backwards ? of.places.d_out : of.places.values;
    ptx::bulk_copy_kept(to.rows, of.at(rows, of.places.value_bytes, chunk) + first_strip * kTileBytes,
                        kStrips * kTileBytes, full);
    if (!backwards) continue;
    ptx::bulk_copy_kept(to.q, of.keys(of.places.queries, chunk), kKeyBytes, full);
    ptx::bulk_copy_kept(to.pairs, of.at(of.places.pairs, kTileBytes, chunk), kTileBytes, full);
  }
}

#endif  // MILLRACE_HAS_WGMMA

// Two strips: the copying warp is one of a warpgroup, which leaves its registers to the others.
__host__ __device__ constexpr int chain_threads(int strips) { return strips == 1 ? 128 + kWarpLanes : 384; }

// grid: directions (backwards first, which takes longer) x groups of strips, heads, sequences.
template <int kKeys, bool kDelta, int kStrips>
__global__ void __launch_bounds__(chain_threads(kStrips), 1)
    chains_kernel(const __grid_constant__ LinearBackward op) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char shared_tiles[];
  auto& s = *reinterpret_cast<ChainShared<kKeys, kDelta, kStrips>*>(shared_tiles);
  const int groups = static_cast<int>(gridDim.x) / 2;
  const bool backwards = static_cast<int>(blockIdx.x) < groups;
  const int first_strip = static_cast<int>(blockIdx.x) % groups * kStrips;
  const TileHead of(op, static_cast<int32_t>(blockIdx.z), static_cast<int32_t>(blockIdx.y));
  if (threadIdx.x == 0) {
    for (int i = 0; i < s.kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], 4 * kStrips);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();  // the barriers are there
  if (threadIdx.x >= kStrips * 128) {
    if constexpr (kStrips > 1) ptx::fewer_registers<24>();
    if (threadIdx.x == kStrips * 128) copy_chain<kKeys, kDelta, kStrips>(of, s, first_strip, backwards);
    return;
  }
  if constexpr (kStrips > 1) ptx::more_registers<240>();
  ChainWarp<kKeys, kDelta, kStrips> warp(op, of, s, first_strip);
  if (backwards) {
    warp.backwards();
  } else {
    warp.forwards();
  }
#endif
}

}  // namespace millrace::cuda
