// KernelTable: the inner loops of the cpu backend as plain function pointers, one table per instruction set,
// chosen once at start (features.h). Nothing above this header knows an instruction.
//
// Same bits. Every table computes the same numbers, bit for bit (same_bits_test.cpp compares them), but for
// the last two points:
//   - A sum over float products has 16 lanes, lane j takes the elements i = j mod 16 in order, each by a
//     fused multiply-add; the lanes are then added as a tree: 8 pairs (j, j + 8), 4 pairs (j, j + 4),
//     (j, j + 2), (0, 1).
//   - Block-quantized weights meet activations quantized to int8 per 32 values. The sum over a block is an
//     integer and exact in any order; a block then adds one fma per output,
//     acc = fma(float(isum), d_w * d_x, acc), and, for types with a minimum, a second one,
//     acc = fma(m_w, d_x * float(sum of the block's codes), acc), block by block in order. So the order of
//     float operations does not depend on the width of a vector.
//   - Attention: scores are sums over the head's dimensions in order, one lane per token of a 16-token block.
//     Over an int8 cache they are sums of integers, exact in any order (kernels_attention_int8.h).
//   - exp is a polynomial of our own in fused multiply-adds; division and square root are IEEE's.
//   - Formats with a tile_matmul (MXFP4 in `amx`, nowhere else) meet activations whose scales are powers of
//     two. Then everything that is multiplied is an integer times a power of two, exact in bf16, a block's
//     sum is exact in any order in float32, and acc = fma(float(isum), d_w * d_x, acc) is one rounded
//     addition of it: what a bf16 tile does when it sums over all columns. So int8 kernels (few rows) and
//     bf16 tiles (many) give the same bits, as long as nothing is subnormal: activations below 2^-60 count as
//     zero. Such products have bits of their own, different from those of the other tables.
//   - Attention over a BF16 cache with heads of a multiple of 32 dimensions goes through bf16 tiles in `amx`
//     (kernels_attention_amx.h): queries and weights as two bf16 numbers each, sums in the tiles' order.
// An output depends on its row of weights and its row of activations only, never on the tile it was computed
// in: for a given table the bits are the same for any batch, chunking and number of threads.
//
// How wider units fit in. An entry of `matmul` owns its tile: AVX-512 VNNI (16 outputs of one column of 16
// rows) and AMX (16 x 16 outputs per tile) implement the same signature with bigger tiles
// (docs/kernels/x86_matmul.md), and so does i8mm (smmla: 2 x 2 outputs per instruction).
#pragma once

#include <cstddef>
#include <cstdint>

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
  kQ4_Z,  // int8 activations
  // The same packed by fours of rows (pack_rows.h), with kernels where that is faster: they are null
  // elsewhere.
  kPackedQ4_K,
  kPackedQ5_K,
  kPackedQ6_K,
  kCount,
};

// The lanes of every float sum, and the tokens of a KV block.
inline constexpr int kLanes = 16;
inline constexpr int kQuantBlock = 32;

// How many activation rows a caller multiplies at most when the outputs go to a buffer of its own: 256 rows
// of 128 outputs are 128 KiB. A table says how many of them share a pass over the weights (pass_rows).
inline constexpr int64_t kRowsPerPass = 256;

// 32 activations: x = scale * q.
struct ActivationBlock {
  float scale;  // amax / 127
  int32_t sum;  // of q, for weights with an offset or a minimum
  int8_t q[kQuantBlock];
};
static_assert(sizeof(ActivationBlock) == 40);

// Sixteen rows of 32 activations side by side, for the int8 tiles of AMX: a group of 16 rows is a cell for
// each 32 columns, and the last group is as large as the others. As many bytes as sixteen blocks.
inline constexpr int64_t kTileHeight = 16;
struct alignas(64) ActivationCell {
  int8_t codes[kTileHeight][kQuantBlock];
  float d[kTileHeight];    // scales
  float sum[kTileHeight];  // scale * (sum of the codes), for weights with a minimum
};
static_assert(sizeof(ActivationCell) == kTileHeight * sizeof(ActivationBlock));

// Rows of weights [rows, cols] where they lie.
struct MatrixView {
  const uint8_t* data;
  int64_t row_bytes;      // between rows
  const uint8_t* scales;  // kMXFP4Split: e8m0, one per 32
  int64_t scale_row_bytes;
  int64_t cols;
};

// What a format's kernel reads: float32 [cols], ActivationBlock [cols / 32] or the same as cells,
// ActivationBlock with scales that are powers of two, or these as bf16 tiles.
enum class Activations { kFloat, kBlocks, kCells, kBinaryBlocks, kTiles };

// Up to so many rows of a step are multiplied as blocks where a table also has tiles or cells.
inline constexpr int64_t kBinaryRows = 16;

// Tiles: rows in groups of up to 16, all of the same height but the last, which has what is left; a group
// lies [cols / 32][its rows][32] bf16, columns within 32 in the table's own order. So `rows` rows are rows *
// cols values whatever their groups, and a panel may be cut between groups. What a product of tiles takes
// goes with the rows of activations, so that groups of a panel that nobody cuts are as even as can be: 57
// rows are 15, 15, 15, 12. A kernel may load a whole group where fewer rows are left: kTileSlack bytes behind
// the last row must be readable.
inline constexpr int64_t kTileSlack = 1024;
inline int64_t tile_height(int64_t rows) {
  if (rows > kRowsPerPass) return kTileHeight;
  const int64_t groups = (rows + kTileHeight - 1) / kTileHeight;
  return groups == 0 ? kTileHeight : (rows + groups - 1) / groups;
}
struct TileRow {
  uint16_t* at;
  int64_t group, height;  // its group's first row, and rows
};
inline TileRow tile_row(uint16_t* panel, int64_t rows, int64_t cols, int64_t row, int64_t block = 0) {
  const int64_t most = tile_height(rows), group = row / most * most;
  const int64_t height = rows - group < most ? rows - group : most;
  return {panel + group * cols + (block * height + row - group) * kQuantBlock, group, height};
}

// Products of few rows wait for nothing but memory: what the thread multiplies afterwards is asked for while
// it is busy with its last rows, and a product whose first rows were asked for so need not ask for them.
struct Chain {
  const uint8_t* next = nullptr;  // weights
  int64_t bytes = 0;
  bool asked = false;
};

// Rows of activations; row_bytes of tiles and cells is what a row takes on average, cols * 2 and
// cols / 32 * 40, and they have no index.
struct Panel {
  const uint8_t* data;
  int64_t row_bytes;
  const int32_t* index;  // row m of the product is row index[m] here; absent: row m
  Chain chain = {};
  int64_t height = kTileHeight;  // of the groups of tiles
};

// out[m * out_stride + r] = sum_c w[first + r][c] x[m][c] for r < num_rows, m < num_m.
using MatmulFn = void (*)(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                          float* out, int64_t out_stride);

enum class KvType : int { kF32, kF16, kBF16, kInt8, kFp8, kCount };  // backend/kv_types.h has the last two

// Scores are taken a tile at a time, so that values are rescaled once per tile; spans are what is merged.
// Both are counted from position 0 of the sequence, whatever part of it a step computes.
inline constexpr int32_t kTileTokens = 64;
inline constexpr int32_t kSpanTokens = 512;

// `rows` queries that read the same head of keys and values over one span of positions. Leaves, per row, the
// largest score, the sum of exp(score - largest) and the values so weighted; rows that see nothing are left
// alone. Keys lie transposed, [head_dim][16], so that a vector holds one dimension of a block's 16 tokens;
// values lie [16][head_dim]; kFp8 keeps e8m0 scales [16] before either. kInt8: kernels_attention_int8.h.
struct AttendSpan {
  const uint8_t* pool;  // the group's blocks
  int64_t block_bytes;
  const int32_t* table;              // logical block -> block
  int64_t key_offset, value_offset;  // of this layer and head, bytes into a block
  int64_t head_bytes;                // of one head's keys, or values, in a block
  int32_t head_dim, padded_dim;      // padded_dim: rounded up to kLanes
  int32_t rows;
  const float* const* query;                   // [rows] -> [head_dim]
  const ActivationBlock* const* query_blocks;  // the same for kInt8: [rows] -> [head_dim / 32]
  const int32_t* first;  // [rows]: positions [first, last) are seen, already cut to this span
  const int32_t* last;
  float scale;
  float* largest;  // [rows]
  float* sum;      // [rows]
  float* values;   // [rows][padded_dim]
  float* scores;   // scratch: [rows][kTileTokens + kLanes]
  // Blocks of the first two tiles that this thread attends to afterwards, moved so that these offsets lead to
  // their head; and whether this span's first tiles were asked for so.
  const uint8_t* after[2 * kTileTokens / kLanes] = {};
  bool asked = false;
  // Neighbouring heads that a thread attends to together, tile by tile, so that it reads longer runs: all of
  // the above is the first one's, and those of the next lie head_bytes, `rows` queries, `head_rows` rows of
  // results and `rows` rows of scores further.
  int32_t heads = 1;
  int64_t head_rows = 0;
};
inline constexpr int32_t kMostHeads = 8;  // of them
using AttendFn = void (*)(const AttendSpan& span);

struct KernelTable {
  const char* name;
  MatmulFn matmul[static_cast<int>(Format::kCount)];
  AttendFn attend[static_cast<int>(KvType::kCount)];

  // Activations [cols] -> ActivationBlock [cols / 32]; cols is a multiple of 32.
  void (*quantize)(const float* x, int64_t cols, ActivationBlock* out);
  // y = x / sqrt(mean(x^2) + eps) * weight. y may be x.
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

  // Activation rows that share one pass over a chunk of weights: 64 rows of 2,880 int8 codes are 225 KiB,
  // within the second-level cache of every machine we know. A table that packs weights wants as many as there
  // are.
  int64_t pass_rows = 64;

  // The same numbers as `matmul` gives, of many rows of activations that lie in cells; and activations [cols]
  // to row `row` of the cells [cols / 32] of a group of `height` rows.
  MatmulFn cell_matmul[static_cast<int>(Format::kCount)] = {};
  void (*to_cells)(const float* x, int64_t cols, ActivationCell* cells, int64_t row,
                   int64_t height) = nullptr;

  // KV heads of a cache of each type that a thread attends to together where a context is shared by threads.
  int32_t attend_heads[static_cast<int>(KvType::kCount)] = {1, 1, 1, 1, 1};
  constexpr void attend_together(KvType type, int32_t heads) { attend_heads[static_cast<int>(type)] = heads; }

  // For formats of powers of two: products of many rows with bf16 tiles; `matmul` then takes binary blocks.
  MatmulFn tile_matmul[static_cast<int>(Format::kCount)] = {};
  // Activations [cols] -> ActivationBlock [cols / 32] with scales that are powers of two; and the same
  // numbers as a row of tiles, to their places in a group of `height` rows. cols is a multiple of 32.
  void (*quantize_binary)(const float* x, int64_t cols, ActivationBlock* out) = nullptr;
  void (*to_tiles)(const float* x, int64_t cols, uint16_t* to, int64_t height) = nullptr;
  // All rows of a group at once.
  void (*to_tile_group)(const float* const* rows, int64_t height, int64_t cols, uint16_t* to) = nullptr;

  // What a product of a step of `rows` rows reads. Cells are no choice where rows are picked by an index.
  Activations activations(Format format, int64_t rows, bool indexed = false) const {
    if (format <= Format::kBF16) return Activations::kFloat;
    if (tile_matmul[static_cast<int>(format)] == nullptr) {
      const bool cells = cell_matmul[static_cast<int>(format)] != nullptr && rows > kBinaryRows && !indexed;
      return cells ? Activations::kCells : Activations::kBlocks;
    }
    return rows <= kBinaryRows ? Activations::kBinaryBlocks : Activations::kTiles;
  }
};

}  // namespace millrace::cpu
