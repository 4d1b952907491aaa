// Activations in the formats that products read: float32, int8 blocks, int8 tiles, blocks with power-of-two
// scales, bf16 tiles (kernel_table.h has their layouts). Which of them a product reads depends on its
// weights' type and on the number of rows; each is made once and read by every product of the same input.
#pragma once

#include <initializer_list>

#include "kernels/cpu/context.h"
#include "kernels/cpu/matmul/weight_matrix.h"

namespace millrace::cpu {

// Those that some product reads.
struct ActivationFormats {
  bool int8_blocks = false, pow2_blocks = false, bf16_tiles = false, float32 = false, int8_tiles = false;
  bool quantized() const { return int8_blocks || int8_tiles || pow2_blocks || bf16_tiles; }
  ActivationFormats& operator|=(const ActivationFormats& other) {
    int8_blocks |= other.int8_blocks;
    pow2_blocks |= other.pow2_blocks;
    bf16_tiles |= other.bf16_tiles;
    float32 |= other.float32;
    int8_tiles |= other.int8_tiles;
    return *this;
  }
};

// indexed: rows are picked by an index.
ActivationFormats formats_for(const KernelTable& kernels, std::initializer_list<LinearWeights> weights,
                              int64_t rows, bool indexed = false);

// The input of a product.
struct ActivationRows {
  const float* values = nullptr;            // [rows][cols]; absent when no weight reads float32
  const ActivationBlock* blocks = nullptr;  // int8 blocks: [rows][cols / 32]
  int64_t cols = 0;
  const int32_t* index = nullptr;        // row m of the product is row index[m] here; absent: row m
  const Int8Tile* int8_tiles = nullptr;  // the product's rows in their order
  // For formats of powers of two, one of both: blocks [rows][cols / 32], or the product's rows in their order
  // (never by the index) as tiles.
  const ActivationBlock* pow2_blocks = nullptr;
  const uint16_t* bf16_tiles = nullptr;
  int64_t tile_height = kTileHeight;  // of the groups of bf16 tiles
  int64_t stride = 0;                 // values from one row to the next

  // The rows from `row` on, a multiple of the height where there are tiles.
  ActivationRows from(int64_t row) const {
    ActivationRows r = *this;
    if (bf16_tiles != nullptr) r.bf16_tiles += row * cols;
    if (int8_tiles != nullptr) r.int8_tiles += row / kTileHeight * (cols / kQuantBlock);
    if (index != nullptr) {
      r.index += row;
    } else {
      if (values != nullptr) r.values += row * stride;
      if (blocks != nullptr) r.blocks += row * (cols / kQuantBlock);
      if (pow2_blocks != nullptr) r.pow2_blocks += row * (cols / kQuantBlock);
    }
    return r;
  }
};

// Memory for quantized activations; what no format of the table needs may be absent.
struct QuantizedActivations {
  ActivationBlock *blocks = nullptr, *pow2_blocks = nullptr;
  uint16_t* bf16_tiles = nullptr;

  // In the memory of the blocks: a step makes one of both.
  Int8Tile* int8_tiles() const { return reinterpret_cast<Int8Tile*>(blocks); }
  // The input of a product of `count` rows, of which the formats `made` were made; stride 0: cols.
  ActivationRows rows(const float* values, int64_t count, int64_t cols, ActivationFormats made,
                      const int32_t* index = nullptr, int64_t stride = 0) const {
    return {values,
            made.int8_tiles ? nullptr : blocks,
            cols,
            index,
            made.int8_tiles ? int8_tiles() : nullptr,
            made.pow2_blocks ? pow2_blocks : nullptr,
            made.bf16_tiles ? bf16_tiles : nullptr,
            bf16_tile_height(count),
            stride == 0 ? cols : stride};
  }
};

// For `rows` rows of `cols`, every format that a table may read.
QuantizedActivations take_quantized(Arena& arena, int64_t rows, int64_t cols, bool with_bf16_tiles);

// Columns [first, first + count) of row `row` of `rows`, in the formats that were asked for. x: [count].
void quantize_activations(const KernelTable& kernels, ActivationFormats formats, const float* x,
                          int64_t first, int64_t count, int64_t row, int64_t rows, int64_t cols,
                          const QuantizedActivations& to);

// All of `values` [rows][cols], rows `stride` apart (0: cols).
ActivationRows quantize_rows(const Context& ctx, ActivationFormats formats, const float* values, int64_t rows,
                             int64_t cols, const QuantizedActivations& to, int64_t stride = 0);

// Rows of activations that are normed or quantized by one task.
int64_t activation_rows_per_task(int64_t rows, bool int8_tiles);

}  // namespace millrace::cpu
