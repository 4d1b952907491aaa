// A chunk of 16 rows of one head on tensor cores (state_scan.h says what is computed). One warp prepares it:
// keys and queries in shared memory, T and the weights of the rows among one another. Then every warp that
// has 16 columns of the state goes over it by itself.
//
// Everything is transposed: a warp's part of the state is S^T, [16 values][key_dim], in registers as the sums
// of m16n8k8 products over rows (S'), and as they lie they are the left operand of products over keys (S^T k,
// S^T q): a lane (g, t) has keys 2t and 2t + 1 of a tile of eight, which the other operand's loads follow. So
// are X^T, W^T and O^T, [16 values][16 rows].
#pragma once

#include "kernels/cuda/linear/state_scan.h"
#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/async_copy.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/mma_tf32.cuh"

namespace millrace::cuda {

// In shared memory. Columns of keys and queries are swizzled (key_column): lanes read pairs of eight rows, or
// one column of rows that are two apart, from all banks.
template <int kKeys, bool kDelta>
struct ChunkOperands {
  static constexpr int kStride = 24;  // of a 16 x 16 matrix: pairs of four rows are in different banks
  static constexpr int kSolved = kDelta ? kStateChunk * kStride : 4;  // without the delta rule nothing is
  float k[kStateChunk * kKeys];
  float q[kStateChunk * kKeys];
  float a[kStateChunk * kStride];  // scale e(i, j) (q_i . k_j)
  float t[kSolved];                // T
  float l[kSolved];                // beta_i e(i, j) (k_i . k_j)
  float left[kStateChunk];         // e_i
  float left_query[kStateChunk];   // scale e_i
  float until_end[kStateChunk];    // e(last, j)
  float beta[kStateChunk];         // without the delta rule: the steps
  float log[kStateChunk];          // of what is left of the chunk's first state
};

// Column c of row r lies at c ^ this: of a tile of eight columns the place among four is changed, so that of
// four tiles each has a fixed address and the next four are a constant further.
__device__ inline int key_swizzle(int row) { return (((row ^ (row >> 2)) & 1) | (row & 2)) << 3; }
inline constexpr int kSwizzled = 4;  // tiles

// Rows of a sequence in one chunk: those before `first` are known, those from `last` on are not there.
struct ChunkRows {
  int first, last;
  int64_t row;   // of the step, of the chunk's row 0 (which may be before the step)
  float* block;  // this layer's part of the block, or null
};

// A head of a sequence: where its chunks are.
struct HeadChunks {
  __device__ HeadChunks(const StateScan& op, int32_t of_sequence, int32_t of_head)
      : sequence(of_sequence), head(of_head) {
    const StateSequences& s = op.sequences;
    first_row = s.row_starts != nullptr ? s.row_starts[sequence] : sequence;
    tokens = s.row_starts != nullptr ? s.row_starts[sequence + 1] - first_row : 1;
    context = s.positions != nullptr && tokens > 0 ? s.positions[first_row] : 0;
    first_block = context / kStateChunk;
    count = tokens == 0 ? 0 : (context + tokens + kStateChunk - 1) / kStateChunk - first_block;
    key_head = op.tiled ? head % op.key_heads : head / (op.heads / op.key_heads);
    table = op.pool.pool != nullptr ? op.pool.tables + op.pool.table_starts[sequence] : nullptr;
  }
  __device__ float* block_of(const StateScan& op, int32_t block) const {
    if (table == nullptr) return nullptr;
    const int32_t id = table[block];
    return id < 0 ? nullptr : op.pool.pool + id * op.pool.block_floats + op.pool.layer_offset;
  }
  __device__ ChunkRows rows(const StateScan& op, int32_t chunk) const {
    ChunkRows r;
    const int32_t begin = (first_block + chunk) * kStateChunk;
    r.first = max(context - begin, 0);
    r.last = min(context + tokens - begin, kStateChunk);
    r.row = int64_t{first_row} + begin - context;
    r.block = block_of(op, first_block + chunk);
    return r;
  }

  int32_t sequence, head, key_head;
  int32_t first_row, tokens, context, first_block, count;
  const int32_t* table;
};

// ---------------------------------------------------------------- one warp: preparing

// Starts copying keys and queries of a chunk; what is not there is zeros.
template <int kKeys, bool kDelta>
__device__ inline void load_chunk(const StateScan& op, const HeadChunks& of, int32_t chunk,
                                  ChunkOperands<kKeys, kDelta>& to, bool aligned) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const ChunkRows rows = of.rows(op, chunk);
  const int64_t head_at = int64_t{of.key_head} * op.key_dim;
  constexpr int kGroups = kKeys / 4;  // of 16 bytes, of a row
  if (aligned && op.key_dim == kKeys && rows.first == 0 && rows.last == kStateChunk) {
    constexpr int kRowsAtOnce = kWarpLanes >= kGroups ? kWarpLanes / kGroups : 1;
    constexpr int kTurns = kGroups > kWarpLanes ? kGroups / kWarpLanes : 1;
    const int r0 = lane / kGroups, c0 = lane % kGroups * 4;  // with more groups than lanes: row 0
    const float* k = op.k + (rows.row + r0) * op.k_stride + head_at + c0;
    const float* q = op.q + (rows.row + r0) * op.q_stride + head_at + c0;
    const int64_t k_step = kRowsAtOnce * op.k_stride, q_step = kRowsAtOnce * op.q_stride;
#pragma unroll
    for (int i = 0; i < kStateChunk / kRowsAtOnce; ++i) {
      const int r = r0 + i * kRowsAtOnce;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int at = r * kKeys + ((c0 + turn * 4 * kWarpLanes) ^ key_swizzle(r));
        ptx::async_copy16(to.k + at, k + turn * 4 * kWarpLanes);
        ptx::async_copy16(to.q + at, q + turn * 4 * kWarpLanes);
      }
      k += k_step;
      q += q_step;
    }
    ptx::async_commit();
    return;
  }
  // Row by row: what there is of one is the same for all lanes.
  const auto load_row = [&](float* row, const float* from, int swizzle) {
    for (int c = lane * 4; c < kKeys; c += kWarpLanes * 4) {
      float* at = row + (c ^ swizzle);
      if (from == nullptr || c >= op.key_dim) {
        *reinterpret_cast<float4*>(at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      } else if (aligned) {
        ptx::async_copy16(at, from + c);
      } else {
        for (int j = 0; j < 4; ++j) {
          if (c + j < op.key_dim) {
            ptx::async_copy4(at + j, from + c + j);
          } else {
            at[j] = 0.0f;
          }
        }
      }
    }
  };
#pragma unroll 1
  for (int r = 0; r < kStateChunk; ++r) {
    const float *k = nullptr, *q = nullptr;
    if (r < rows.first) {
      k = rows.block + op.pool.at.keys + r * op.pool.at.row_keys + head_at;
    } else if (r < rows.last) {
      k = op.k + (rows.row + r) * op.k_stride + head_at;
      q = op.q + (rows.row + r) * op.q_stride + head_at;
    }
    load_row(to.k + r * kKeys, k, key_swizzle(r));
    load_row(to.q + r * kKeys, q, key_swizzle(r));
  }
  ptx::async_commit();
}

// The logarithm of row r's decay, and its beta (1 where there are none) or step; zeros of rows that are not
// there.
__device__ inline float2 gates_of(const StateScan& op, const HeadChunks& of, const ChunkRows& rows, int r) {
  if (r >= rows.last) return {0.0f, 0.0f};
  if (r < rows.first) {
    const int64_t at = r * op.pool.at.row_decays + of.head;
    return {rows.block[op.pool.at.decays + at], rows.block[op.pool.at.betas + at]};
  }
  const int64_t at = (rows.row + r) * op.heads + of.head;
  float2 gates{0.0f, 1.0f};
  if (op.logs != nullptr) {
    gates.x = op.logs[at];
  } else if (op.rates != nullptr) {
    gates.x = op.rates[of.head] * op.steps[at];
  }
  const float* second = op.betas != nullptr ? op.betas : op.steps;
  if (second != nullptr) gates.y = second[at];
  return gates;
}

// T, column by column: a lane has one, and solves (I + L) T = B downwards.
template <int kKeys>
__device__ inline void solve_chunk(ChunkOperands<kKeys, true>& c) {
  constexpr int kStride = ChunkOperands<kKeys, true>::kStride;
  const int column = static_cast<int>(threadIdx.x) % kStateChunk;  // half of the warp repeats the other
  float t[kStateChunk];
#pragma unroll
  for (int i = 0; i < kStateChunk; ++i) {
    float row[kStateChunk];
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(c.l + i * kStride + m);
      row[m] = l.x;
      row[m + 1] = l.y;
      row[m + 2] = l.z;
      row[m + 3] = l.w;
    }
    float sum = i == column ? c.beta[i] : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum = fmaf(-row[m], t[m], sum);
    t[i] = sum;
  }
#pragma unroll
  for (int i = 0; i < kStateChunk; ++i) c.t[i * kStride + column] = ptx::round_tf32(t[i]);
}

// Of a chunk whose copies this warp has waited for. Keys and queries are rounded where they lie.
template <int kKeys, bool kDelta>
__device__ inline void prepare_chunk(const StateScan& op, const HeadChunks& of, int32_t chunk,
                                     ChunkOperands<kKeys, kDelta>& c) {
  constexpr int kStride = ChunkOperands<kKeys, kDelta>::kStride;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes, g = lane / 4, t = lane % 4;
  const ChunkRows rows = of.rows(op, chunk);
  const float2 gates = gates_of(op, of, rows, lane % kStateChunk);

  float kk[2][4] = {}, qk[2][4] = {};
  // Rows g and g + 8 have the same swizzle.
  float* at[kSwizzled];
#pragma unroll
  for (int b = 0; b < kSwizzled; ++b) at[b] = c.k + g * kKeys + ((b * 8 + 2 * t) ^ key_swizzle(g));
  constexpr int kLow = 8 * kKeys, kQueries = kStateChunk * kKeys;
#pragma unroll
  for (int first = 0; first < kKeys / 8; first += kSwizzled) {
    float2 x[kSwizzled][2][2];  // of keys, of queries: rows g and g + 8
#pragma unroll
    for (int b = 0; b < kSwizzled; ++b) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float* from = at[b] + first * 8 + m * kQueries;
        x[b][m][0] = *reinterpret_cast<const float2*>(from);
        x[b][m][1] = *reinterpret_cast<const float2*>(from + kLow);
      }
    }
#pragma unroll
    for (int b = 0; b < kSwizzled; ++b) {
      float a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float* to = at[b] + first * 8 + m * kQueries;
        a[m][0] = ptx::round_tf32(x[b][m][0].x);
        a[m][1] = ptx::round_tf32(x[b][m][1].x);
        a[m][2] = ptx::round_tf32(x[b][m][0].y);
        a[m][3] = ptx::round_tf32(x[b][m][1].y);
        *reinterpret_cast<float2*>(to) = make_float2(a[m][0], a[m][2]);
        *reinterpret_cast<float2*>(to + kLow) = make_float2(a[m][1], a[m][3]);
      }
      if constexpr (kDelta) {
        ptx::mma_tf32(kk[0], a[0], a[0][0], a[0][2]);
        ptx::mma_tf32(kk[1], a[0], a[0][1], a[0][3]);
      }
      ptx::mma_tf32(qk[0], a[1], a[0][0], a[0][2]);
      ptx::mma_tf32(qk[1], a[1], a[0][1], a[0][3]);
    }
  }

  // Logarithms from the chunk's first row on, added in order.
  float log = 0.0f;
#pragma unroll
  for (int m = 0; m < kStateChunk; ++m) {
    const float x = __shfl_sync(kAllLanes, gates.x, m);
    if (m <= lane % kStateChunk) log += x;
  }
  const float log_last = __shfl_sync(kAllLanes, log, kStateChunk - 1);
  if (lane < kStateChunk) {
    const float left = expf(log);
    c.left[lane] = left;
    c.left_query[lane] = op.scale * left;
    c.until_end[lane] = expf(log_last - log);
    c.beta[lane] = gates.y;
    c.log[lane] = log;
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 log_j = *reinterpret_cast<const float2*>(c.log + n * 8 + 2 * t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = g + half * 8, j = n * 8 + 2 * t;
      const float log_i = c.log[i];
      // Of what is not there the logarithms may be anything: those of pairs j > i are made 0.
      const float before = expf(j <= i ? log_i - log_j.x : 0.0f), next = expf(j < i ? log_i - log_j.y : 0.0f);
      float2 a, l;
      a.x = j <= i ? ptx::round_tf32(op.scale * (before * qk[n][half * 2])) : 0.0f;
      a.y = j < i ? ptx::round_tf32(op.scale * (next * qk[n][half * 2 + 1])) : 0.0f;
      *reinterpret_cast<float2*>(c.a + i * kStride + j) = a;
      if constexpr (kDelta) {
        const float beta = c.beta[i];
        l.x = j < i ? beta * (before * kk[n][half * 2]) : 0.0f;
        l.y = j + 1 < i ? beta * (next * kk[n][half * 2 + 1]) : 0.0f;
        *reinterpret_cast<float2*>(c.l + i * kStride + j) = l;
      }
    }
  }
  if constexpr (kDelta) {
    __syncwarp();
    solve_chunk(c);
  }
}

// ---------------------------------------------------------------- any warp: 16 columns of the state

// Values of rows n * 8 + 2t + (0, 1), columns g and g + 8 of a warp's 16, as they lie in a product's sum.
using RowTile = float[2][4];

// What two warps with the two halves of the keys tell one another of a chunk: S^T k and S^T q of their own,
// twice, so that one may be a chunk ahead.
struct HalvesExchange {
  float sums[2][2][16][kWarpLanes];  // of every other chunk, of each half
};

// kHalves 2: a warp has half of the keys, and outputs half of the rows.
template <int kKeys, bool kDelta, int kHalves = 1>
struct StateColumns {
  static_assert(kHalves == 1 || kKeys >= 64);  // a half is whole groups of tiles that are swizzled together
  static constexpr int kTiles = kKeys / 8 / kHalves;
  float s[kTiles][4];  // S^T: columns g (0, 1) and g + 8 (2, 3); keys 8 tile + 2t and the next
  int column;          // the first of the warp's
  int columns;         // of the head
  int half;            // which keys
  HalvesExchange* exchange;
  int turn;             // of the exchange: the chunk's number, odd or even
  int barrier;          // of the two warps
  const float* values;  // of the chunk that is loaded next, row 2t, column g
  float* outputs;       // of the next chunk's

  __device__ bool has(int e) const { return column_of(e) < columns; }
  __device__ int column_of(int e) const {
    return column + static_cast<int>(threadIdx.x) % kWarpLanes / 4 + (e / 2) * 8;
  }
  __device__ static int row_of(int n, int e) { return n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2; }
  // Rows of this tile of eight are the warp's to write.
  __device__ bool writes(int n) const { return kHalves == 1 || n == half; }

  // state [key_dim][stride], or null: zeros.
  __device__ void load(const float* state, int key_dim, int64_t stride) {
    const bool left = has(0), right = has(2);
    const float* from = state + row_of(half * kTiles, 0) * stride + column_of(0);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile, from += 8 * stride) {
      const int key = row_of(half * kTiles + tile, 0);
      const bool first = state != nullptr && key < key_dim, next = state != nullptr && key + 1 < key_dim;
      s[tile][0] = first && left ? from[0] : 0.0f;
      s[tile][1] = next && left ? from[stride] : 0.0f;
      s[tile][2] = first && right ? from[8] : 0.0f;
      s[tile][3] = next && right ? from[stride + 8] : 0.0f;
    }
  }
  __device__ void store(float* state, int key_dim, int64_t stride) const {
    const bool left = has(0), right = has(2);
    float* to = state + row_of(half * kTiles, 0) * stride + column_of(0);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile, to += 8 * stride) {
      const int key = row_of(half * kTiles + tile, 0);
      if (key < key_dim && left) to[0] = s[tile][0];
      if (key + 1 < key_dim && left) to[stride] = s[tile][1];
      if (key < key_dim && right) to[8] = s[tile][2];
      if (key + 1 < key_dim && right) to[stride + 8] = s[tile][3];
    }
  }

  // Before the first chunk, whose rows these are.
  __device__ void begin(const StateScan& op, const HeadChunks& of, const ChunkRows& rows) {
    const int64_t row = rows.row + row_of(0, 0), own = int64_t{of.head} * op.value_dim + column_of(0);
    values = op.v + row * op.v_stride + own;
    outputs = op.out + row * op.heads * op.value_dim + own;
  }

  // What the next chunk reads of memory: values of its new rows, X of those that are known.
  __device__ void load_values(const StateScan& op, const HeadChunks& of, const ChunkRows& rows, RowTile& v) {
    const bool left = has(0), right = has(2);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int r = row_of(n, odd);
        const float* from = values + (n * 8 + odd) * op.v_stride;
        if (rows.first > 0 && r < rows.first)
          from = rows.block + op.pool.at.writes + r * op.pool.at.row_writes +
                 int64_t{of.head} * op.pool.at.padded_dim + column_of(0);
        v[n][odd] = r < rows.last && left ? from[0] : 0.0f;
        v[n][odd + 2] = r < rows.last && right ? from[8] : 0.0f;
      }
    }
    values += kStateChunk * op.v_stride;
  }

  // X of new rows into the block, for those that are decoded behind them.
  __device__ void keep_rows(const StateScan& op, const HeadChunks& of, const ChunkRows& rows,
                            const RowTile& x) const {
    float* to = rows.block + op.pool.at.writes + int64_t{of.head} * op.pool.at.padded_dim + column_of(0);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int r = row_of(n, odd);
        if (r < rows.first || r >= rows.last || !writes(n)) continue;
        if (has(0)) to[r * op.pool.at.row_writes] = x[n][odd];
        if (has(2)) to[r * op.pool.at.row_writes + 8] = x[n][odd + 2];
      }
    }
  }

  __device__ void read_state(const ChunkOperands<kKeys, kDelta>& c, RowTile& read_k, RowTile& read_q) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes, g = lane / 4, t = lane % 4;
    constexpr int kChains = 3 - kHalves, kChain = kKeys / 16;  // tiles of a chain
    float sum_k[kChains][2][4] = {}, sum_q[kChains][2][4] = {};
    const float* at[kSwizzled];  // rows g and g + 8 have the same swizzle
#pragma unroll
    for (int b = 0; b < kSwizzled; ++b)
      at[b] = c.k + half * kTiles * 8 * (kHalves - 1) + g * kKeys + ((b * 8 + 2 * t) ^ key_swizzle(g));
    constexpr int kQueries = kStateChunk * kKeys;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int chain = i % kChains, tile = chain * kChain + i / kChains;  // both chains are under way
      const float a[4] = {ptx::round_tf32(s[tile][0]), ptx::round_tf32(s[tile][2]),
                          ptx::round_tf32(s[tile][1]), ptx::round_tf32(s[tile][3])};
      const float* from = at[tile % kSwizzled] + tile / kSwizzled * kSwizzled * 8;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 q = *reinterpret_cast<const float2*>(from + kQueries + n * 8 * kKeys);
        ptx::mma_tf32(sum_q[chain][n], a, q.x, q.y);
        if constexpr (kDelta) {
          const float2 k = *reinterpret_cast<const float2*>(from + n * 8 * kKeys);
          ptx::mma_tf32(sum_k[chain][n], a, k.x, k.y);
        }
      }
    }
    if constexpr (kHalves == 1) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          read_k[n][e] = sum_k[0][n][e] + sum_k[1][n][e];
          read_q[n][e] = sum_q[0][n][e] + sum_q[1][n][e];
        }
      }
    } else {
      auto& sums = exchange->sums[turn];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (kDelta) sums[half][i][lane] = sum_k[0][i / 4][i % 4];
        sums[half][8 + i][lane] = sum_q[0][i / 4][i % 4];
      }
      ptx::named_barrier(barrier, 2 * kWarpLanes);  // both halves are there
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // In either warp low + high: a sum of two does not depend on their order.
        if constexpr (kDelta) read_k[i / 4][i % 4] = sum_k[0][i / 4][i % 4] + sums[1 - half][i][lane];
        read_q[i / 4][i % 4] = sum_q[0][i / 4][i % 4] + sums[1 - half][8 + i][lane];
      }
      turn ^= 1;
    }
  }

  // The outputs of a chunk's new rows, and the state behind it if somebody wants it.
  __device__ void advance(const StateScan& op, const HeadChunks& of, const ChunkRows& rows,
                          const ChunkOperands<kKeys, kDelta>& c, const RowTile& v, bool next_state) {
    constexpr int kStride = ChunkOperands<kKeys, kDelta>::kStride;
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes, g = lane / 4, t = lane % 4;

    // S^T k and S^T q: the two halves of the keys are chains of their own, and added last.
    RowTile read_k, read_q;
    read_state(c, read_k, read_q);

    RowTile x;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 by = *reinterpret_cast<const float2*>((kDelta ? c.left : c.beta) + n * 8 + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row_of(n, e);
        const float of_row = e % 2 == 0 ? by.x : by.y;
        const float fresh = kDelta ? fmaf(-of_row, read_k[n][e], v[n][e]) : v[n][e] * of_row;
        x[n][e] = r >= rows.first ? fresh : v[n][e];  // zeros of rows that are not there
      }
    }
    if (rows.block != nullptr) keep_rows(op, of, rows, x);

    // W^T = X^T T^T, products over rows.
    RowTile w = {};
    if constexpr (kDelta) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float a[4] = {ptx::round_tf32(x[j][0]), ptx::round_tf32(x[j][2]), ptx::round_tf32(x[j][1]),
                            ptx::round_tf32(x[j][3])};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float2 b = *reinterpret_cast<const float2*>(c.t + (g + n * 8) * kStride + j * 8 + 2 * t);
          ptx::mma_tf32(w[n], a, b.x, b.y);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) w[n][e] = x[n][e];
      }
    }

    if (next_state) {
      const float left = c.left[kStateChunk - 1];
      float a[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 until = *reinterpret_cast<const float2*>(c.until_end + j * 8 + 2 * t);
        a[j][0] = ptx::round_tf32(w[j][0] * until.x);
        a[j][1] = ptx::round_tf32(w[j][2] * until.x);
        a[j][2] = ptx::round_tf32(w[j][1] * until.y);
        a[j][3] = ptx::round_tf32(w[j][3] * until.y);
      }
      // Rows 2t and the next, and those eight further, which have the same swizzle; column tile * 8 + g.
      const float* at_key[2][kSwizzled];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int r = 2 * t + odd;
#pragma unroll
        for (int b = 0; b < kSwizzled; ++b)
          at_key[odd][b] =
              c.k + half * kTiles * 8 * (kHalves - 1) + r * kKeys + ((b * 8 + g) ^ key_swizzle(r));
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[tile][e] *= left;
        const int from = tile / kSwizzled * kSwizzled * 8, b = tile % kSwizzled;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          ptx::mma_tf32(s[tile], a[j], at_key[0][b][from + j * 8 * kKeys],
                        at_key[1][b][from + j * 8 * kKeys]);
        }
      }
    }

    RowTile o;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 left = *reinterpret_cast<const float2*>(c.left_query + n * 8 + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][e] = (e % 2 == 0 ? left.x : left.y) * read_q[n][e];
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float a[4] = {ptx::round_tf32(w[j][0]), ptx::round_tf32(w[j][2]), ptx::round_tf32(w[j][1]),
                          ptx::round_tf32(w[j][3])};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 b = *reinterpret_cast<const float2*>(c.a + (g + n * 8) * kStride + j * 8 + 2 * t);
        ptx::mma_tf32(o[n], a, b.x, b.y);
      }
    }
    const float skip = op.skip != nullptr ? op.skip[of.head] : 0.0f;
    const int64_t row_size = int64_t{op.heads} * op.value_dim;
    const bool left_column = has(0), right_column = has(2);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int r = row_of(n, odd);
        const bool wanted = r >= rows.first && r < rows.last && writes(n);
        if (op.skip != nullptr) {
          o[n][odd] = fmaf(skip, v[n][odd], o[n][odd]);
          o[n][odd + 2] = fmaf(skip, v[n][odd + 2], o[n][odd + 2]);
        }
        float* to = outputs + (n * 8 + odd) * row_size;
        if (wanted && left_column) to[0] = o[n][odd];
        if (wanted && right_column) to[8] = o[n][odd + 2];
      }
    }
    outputs += kStateChunk * row_size;
  }
};

}  // namespace millrace::cuda
