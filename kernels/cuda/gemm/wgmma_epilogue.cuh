// What a GEMM on warpgroup instructions multiplies and where its sums go: the maps of the operands, how a
// stage lies in shared memory, and the epilogue of plain matrices, of an expert's down and of its gate and
// up.
#pragma once

#include "kernels/cuda/gemm/wgmma_problem.cuh"
#include "kernels/cuda/gemv/tile_ring.cuh"
#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/tile/tensor_map.cuh"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {

inline constexpr int kMaxTokens = 2 * kWgmmaRows;  // of a CTA
inline constexpr int kConsumerWarps = kConsumers * ptx::kWarpgroupWarps;
// Of the last warpgroup two threads are at work: the producers.
inline constexpr int kGemmThreads = (kConsumers + 1) * ptx::kWarpgroupThreads;
inline constexpr int kMaxSharedBytes = 232448;  // of a CTA, sm_90
// Together what 384 threads of 168 registers start with.
inline constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters == 3 * 168);
inline constexpr int kBoxTiles = 8;  // of raw weights, that one copy loads

// Shared memory: stages of [tokens][raw weights], barriers. kBoxes: 2, the warpgroups have rows of their own;
// 1: both have the same 64, and half of the tokens.
template <PackedFormat kFormat, int kBoxes>
struct StageLayout {
  static constexpr int kBoxBytes = kBoxTiles * TileFormat<kFormat>::kKStepBytes;
  static constexpr int kRawAt = kMaxTokens * ptx::kSwizzleRowBytes;
  static constexpr int kStageBytes = (kRawAt + kBoxes * kBoxBytes + 1023) / 1024 * 1024;
  static constexpr int kFits = kMaxSharedBytes / (kStageBytes + 2 * 8);
  static constexpr int kCount = kFits < 12 ? kFits : 12;
  static constexpr int kBytes = kCount * (kStageBytes + 2 * 8);
  static constexpr int kOutputs = kBoxes * kBoxTiles * kTileRows;
  static_assert(kBoxBytes % 128 == 0);
};

template <PackedFormat kFormat, int kBoxes>
struct GemmProblem : WgmmaGemm {
  // Weights are an operand as they lie in shared memory: nothing to dequantize.
  static constexpr bool kWeightsInShared = kFormat == PackedFormat::kBf16;
  using Layout = StageLayout<kFormat, kBoxes>;
  using Format = TileFormat<kFormat>;
  static constexpr int kBoxCount = kBoxes;
  static constexpr int kWeightCopies = 1;  // boxes of weights, of a stage
  CUtensorMap rows_map, maps[3];           // of activations, of the parts

  __device__ const CUtensorMap* map(const GemmItem& item, int) const { return maps + item.matrix; }
  __device__ int first_tile(const GemmItem& item) const { return item.first_n; }
  // Which of a stage's tiles are rows 0-7 and 8-15 of a warp.
  __device__ static int raw_tile(int warp, int half) { return 2 * warp % (kBoxes * kBoxTiles) + half; }

  // sum: of rows g and g + 8 of the warp's, tokens first + 8j + 2t and + 1.
  template <int kTokens>
  __device__ void epilogue(const GemmItem& item, int warp, int g, int t, int first,
                           const float (&sum)[kTokens / 2]) const {
    const Part& part = parts[item.matrix];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (item.first_n + raw_tile(warp, half)) * kTileRows + g;
      if (column >= part.rows) continue;
      const float bias = part.bias != nullptr ? part.bias[column] : 0.0f;
      float* to = part.out + (int64_t{item.first_tile} * kWgmmaRows + first + 2 * t) * part.rows + column;
      const int left = item.rows - first - 2 * t;  // tokens from there on
      float old[kTokens / 4];                      // all loaded before anything is stored
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        const int token = i / 2 * 8 + i % 2;
        old[i] = add && token < left ? to[int64_t{token} * part.rows] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        const int token = i / 2 * 8 + i % 2;
        const float value = sum[i / 2 * 4 + 2 * half + i % 2] + bias;
        if (token < left) to[int64_t{token} * part.rows] = add ? old[i] + value : value;
      }
    }
  }
};

template <PackedFormat kFormat>
struct DownProblem : WgmmaGroupedGemm<false> {
  static constexpr bool kWeightsInShared = kFormat == PackedFormat::kBf16;
  using Layout = StageLayout<kFormat, 2>;
  using Format = TileFormat<kFormat>;
  static constexpr int kBoxCount = 2;
  static constexpr int kWeightCopies = 1;
  CUtensorMap rows_map, maps[1];

  __device__ const CUtensorMap* map(const GemmItem&, int) const { return maps; }
  __device__ int first_tile(const GemmItem& item) const {
    return item.matrix * op.gate.tiles_per_expert + item.first_n;
  }
  __device__ static int raw_tile(int warp, int half) { return 2 * warp + half; }

  template <int kTokens>
  __device__ void epilogue(const GemmItem& item, int warp, int g, int t, int,
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

template <PackedFormat kFormat>
struct GateUpProblem : WgmmaGroupedGemm<true> {
  static constexpr bool kWeightsInShared = false;  // gate and up rows alternate
  using Layout = StageLayout<kFormat, 2>;
  using Format = TileFormat<kFormat>;
  static constexpr int kBoxCount = 2;
  static constexpr int kWeightCopies = 2;
  CUtensorMap rows_map, maps[2];  // of gate and up

  __device__ const CUtensorMap* map(const GemmItem&, int half) const { return maps + half; }
  __device__ int first_tile(const GemmItem& item) const {
    return item.matrix * op.gate.tiles_per_expert + item.first_n;
  }
  __device__ static int raw_tile(int warp, int half) { return warp + half * kBoxTiles; }

  template <int kTokens>
  __device__ void epilogue(const GemmItem& item, int warp, int g, int t, int,
                           const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int column = (item.first_n + warp) * kTileRows + g;
    const bool there = column < columns;
    const int64_t bias_at = int64_t{item.matrix} * columns + column;
    const float gate_bias = there && op.gate_bias != nullptr ? op.gate_bias[bias_at] : 0.0f;
    const float up_bias = there && op.up_bias != nullptr ? op.up_bias[bias_at] : 0.0f;
    if (op.act.data == nullptr) return store_float<kTokens>(item, column, t, gate_bias, up_bias, sum);
    if (op.activation.clamped) return store_bf16<kTokens, true>(item, warp, g, t, gate_bias, up_bias, sum);
    store_bf16<kTokens, false>(item, warp, g, t, gate_bias, up_bias, sum);
  }
  template <int kTokens, bool kClamped>
  __device__ void store_bf16(const GemmItem& item, int warp, int g, int t, float gate_bias, float up_bias,
                             const float (&sum)[kTokens / 2]) const {
    const auto columns = static_cast<int32_t>(op.gate.rows);
    const int column = (item.first_n + warp) * kTileRows + g;
    const bool there = column < columns;
    const float alpha = op.activation.alpha, limit = op.activation.limit;
    // Straight into the operand of down, whose rows are in the same order. A lane and its neighbour of the
    // next row exchange tokens, so that each has two columns of one. Columns past the last are zeros.
    const bool odd = g % 2 == 1;
    const uint32_t byte =
        column_position(op.act_weights, static_cast<uint32_t>(warp * kTileRows + g - (odd ? 1 : 0))) * 2;
    uint8_t* tile =
        op.act.data +
        (int64_t{item.first_tile} * packed_k_steps(columns) + column / kKStepColumns) * kWgmmaTileBytes;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      float a = activate_as<kClamped>(alpha, limit, sum[4 * j] + gate_bias, sum[4 * j + 2] + up_bias);
      float b = activate_as<kClamped>(alpha, limit, sum[4 * j + 1] + gate_bias, sum[4 * j + 3] + up_bias);
      if (!there) a = b = 0.0f;
      const float other = __shfl_xor_sync(kAllLanes, odd ? a : b, 4);
      const uint32_t token = static_cast<uint32_t>(8 * j + 2 * t) + (odd ? 1u : 0u), row = token % kWgmmaRows;
      uint8_t* to = tile + (token >= kWgmmaRows ? int64_t{packed_k_steps(columns)} * kWgmmaTileBytes : 0);
      *reinterpret_cast<uint32_t*>(to + ptx::swizzled(row, byte)) =
          odd ? bf16_pair(other, b) : bf16_pair(a, other);
    }
  }
  template <int kTokens>
  __device__ void store_float(const GemmItem& item, int column, int t, float gate_bias, float up_bias,
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

}  // namespace millrace::cuda
