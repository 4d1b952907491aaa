// What the warpgroup products have in common: which rows and weights a CTA multiplies, and where the sums go.
// A CTA is persistent; some warpgroups bring operands, two multiply 64 rows x kN outputs each.
#pragma once

#include "backend/cuda/ops/activation.cuh"
#include "backend/cuda/ops/launch.cuh"
#include "backend/cuda/ops/mx4.cuh"
#include "backend/cuda/ops/tile_stream.cuh"
#include "backend/cuda/ops/wide.h"
#include "backend/cuda/ptx/wgmma.cuh"

namespace millrace::cuda {

inline constexpr int kGroupThreads = 128;  // a warpgroup
inline constexpr int kGroupWarps = kGroupThreads / kWarpLanes;
inline constexpr int kConsumers = 2;  // warpgroups

// One CTA's work: kN / 8 tiles of weights, from first_n on, on up to two tiles of rows.
struct WgmmaItem {
  int32_t matrix;  // part or expert
  int32_t first_tile, m_tiles, first_n;
  int32_t rows;  // of activations, at most m_tiles of them full
};

// Two neighbouring columns of a row of `columns`, together where an even number of them keeps them aligned.
template <bool kEven>
__device__ inline void store_two(float* row, int32_t column, int32_t columns, float a, float b) {
  if constexpr (kEven) {
    if (column < columns) *reinterpret_cast<float2*>(row + column) = {a, b};
  } else {
    if (column < columns) row[column] = a;
    if (column + 1 < columns) row[column + 1] = b;
  }
}
// As far as there are, else any.
template <bool kEven>
__device__ inline float2 load_two(const float* row, int32_t column, int32_t columns) {
  if constexpr (kEven) return *reinterpret_cast<const float2*>(row + min(column, columns - 2));
  return {row[min(column, columns - 1)], row[min(column + 1, columns - 1)]};
}
// kCount pairs of columns, 8 apart, all asked for before any is used. `row` may be null: zeros.
template <bool kEven, int kCount>
__device__ inline void load_columns(float2 (&to)[kCount], const float* row, int32_t first, int32_t columns) {
  if (row == nullptr) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) to[n] = {0.0f, 0.0f};
    return;
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) to[n] = load_two<kEven>(row, first + 8 * n, columns);
}

// ---------------------------------------------------------------- what is multiplied

struct WgmmaLinear {
  struct Part {
    const uint8_t* tiles;
    const float* bias;
    float* out;
    int32_t rows, num_tiles;
  };
  Part parts[3];
  int32_t num_parts, pairs;
  uint32_t tile_bytes;
  WideRows x;
  int64_t rows;
  bool add;

  template <int kN>
  __host__ __device__ int n_items(int part) const {
    return (parts[part].num_tiles + kN / 8 - 1) / (kN / 8);
  }
  __host__ __device__ int m_items() const {
    return static_cast<int>((rows + 2 * kWgmmaRows - 1) / (2 * kWgmmaRows));
  }
  template <int kN>
  __host__ __device__ int items() const {
    int n = 0;
    for (int i = 0; i < num_parts; ++i) n += n_items<kN>(i);
    return n * m_items();
  }
  // CTAs that follow one another share weights.
  template <int kN>
  __device__ WgmmaItem item(int i) const {
    const int m = i % m_items(), tiles = static_cast<int>((rows + kWgmmaRows - 1) / kWgmmaRows);
    int n = i / m_items(), part = 0;
    while (part + 1 < num_parts && n >= n_items<kN>(part)) n -= n_items<kN>(part++);
    return {part, 2 * m, min(2, tiles - 2 * m), n * (kN / 8),
            static_cast<int32_t>(min(int64_t{2 * kWgmmaRows}, rows - int64_t{2 * kWgmmaRows} * m))};
  }
  // Past the last tile: any, its sums are not stored.
  __device__ const uint8_t* tile(const WgmmaItem& item, int n) const {
    const Part& part = parts[item.matrix];
    return part.tiles + int64_t{min(item.first_n + n, part.num_tiles - 1)} * tile_bytes;
  }
  // Rows `row` and row + 8 of the item's, and columns 2t and 2t + 1 of each tile. What is read is read before
  // anything is stored, all at once: an item has this wait once.
  template <int kN>
  __device__ void store(const WgmmaItem& item, int row, int t, const float (&total)[kN / 2]) const {
    parts[item.matrix].rows % 2 == 0 ? store_as<kN, true>(item, row, t, total)
                                     : store_as<kN, false>(item, row, t, total);
  }
  template <int kN, bool kEven>
  __device__ void store_as(const WgmmaItem& item, int row, int t, const float (&total)[kN / 2]) const {
    const Part& part = parts[item.matrix];
    const int32_t first = item.first_n * kTileRows + 2 * t;
    float2 bias[kN / 8];
    load_columns<kEven>(bias, part.bias, first, part.rows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = int64_t{item.first_tile} * kWgmmaRows + row + half * 8;
      if (token >= rows) continue;
      float* out = part.out + token * part.rows;
      float2 old[kN / 8];
      load_columns<kEven>(old, add ? out : nullptr, first, part.rows);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        const float a = total[4 * j + 2 * half] + bias[j].x, b = total[4 * j + 2 * half + 1] + bias[j].y;
        store_two<kEven>(out, first + 8 * j, part.rows, add ? old[j].x + a : a, add ? old[j].y + b : b);
      }
    }
  }
};

template <bool kGateUp>
struct WgmmaExperts {
  WideExperts op;
  WideRows x;
  int32_t pairs;

  // Gate and up alternate in tiles, so that a lane holds both.
  template <int kN>
  static constexpr int kTiles = kGateUp ? kN / 16 : kN / 8;
  template <int kN>
  __device__ int n_items() const {
    return (op.gate.tiles_per_expert + kTiles<kN> - 1) / kTiles<kN>;
  }
  template <int kN>
  __device__ int items() const {
    return *op.groups.num_chunks * n_items<kN>();
  }
  // CTAs that follow one another share activations; the chunks of an expert, its weights.
  template <int kN>
  __device__ WgmmaItem item(int i) const {
    const int32_t* chunk = op.groups.chunks + 4 * (i / n_items<kN>());
    return {chunk[0], chunk[1], chunk[2], i % n_items<kN>() * kTiles<kN>, chunk[3]};
  }
  __device__ const uint8_t* tile(const WgmmaItem& item, int n) const {
    const PackedMatrix& w = kGateUp && n % 2 == 1 ? op.up : op.gate;
    const int tile = min(item.first_n + (kGateUp ? n / 2 : n), w.tiles_per_expert - 1);
    return w.tiles + (int64_t{item.matrix} * w.tiles_per_expert + tile) * w.tile_bytes;
  }
  template <int kN>
  __device__ void store(const WgmmaItem& item, int row, int t, const float (&total)[kN / 2]) const {
    const bool even = op.gate.rows % 2 == 0;
    even ? store_as<kN, true>(item, row, t, total) : store_as<kN, false>(item, row, t, total);
  }
  template <int kN, bool kEven>
  __device__ void store_as(const WgmmaItem& item, int row, int t, const float (&total)[kN / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int32_t first = item.first_n * kTileRows + 2 * t;
    const int32_t* order = op.groups.order + int64_t{item.first_tile} * kWgmmaRows + row;
    const int32_t pair[2] = {order[0], order[8]};
    const auto biases = [&](const float* bias) {
      return bias != nullptr ? bias + int64_t{item.matrix} * columns : nullptr;
    };
    float2 gate_bias[kTiles<kN>], up_bias[kTiles<kN>];
    load_columns<kEven>(gate_bias, biases(op.gate_bias), first, columns);
    if constexpr (kGateUp) load_columns<kEven>(up_bias, biases(op.up_bias), first, columns);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (pair[half] < 0) continue;
      float* out = op.out + int64_t{pair[half]} * columns;
#pragma unroll
      for (int n = 0; n < kTiles<kN>; ++n) {
        const int at = 4 * (kGateUp ? 2 * n : n) + 2 * half;
        float a = total[at] + gate_bias[n].x, b = total[at + 1] + gate_bias[n].y;
        if constexpr (kGateUp) {
          a = activate(op.activation, a, total[at + 4] + up_bias[n].x);
          b = activate(op.activation, b, total[at + 5] + up_bias[n].y);
        }
        store_two<kEven>(out, first + 8 * n, columns, a, b);
      }
    }
  }
};

void launch_mx4_linear(const WgmmaLinear& p, cudaStream_t stream);
void launch_mx4_experts(const WideExperts& op, cudaStream_t stream);

}  // namespace millrace::cuda
