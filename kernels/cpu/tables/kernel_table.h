// KernelTable: the inner loops of the CPU kernels as plain function pointers, one table per instruction set,
// chosen once at start (features.h). Nothing above this header knows an instruction.
//
// Same bits. Every table computes the same numbers, bit for bit (same_bits_test.cpp compares them), but for
// the last two points:
//   - A sum over float products has 16 lanes, lane j takes the elements i = j mod 16 in order, each by a
//     fused multiply-add; the lanes are then added as a tree: 8 pairs (j, j + 8), 4 pairs (j, j + 4),
//     (j, j + 2), (0, 1).
//   - Block-quantized weights are multiplied with activations quantized to int8 per 32 values. The sum over a
//     block is an integer and exact in any order; a block then adds one fma per output,
//     acc = fma(float(isum), d_w * d_x, acc), and, for types with a minimum, a second one,
//     acc = fma(m_w, d_x * float(sum of the block's codes), acc), block by block in order. So the order of
//     float operations does not depend on the width of a vector. Q2_K's minimums are products of their own,
//     added at the end (matmul/sum_of_products.h).
//   - Attention: scores are sums over the head's dimensions in order, one lane per token of a 16-token block.
//     Over an int8 cache they are sums of integers, exact in any order (attention/paged_int8.h).
//   - exp is a polynomial of our own in fused multiply-adds; division and square root are IEEE's.
//   - Formats with a bf16_tile_matmul (MXFP4 in `amx`, nowhere else) are multiplied with activations whose
//     scales are powers of two. Then every factor is an integer times a power of two, exact in bf16, a
//     block's sum is exact in any order in float32, and acc = fma(float(isum), d_w * d_x, acc) is one rounded
//     addition of it: what a bf16 tile does when it sums over all columns. So int8 kernels (GEMV) and bf16
//     tiles (GEMM) give the same bits, as long as nothing is subnormal: activations below 2^-60 count as
//     zero. Such products have bits of their own, different from those of the other tables.
//   - Attention over a BF16 cache with heads of a multiple of 32 dimensions goes through bf16 tiles in `amx`
//     (attention/paged_amx.h): queries and weights as two bf16 numbers each, sums in the tiles' order.
// An output depends on its row of weights and its row of activations only, never on the tile it was computed
// in: for a given table the bits are the same for any batch, chunking and number of threads.
//
// How wider units fit in. An entry of `matmul` owns its tile: AVX-512 VNNI (16 outputs of one column of 16
// rows) and AMX (16 x 16 outputs per tile) implement the same signature with bigger tiles
// (docs/kernels/x86_matmul.md), and so does i8mm (smmla: 2 x 2 outputs per instruction).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/flash_task.h"
#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/matmul/lowbit_task.h"
#include "kernels/cpu/state/state_task.h"
#include "kernels/cpu/state/wkv7_task.h"
#include "kernels/cpu/tables/fused_kernels.h"

namespace millrace::cpu {

// One kernel per weight type. The order is the table's and nothing else's.
enum class Format : int {
  kF32,
  kF16,
  kBF16,  // float activations
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kMXFP4,
  kMXFP4Split,
  kQ4_Z,
  kIQ4_NL,
  kIQ4_XS,
  kQ3_K,
  kQ2_K,  // int8 activations
  // The same with interleaved_rows rows interleaved (matmul/interleave_rows.h), with kernels where that is
  // faster: they are null elsewhere.
  kInterleavedQ4_K,
  kInterleavedQ5_K,
  kInterleavedQ6_K,
  kInterleavedQ8_0,
  kInterleavedQ4_0,
  kInterleavedQ4_1,
  kInterleavedQ5_0,
  kInterleavedQ5_1,
  kInterleavedQ4_Z,
  kInterleavedMXFP4,
  kCount,
};

// The lanes of every float sum, and the tokens of a KV block.
inline constexpr int kLanes = 16;
inline constexpr int kQuantBlock = 32;

// The M blocking: how many activation rows a caller multiplies at most when the outputs go to a buffer of its
// own: 256 rows of 128 outputs are 128 KiB. A table says how many of them share a pass over the weights
// (rows_per_pass).
inline constexpr int64_t kMaxRowsPerPass = 256;

// 32 activations: x = scale * q.
struct ActivationBlock {
  float scale;  // amax / 127
  int32_t sum;  // of q, for weights with an offset or a minimum
  int8_t q[kQuantBlock];
};
static_assert(sizeof(ActivationBlock) == 40);

// Sixteen rows of 32 activations side by side, as the int8 tiles of AMX read them: a group of 16 rows has a
// tile for each 32 columns, and the last group is as large as the others. As many bytes as sixteen blocks.
inline constexpr int64_t kTileHeight = 16;
struct alignas(64) Int8Tile {
  int8_t codes[kTileHeight][kQuantBlock];
  float scale[kTileHeight];
  float scaled_sum[kTileHeight];  // scale * (sum of the codes), for weights with a minimum
};
static_assert(sizeof(Int8Tile) == kTileHeight * sizeof(ActivationBlock));

// Rows of weights [rows, cols] where they lie.
struct MatrixView {
  const uint8_t* data;
  int64_t row_bytes;      // between rows
  const uint8_t* scales;  // kMXFP4Split: e8m0, one per 32
  int64_t scale_row_bytes;
  int64_t cols;
};

// What a format's kernel reads: float32 [cols]; ActivationBlock [cols / 32], or the same as int8 tiles;
// ActivationBlock with scales that are powers of two, or these as bf16 tiles.
enum class ActivationFormat { kFloat32, kInt8Blocks, kInt8Tiles, kPow2Blocks, kBf16Tiles };

// Up to so many rows of a step are multiplied as blocks where a table also has tiles.
inline constexpr int64_t kMaxRowsAsBlocks = 16;

// Bf16 tiles: rows in groups of up to 16, all of the same height but the last, which has what is left; a
// group lies [cols / 32][its rows][32] bf16, columns within 32 in the table's own order. So `rows` rows are
// rows * cols values whatever their groups, and a panel may be cut between groups. The time of a product of
// tiles grows with the rows of activations, so groups of a panel that nobody cuts are as even as can be: 57
// rows are 15, 15, 15, 12. A kernel may load a whole group where fewer rows are left: kTileSlackBytes behind
// the last row must be readable.
inline constexpr int64_t kTileSlackBytes = 1024;
inline int64_t bf16_tile_height(int64_t rows) {
  if (rows > kMaxRowsPerPass) return kTileHeight;
  const int64_t groups = (rows + kTileHeight - 1) / kTileHeight;
  return groups == 0 ? kTileHeight : (rows + groups - 1) / groups;
}
struct Bf16TileRow {
  uint16_t* at;
  int64_t group, height;  // its group's first row, and rows
};
inline Bf16TileRow bf16_tile_row(uint16_t* panel, int64_t rows, int64_t cols, int64_t row,
                                 int64_t block = 0) {
  const int64_t full = bf16_tile_height(rows), group = row / full * full;
  const int64_t height = rows - group < full ? rows - group : full;
  return {panel + group * cols + (block * height + row - group) * kQuantBlock, group, height};
}

// GEMV is bound by memory: what the thread multiplies next is prefetched while it is busy with its last rows,
// and a product whose first rows were prefetched so need not do it itself.
struct PrefetchHint {
  const uint8_t* next = nullptr;  // weights of the thread's next product
  int64_t bytes = 0;
  bool done = false;  // this product's first rows were prefetched by the one before it
};

// Rows of activations; row_bytes of tiles is what a row takes on average, cols * 2 (bf16) and cols / 32 * 40
// (int8), and they have no index.
struct Panel {
  const uint8_t* data;
  int64_t row_bytes;
  const int32_t* index;  // row m of the product is row index[m] here; absent: row m
  PrefetchHint prefetch = {};
  int64_t height = kTileHeight;  // of the groups of tiles
};

// out[m * out_stride + r] = sum_c w[first + r][c] x[m][c] for r < num_rows, m < num_m.
using MatmulFn = void (*)(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                          float* out, int64_t out_stride);

enum class KvType : int {
  kF32,
  kF16,
  kBF16,
  kInt8,
  kFp8,
  kCount
};  // kernels/quant/kv_types.h has the last two

// Online softmax takes a tile of keys at a time, so that the accumulator is rescaled once per tile; splits of
// the context (split-KV) are what is combined. Both are counted from position 0 of the sequence, whatever
// part of it a step computes.
inline constexpr int32_t kTileTokens = 64;
inline constexpr int32_t kSplitTokens = 512;

// `rows` queries that read the same head of keys and values over one split of the context. Leaves, per row,
// row_max (of the scores), row_sum (of exp(score - row_max)) and acc, the values so weighted; rows that see
// nothing are left alone. Keys lie transposed, [head_dim][16], so that a vector holds one dimension of a
// block's 16 tokens; values lie [16][head_dim]; kFp8 keeps e8m0 scales [16] before either. kInt8:
// attention/paged_int8.h.
struct AttentionSplit {
  const uint8_t* pool;  // the group's blocks
  int64_t block_bytes;
  const int32_t* table;              // logical block -> block
  int64_t key_offset, value_offset;  // of this layer and head, bytes into a block
  int64_t head_bytes;                // of one head's keys, or values, in a block
  int32_t head_dim, padded_dim;      // padded_dim: rounded up to kLanes
  int32_t rows;
  const float* const* query;                   // [rows] -> [head_dim]
  const ActivationBlock* const* query_blocks;  // the same for kInt8: [rows] -> [head_dim / 32]
  const int32_t* first;  // [rows]: positions [first, last) are seen, already cut to this split
  const int32_t* last;
  float scale;
  float softcap = 0.0f;  // scores become softcap * tanh(score / softcap); 0: they stay
  float* row_max;        // [rows]
  float* row_sum;        // [rows]
  float* acc;            // [rows][padded_dim]
  float* scores;         // scratch: [rows][kTileTokens + kLanes]
  // Values are the keys (latent attention): scratch for those of a tile, [kTileTokens][head_dim], with kLanes
  // more behind them; absent: values lie at value_offset.
  float* shared_values = nullptr;
  // Blocks of the first two tiles that this thread attends to next, moved so that these offsets lead to their
  // head; and whether this split's first tiles were prefetched so.
  const uint8_t* next_blocks[2 * kTileTokens / kLanes] = {};
  bool prefetched = false;
  // Neighbouring heads that a thread attends to together, tile by tile, so that it reads longer runs: all of
  // the above is the first one's, and those of the next lie head_bytes, `rows` queries, `head_rows` rows of
  // results and `rows` rows of scores further.
  int32_t heads = 1;
  int64_t head_rows = 0;
};
inline constexpr int32_t kMaxHeads = 8;  // of a split
using AttentionFn = void (*)(const AttentionSplit& split);

// Bounds of scores on pages (attention/page_scores.h), for the query rows that share a KV head:
// out[r][p] = scale * sum_d (above[r][d] largest[p][d] + below[r][d] least[p][d]) for pages [first, last).
struct PageScores {
  const uint16_t* summaries;  // block b: [least, largest][padded_dim] in bf16, b * block_stride further on
  int64_t block_stride;
  const int32_t* table;  // page -> block
  int32_t first, last;
  int32_t rows, padded_dim;
  const float *above, *below;  // [rows][padded_dim]: the queries, and 0 where they are below or above it
  float scale;
  float* out;
  int64_t out_stride;
};
using PageScoresFn = void (*)(const PageScores& scores);

// What an indexer's queries of one token make of the 16 tokens of a page (attention/index_scores.h):
// out[t] = sum_h weights[h] * max(0, sum_d query[h][d] keys[d][t])
struct IndexScores {
  const float* keys;  // [dim][16]
  int32_t heads, dim;
  const float *query, *weights;  // [heads][dim], [heads]
  float* out;                    // [16]
};
using IndexScoresFn = void (*)(const IndexScores& scores);

// Products of bf16, of int8 and of bf16 with four-bit weights by tiles (matmul/dense_task.h).
struct DenseTileKernels {
  void (*rows)(const DenseTileOperand& operand);     // to [16 rows][64 bytes of k]
  void (*columns)(const DenseTileOperand& operand);  // to [16 dwords of k][16 columns]
  void (*products)(const DenseTiles& product);
  // The first columns, whole sixteens, of a unit of weights to tiles of columns: its rows are four groups.
  void (*weights)(LowbitFormat format, const uint8_t* unit, int64_t columns, uint8_t* to,
                  int64_t group_bytes);
  // One row by vectors, with the bits of tiles.
  void (*one_row)(const LowbitRows& product);
  // The same of a few rows of bf16 and a matrix of bf16 whose rows are those of k.
  void (*few)(const DenseFew& product);
};

struct KernelTable {
  const char* name;
  MatmulFn matmul[static_cast<int>(Format::kCount)];
  AttentionFn attention[static_cast<int>(KvType::kCount)];
  PageScoresFn page_scores;
  IndexScoresFn index_scores;

  // Activations [cols] -> ActivationBlock [cols / 32]; cols is a multiple of 32.
  void (*quantize_int8)(const float* x, int64_t cols, ActivationBlock* out);
  // y = x / sqrt(mean(x^2) + eps) * weight; weight may be absent. y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* y);
  // y = silu(gate) * up
  void (*silu_mul)(const float* gate, const float* up, int64_t size, float* y);
  // gpt-oss: g = min(gate, limit), u = clamp(up, +-limit); y = g * sigmoid(alpha g) * (u + 1)
  void (*clamped_swiglu)(const float* gate, const float* up, float alpha, float limit, int64_t size,
                         float* y);
  // y = y * a + x * b, the second product fused
  void (*scale_add)(float* y, float a, const float* x, float b, int64_t size);
  // y[i] = exp(x[i])
  void (*exp)(const float* x, int64_t size, float* y);
  // y = (x - mean) / sqrt(variance + eps) * weight + bias; bias may be absent. y may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t size,
                     float* y);
  // y = GELU(x), by erf and by tanh; y = a * b; y = cap * tanh(x / cap). y may be an input.
  void (*gelu)(const float* x, int64_t size, float* y);
  void (*gelu_tanh)(const float* x, int64_t size, float* y);
  void (*multiply)(const float* a, const float* b, int64_t size, float* y);
  void (*softcap)(const float* x, float cap, int64_t size, float* y);
  // Rows of the fused operations, of F32, F16 and BF16, forward and backward.
  FusedKernels fused;

  // Attention over tensors (attention/flash_task.h): a tile of query rows forward; backward its delta and its
  // dQ, and dK and dV of a tile of keys. An output is one chain of fused multiply-adds in order: same bits.
  FlashFn flash_forward, flash_delta, flash_backward_queries, flash_backward_keys;
  // Partials of chunks in memory: merged, and finished as a tensor (attention/flash_chunks.h).
  FlashMergeFn flash_merge_rows;
  FlashFinishFn flash_finish_rows;

  // Products of plain matrices (matmul/dense_task.h): two panels of floats; a few rows; elements of a type as
  // floats, in order and transposed, and floats as elements.
  void (*dense_panel)(const DensePanel& panel);
  void (*dense_few)(const DenseFew& product);
  void (*dense_widen)(DenseElement type, const void* from, int64_t count, float* to);
  void (*dense_transpose)(const DenseTranspose& operand);
  void (*dense_narrow)(DenseElement type, const float* from, int64_t count, void* to);
  void (*dense_multiply_add)(const float* a, const float* b, int64_t count, float* y);  // fused
  // Units of four-bit weights (matmul/lowbit_task.h): by a few rows; the first columns to [columns][64].
  void (*lowbit_rows)(const LowbitRows& product);
  void (*lowbit_widen)(LowbitFormat format, const uint8_t* unit, int64_t columns, float* to);
  // e2m1 codes of a row, two a byte, times a scale for every `block`; counts are whole sixteens.
  void (*fp4_widen)(const uint8_t* codes, const float* scales, int64_t block, int64_t count, float* to);

  // Layers with a state (state/state_task.h).
  StateChunkFn state_chunk;
  ShortConvFn short_conv;
  Wkv7ChunkFn wkv7_chunk;  // state/wkv7_task.h

  // Activation rows that share one pass over a chunk of weights: 64 rows of 2,880 int8 codes are 225 KiB,
  // within the second-level cache of every machine we know. A table that repacks weights wants as many as
  // there are.
  int64_t rows_per_pass = 64;

  // Rows of weights that lie together in interleaved formats; 0: the table has none.
  int64_t interleaved_rows = 0;

  // GEMM over activations in int8 tiles, the same numbers as `matmul` gives; and activations [cols] to row
  // `row` of the tiles [cols / 32] of a group of `height` rows.
  MatmulFn int8_tile_matmul[static_cast<int>(Format::kCount)] = {};
  void (*quantize_int8_tile)(const float* x, int64_t cols, Int8Tile* tiles, int64_t row,
                             int64_t height) = nullptr;

  // Products of plain matrices of int8, where the processor multiplies bytes with signs.
  void (*dense_dots)(const DenseDots& product) = nullptr;

  // Where there are tiles; bf16 then has bits of its own, for any number of rows.
  const DenseTileKernels* dense_tiles = nullptr;

  // KV heads of a cache of each type that a thread attends to together where a context is split over threads.
  int32_t heads_per_split[static_cast<int>(KvType::kCount)] = {1, 1, 1, 1, 1};
  constexpr void set_heads_per_split(KvType type, int32_t heads) {
    heads_per_split[static_cast<int>(type)] = heads;
  }

  // For formats whose scales are powers of two: GEMM with bf16 tiles; `matmul` then takes kPow2Blocks.
  MatmulFn bf16_tile_matmul[static_cast<int>(Format::kCount)] = {};
  // Activations [cols] -> ActivationBlock [cols / 32] with scales that are powers of two; and the same
  // numbers as a row of bf16 tiles, to their places in a group of `height` rows. cols is a multiple of 32.
  void (*quantize_pow2)(const float* x, int64_t cols, ActivationBlock* out) = nullptr;
  void (*quantize_bf16_tile)(const float* x, int64_t cols, uint16_t* to, int64_t height) = nullptr;
  // All rows of a group at once.
  void (*quantize_bf16_tile_group)(const float* const* rows, int64_t height, int64_t cols,
                                   uint16_t* to) = nullptr;

  // y[i] = log(1 + exp(x[i] + bias[i])), as the C library's doubles round to (state/gates.h); bias may be
  // absent.
  void (*softplus)(const float* x, const float* bias, int64_t size, float* y) = nullptr;

  // What a product of a step of `rows` rows reads. Int8 tiles are no choice where rows are picked by an
  // index.
  ActivationFormat activations(Format format, int64_t rows, bool indexed = false) const {
    if (format <= Format::kBF16) return ActivationFormat::kFloat32;
    if (bf16_tile_matmul[static_cast<int>(format)] == nullptr) {
      const bool tiles =
          int8_tile_matmul[static_cast<int>(format)] != nullptr && rows > kMaxRowsAsBlocks && !indexed;
      return tiles ? ActivationFormat::kInt8Tiles : ActivationFormat::kInt8Blocks;
    }
    return rows <= kMaxRowsAsBlocks ? ActivationFormat::kPow2Blocks : ActivationFormat::kBf16Tiles;
  }
};

}  // namespace millrace::cpu
