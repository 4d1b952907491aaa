// What chunks need of themselves (linear_backward.h), a CTA for each chunk of some heads of one key: K and Q
// as tiles, the gates, A, and with the delta rule rho, of which (I + L B)^-1 = I + rho B:
//
//   rho = -(I + L B)^-1 L,  row by row: rho_i = -L_i - sum over m < i of L(i, m) beta_m rho_m
#pragma once

#include "kernels/cuda/linear/backward_tiles.cuh"

namespace millrace::cuda {

inline constexpr int kPrepareThreads = 128;
__host__ __device__ constexpr int prepare_heads(bool delta) { return delta ? 2 : 8; }  // of a CTA

// L, [64][64], where lanes that have columns read a row and those that have rows write one.
__device__ inline int pair_at(int row, int column) { return row * kTile + (column ^ row % 8 * 4); }

template <int kKeys>
struct PrepareTiles {
  union {
    struct {
      unsigned char k[kKeys * kTile * 2];
      unsigned char q[kKeys * kTile * 2];
    };
    float l[2][kTile * kTile];  // when the products of K and Q are there
  };
  unsigned char out[2][kTileBytes];  // A, then rho, of two heads
  TileGates gates[2];
};

#ifdef MILLRACE_HAS_WGMMA

// Rows of one head, float32 in memory, as bf16 tiles of 64 columns: to(offset, eight columns).
template <int kTiles, class To>
__device__ inline void convert_rows(const float* from, int64_t stride, int rows, int columns, const To& to) {
  const bool wide = columns % 4 == 0 && stride % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < kTiles * kTile * 8; i += kPrepareThreads) {
    const int part = i % 8, row = i / 8 % kTile, tile = i / 8 / kTile, column = tile * kTile + part * 8;
    float x[8] = {};
    const float* at = from + row * stride + column;
    if (row < rows) {
      if (wide) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (column + 4 * half >= columns) continue;
          const float4 four = __ldg(reinterpret_cast<const float4*>(at) + half);
          x[4 * half] = four.x, x[4 * half + 1] = four.y;
          x[4 * half + 2] = four.z, x[4 * half + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) x[c] = column + c < columns ? at[c] : 0.0f;
      }
    }
    to(tile * kTileBytes + ptx::swizzled(static_cast<uint32_t>(row), static_cast<uint32_t>(part) * 16),
       uint4{pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]), pack_pair(x[6], x[7])});
  }
}

// One warp: two rows a lane.
__device__ inline void put_tile_gates(const LinearBackward& op, const TileHead& of, int32_t chunk,
                                      TileGates& to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes, rows = of.rows(chunk);
  float beta[2] = {0.0f, 0.0f}, log[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (2 * lane + i >= rows) continue;
    const int64_t at = (of.row(chunk) + 2 * lane + i) * op.heads + of.head;
    beta[i] = op.betas != nullptr ? op.betas[at] : 1.0f;
    if (op.logs != nullptr) {
      log[i] = op.logs[at];
    } else if (op.rates != nullptr) {
      log[i] = op.rates[of.head] * beta[i];
    }
  }
  float sum = log[0] + log[1];
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const float other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  const float up = __shfl_up_sync(kAllLanes, sum, 1), before = lane == 0 ? 0.0f : up;
  const float last = __shfl_sync(kAllLanes, sum, kWarpLanes - 1);
  const float logs[2] = {before + log[0], sum};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    to.log2[row] = logs[i] * 1.4426950408889634f;
    to.left[row] = expf(logs[i]);
    to.until_end[row] = expf(last - logs[i]);
    to.beta[row] = beta[i];
  }
}

// rho, column `column`, downwards, to a tile: 16 rows at a time, by loops: less code, and no slower. beta rho
// of rows m above is kept at (column, m) of L, where L has nothing.
__device__ inline void solve_tile(float* l, const float* beta, unsigned char* to, int column) {
  constexpr int kRows = 16;
#pragma unroll 1
  for (int first = 0; first < kTile; first += kRows) {
    float x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = first + i > column ? -l[pair_at(first + i, column)] : 0.0f;
#pragma unroll 1
    for (int above = column / kWarpLanes * kWarpLanes; above < first; above += 4) {
      const float4 four = *reinterpret_cast<const float4*>(l + pair_at(column, above));
      const float y[4] = {above > column ? four.x : 0.0f, above + 1 > column ? four.y : 0.0f,
                          above + 2 > column ? four.z : 0.0f, above + 3 > column ? four.w : 0.0f};
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 row = *reinterpret_cast<const float4*>(l + pair_at(first + i, above));
        x[i] = fmaf(-row.x, y[0], x[i]);
        x[i] = fmaf(-row.y, y[1], x[i]);
        x[i] = fmaf(-row.z, y[2], x[i]);
        x[i] = fmaf(-row.w, y[3], x[i]);
      }
    }
    float y[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int m = 0; m < i; ++m) x[i] = fmaf(-l[pair_at(first + i, first + m)], y[m], x[i]);
      y[i] = beta[first + i] * x[i];
      const auto row = static_cast<uint32_t>(first + i);
      *reinterpret_cast<Bf16*>(to + ptx::swizzled(row, static_cast<uint32_t>(column) * 2)) =
          __float2bfloat16_rn(x[i]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i > column) l[pair_at(column, first + i)] = y[i];
    }
  }
}

// Every other CTA: V and dO of those heads as tiles.
__device__ inline void prepare_values(const LinearBackward& op, int32_t sequence, int32_t chunk, int begin,
                                      int end) {
  const int64_t stride = int64_t{op.heads} * op.value_dim;
  for (int head = begin; head < end; ++head) {
    const TileHead of(op, sequence, head);
    const int64_t at = of.row(chunk) * stride + int64_t{head} * op.value_dim;
    for (int strip = 0; strip < static_cast<int>(of.places.strips); ++strip) {
      const int first = strip * kTile;
      const auto convert = [&](const float* array, int64_t place) {
        unsigned char* const to = of.at(place, of.places.value_bytes, chunk) + strip * kTileBytes;
        convert_rows<1>(
            array + at + first, stride, of.rows(chunk), op.value_dim - first,
            [&](uint32_t in_tile, const uint4& x) { *reinterpret_cast<uint4*>(to + in_tile) = x; });
      };
      convert(op.v, of.places.values);
      convert(op.d_out, of.places.d_out);
    }
  }
}

template <int kKeys, bool kDelta>
__device__ inline void prepare_tiles(const LinearBackward& op, PrepareTiles<kKeys>& s) {
  constexpr int kHeads = prepare_heads(kDelta);
  const int group = op.heads / op.key_heads, parts = (group + kHeads - 1) / kHeads;
  const int of_part = static_cast<int>(blockIdx.x) / 2, key_head = of_part / parts, part = of_part % parts;
  const int64_t chunks = tile_places(op).chunks;
  const auto chunk = static_cast<int32_t>(blockIdx.y % chunks);
  const auto sequence = static_cast<int32_t>(blockIdx.y / chunks);
  const int begin = key_head * group + part * kHeads, end = min(begin + kHeads, (key_head + 1) * group);
  const TileHead key(op, sequence, begin);
  if (chunk >= key.count) return;
  if (blockIdx.x % 2 != 0) return prepare_values(op, sequence, chunk, begin, end);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes,
            lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int rows = key.rows(chunk), g = lane / 4, t = lane % 4;

  const int64_t key_stride = int64_t{op.key_heads} * op.key_dim;
  const int64_t key_at = key.row(chunk) * key_stride + int64_t{key_head} * op.key_dim;
  unsigned char* const k_to = key.keys(key.places.keys, chunk);
  unsigned char* const q_to = key.keys(key.places.queries, chunk);
  convert_rows<kKeys / kTile>(op.k + key_at, key_stride, rows, op.key_dim, [&](uint32_t at, const uint4& x) {
    *reinterpret_cast<uint4*>(s.k + at) = x;
    if (part == 0) *reinterpret_cast<uint4*>(k_to + at) = x;
  });
  convert_rows<kKeys / kTile>(op.q + key_at, key_stride, rows, op.key_dim, [&](uint32_t at, const uint4& x) {
    *reinterpret_cast<uint4*>(s.q + at) = x;
    if (part == 0) *reinterpret_cast<uint4*>(q_to + at) = x;
  });
  ptx::publish_to_async();
  __syncthreads();  // K and Q are there
  float kk[kTile / 2] = {}, qk[kTile / 2] = {};
  ptx::fence_registers(kk);
  ptx::fence_registers(qk);
  ptx::wgmma_fence();
#pragma unroll
  for (int tile = 0; tile < kKeys / kTile; ++tile) {
    const uint64_t k = ptx::wgmma_operand(s.k + tile * kTileBytes),
                   q = ptx::wgmma_operand(s.q + tile * kTileBytes);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (kDelta) ptx::wgmma_16bit<Bf16, 0, 0>(kk, k + 2 * step, k + 2 * step, true);
      ptx::wgmma_16bit<Bf16, 0, 0>(qk, q + 2 * step, k + 2 * step, true);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::fence_registers(kk);
  ptx::fence_registers(qk);

  for (int first = begin; first < end; first += 2) {
    if (warp < 2 && first + warp < end) {
      const TileHead of(op, sequence, first + warp);
      put_tile_gates(op, of, chunk, s.gates[warp]);
      __syncwarp();
      const auto* from = reinterpret_cast<const float4*>(&s.gates[warp]);
      auto* to = reinterpret_cast<float4*>(of.at(of.places.gates, sizeof(TileGates), chunk));
      for (int i = lane; i < static_cast<int>(sizeof(TileGates) / 16); i += kWarpLanes) to[i] = from[i];
    }
    if (lane == 0) ptx::bulk_store_wait<0>();
    __syncthreads();  // gates are there; K and Q, and the tiles of the heads before, have been read
    for (int h = 0; h < 2 && first + h < end; ++h) {
      const TileHead of(op, sequence, first + h);
      const TileGates& gates = s.gates[h];
      uint32_t a[4][4];
#pragma unroll
      for (int at = 0; at < kTile / 2; at += 2) {
        const int i = 16 * warp + g + at / 2 % 2 * 8, j = at / 4 * 8 + 2 * t;
        const float e0 = ptx::exp2_approx(j <= i ? gates.log2[i] - gates.log2[j] : 0.0f);
        const float e1 = ptx::exp2_approx(j < i ? gates.log2[i] - gates.log2[j + 1] : 0.0f);
        a[at / 8][at / 2 % 4] =
            pack_pair(j <= i ? op.scale * (e0 * qk[at]) : 0.0f, j < i ? op.scale * (e1 * qk[at + 1]) : 0.0f);
        if constexpr (kDelta)
          *reinterpret_cast<float2*>(s.l[h] + pair_at(i, j)) =
              make_float2(j < i ? e0 * kk[at] : 0.0f, j + 1 < i ? e1 * kk[at + 1] : 0.0f);
      }
      const uint32_t tile = ptx::shared_address(s.out[h]) + static_cast<uint32_t>(warp * kWarpTileBytes);
      store_operand(tile, a);
      ptx::publish_to_async();
      __syncwarp();
      if (lane == 0) {
        bulk_store(of.at(of.places.pairs, kTileBytes, chunk) + warp * kWarpTileBytes, tile, kWarpTileBytes);
        ptx::bulk_store_commit();
      }
    }
    if constexpr (kDelta) {
      if (lane == 0) ptx::bulk_store_wait<0>();
      __syncthreads();  // L is there, and A has been read
      const int h = warp / 2;
      if (first + h < end)
        solve_tile(s.l[h], s.gates[h].beta, s.out[h], static_cast<int>(threadIdx.x) % kTile);
      ptx::publish_to_async();
      __syncthreads();  // rho is there
      if (threadIdx.x == 0) {
        for (int i = 0; i < 2 && first + i < end; ++i) {
          const TileHead of(op, sequence, first + i);
          bulk_store(of.at(of.places.solved, kTileBytes, chunk), ptx::shared_address(s.out[i]), kTileBytes);
        }
        ptx::bulk_store_commit();
      }
    } else {
      __syncthreads();  // the gates have been read
    }
  }
  ptx::bulk_written();
}

#endif  // MILLRACE_HAS_WGMMA

// grid: twice the parts of heads, chunks of all sequences.
template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kPrepareThreads, 3)
    prepare_tiles_kernel(const __grid_constant__ LinearBackward op) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char shared_tiles[];
  prepare_tiles<kKeys, kDelta>(op, *reinterpret_cast<PrepareTiles<kKeys>*>(shared_tiles));
#endif
}

}  // namespace millrace::cuda
