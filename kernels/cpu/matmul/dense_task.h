// What a product of plain matrices hands to the kernels of an instruction set (dense_panel.h, dense_pack.h,
// dense_dots.h, dense_amx.h).
#pragma once

#include <stdint.h>

namespace millrace::cpu {

inline constexpr int kDenseLanes = 64;

enum class DenseElement { kF32, kF16, kBF16, kE4M3, kE5M2, kI8 };

// C[rows][64] (+)= sum over `depth` of A and B[depth][64]. lanes: columns that count, rounded up to 32.
struct DensePanel {
  const float* a;
  int64_t a_row_stride, a_k_stride;
  const float* b;
  float* c;
  int64_t rows, depth, lanes;
  bool add;  // else C is overwritten
};

// to[depth][64] = `columns` rows of `depth` elements, `stride` bytes apart, transposed. Columns behind the
// last of its sixteen are left alone, those up to there become zero.
struct DenseTranspose {
  DenseElement type;
  const uint8_t* from;
  int64_t stride, columns, depth;
  float* to;
};

// sums (+)= a few rows of floats x[rows][depth] times B [depth][columns], or [columns][depth] transposed, as
// it lies; `stride` bytes between its rows. Sums lie [columns / 64][sums_stride floats] of [rows][64]; those
// of whole sixteens of columns are written.
inline constexpr int64_t kDenseFewRows = 8;
struct DenseFew {
  DenseElement type;  // of B
  bool transposed;
  const uint8_t* b;
  int64_t stride, columns, depth;
  const float* x;
  int64_t x_stride, rows;
  float* sums;
  int64_t sums_stride;
  bool add;
};

// sums[rows][64] (int32) += a[rows][depth] times b[depth / 4][64][4]: bytes with signs, depth in whole fours.
// Exact as long as a sum is.
struct DenseDots {
  const int8_t* a;
  int64_t a_stride;
  const uint8_t* b;
  const int32_t* a_sums;  // [rows]: of the codes of a
  int32_t* sums;
  int64_t rows, depth;
};

// ---- by tiles of the AMX unit: bf16, and int8. A tile is 16 rows or columns of the product by 64 bytes of
// k: rows as [16][64 bytes], columns as [16 dwords of k][16 columns].
inline constexpr int64_t kDenseTileBytes = 1024, kDenseTileDepth = 64;  // bytes of k

// A chunk of an operand to tiles [groups of sixteen][depth / tile]; what is behind its last row or column,
// and behind its depth, becomes zero.
struct DenseTileOperand {
  const uint8_t* from;
  int64_t stride;  // bytes between stored rows
  bool along_k;    // these go along k; else k goes from row to row
  int64_t element_bytes;
  int64_t outer, depth;  // rows or columns of the product; elements of k
  uint8_t* to;
  int64_t group_bytes;  // between groups
  int64_t ahead;        // bytes from an element to what is prefetched while it is packed; 0: nothing
};

// sums[rows][64] (float32; of int8: int32) (+)= a times b, both in tiles. Of more than sixteen rows whole
// sixteens are written.
struct DenseTiles {
  const uint8_t* a;
  const uint8_t* b;
  int64_t group_bytes;           // of both
  int64_t rows, columns, tiles;  // tiles: of k
  void* sums;
  bool add, int8;
};

}  // namespace millrace::cpu
