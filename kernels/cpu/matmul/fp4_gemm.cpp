// A task is 256 x 256 outputs, or of 64 columns where threads would have nothing to do. A chunk of both
// operands at a time is widened to floats, every value of which is exact, and multiplied as in
// dense_gemm.cpp; where there are tiles (AMX) the values go on to them as bf16, which are exact too.
#include "kernels/cpu/matmul/fp4_gemm.h"

#include <algorithm>

#include "base/float_bits.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kFp4Rows = 256, kFp4Parts = 4, kFp4Depth = 128, kFp4TileDepth = 512;
constexpr int64_t kStagedRows = 64;  // that are widened before they are packed
constexpr int64_t kFp4PartSums = kFp4Rows * kDenseLanes;

struct Fp4Scratch {
  float *a, *b, *rows, *sums;
  uint16_t* halves;
};
Fp4Scratch take_fp4_scratch(Arena& arena) {
  Fp4Scratch s{};
  s.a = arena.take<float>(kFp4Rows * kFp4TileDepth / 2);  // tiles of bf16; floats of a chunk need no more
  s.b = arena.take<float>(kFp4TileDepth * kDenseLanes / 2);
  s.rows = arena.take<float>(kStagedRows * kFp4TileDepth);
  s.sums = arena.take<float>(kFp4Parts * kFp4PartSums);
  s.halves = arena.take<uint16_t>(kStagedRows * kFp4TileDepth);
  return s;
}

struct Fp4Operand {
  const uint8_t *codes, *scales;  // [rows][k / 2], [rows][k / block]
};

struct Fp4Tile {
  const Context& on;
  const mr_fp4_gemm_args& args;
  const Fp4Scratch& scratch;
  int64_t row, column, rows, columns;  // of the sums: [part of 64 columns][256 rows][64]

  int64_t block() const { return args.format == MR_LOWBIT_NVFP4 ? 16 : 32; }
  Fp4Operand a() const {
    return {static_cast<const uint8_t*>(args.a), static_cast<const uint8_t*>(args.a_scales)};
  }
  Fp4Operand b() const {
    return {static_cast<const uint8_t*>(args.b), static_cast<const uint8_t*>(args.b_scales)};
  }
  int64_t parts() const { return (columns + kDenseLanes - 1) / kDenseLanes; }
  int64_t part_columns(int64_t part) const {
    return std::min<int64_t>(kDenseLanes, columns - part * kDenseLanes);
  }
  // Columns k to k + count of some rows, both multiples of the block, to [rows][stride].
  void widen(const Fp4Operand& from, int64_t first, int64_t some, int64_t k, int64_t count, float* to,
             int64_t stride) const {
    float scales[kFp4TileDepth / 16];
    for (int64_t r = 0; r < some; ++r) {
      const uint8_t* stored = from.scales + (first + r) * (args.k / block()) + k / block();
      for (int64_t i = 0; i < count / block(); ++i)
        scales[i] = block() == 16 ? to_float(Fp8E4M3{stored[i]}) : to_float(E8M0{stored[i]});
      on.kernels.fp4_widen(from.codes + (first + r) * (args.k / 2) + k / 2, scales, block(), count,
                           to + r * stride);
    }
  }
  void run() const {
    if (args.k == 0) std::fill_n(scratch.sums, kFp4Parts * kFp4PartSums, 0.0f);
    if (on.kernels.dense_tiles != nullptr) return run_tiles();
    for (int64_t k = 0; k < args.k; k += kFp4Depth) {
      const int64_t depth = std::min(kFp4Depth, args.k - k);
      widen(a(), row, rows, k, depth, scratch.a, kFp4Depth);
      for (int64_t part = 0; part < parts(); ++part) {
        const int64_t count = part_columns(part);
        widen(b(), column + part * kDenseLanes, count, k, depth, scratch.rows, kFp4Depth);
        if (count < kDenseLanes) std::fill_n(scratch.b, depth * kDenseLanes, 0.0f);
        on.kernels.dense_transpose({DenseElement::kF32, reinterpret_cast<const uint8_t*>(scratch.rows),
                                    kFp4Depth * 4, count, depth, scratch.b});
        on.kernels.dense_panel({scratch.a, kFp4Depth, 1, scratch.b, scratch.sums + part * kFp4PartSums, rows,
                                depth, (count + 31) / 32 * 32, k > 0});
      }
    }
  }
  void run_tiles() const {
    constexpr int64_t kGroup = kFp4TileDepth * 2 * kTileHeight;  // bytes
    const DenseTileKernels& tiles = *on.kernels.dense_tiles;
    auto *const of_a = reinterpret_cast<uint8_t*>(scratch.a), *const of_b =
                                                                  reinterpret_cast<uint8_t*>(scratch.b);
    for (int64_t k = 0; k < args.k; k += kFp4TileDepth) {
      const int64_t depth = std::min(kFp4TileDepth, args.k - k),
                    deep = (2 * depth + kDenseTileDepth - 1) / kDenseTileDepth;
      for (int64_t r = 0; r < rows; r += kStagedRows) {
        const int64_t some = std::min(kStagedRows, rows - r);
        tiles.rows(staged(a(), row + r, some, k, depth, of_a + r / kTileHeight * kGroup));
      }
      for (int64_t part = 0; part < parts(); ++part) {
        const int64_t count = part_columns(part);
        tiles.columns(staged(b(), column + part * kDenseLanes, count, k, depth, of_b));
        tiles.products(
            {of_a, of_b, kGroup, rows, count, deep, scratch.sums + part * kFp4PartSums, k > 0, false});
      }
    }
  }
  // At most kStagedRows rows as bf16.
  DenseTileOperand staged(const Fp4Operand& from, int64_t first, int64_t some, int64_t k, int64_t depth,
                          uint8_t* to) const {
    widen(from, first, some, k, depth, scratch.rows, depth);
    on.kernels.dense_narrow(DenseElement::kBF16, scratch.rows, some * depth, scratch.halves);
    return {reinterpret_cast<const uint8_t*>(scratch.halves),
            2 * depth,
            true,
            2,
            some,
            depth,
            to,
            kFp4TileDepth * 2 * kTileHeight,
            0};
  }
  void store() const {
    const DenseElement type = args.out_type == MR_F32    ? DenseElement::kF32
                              : args.out_type == MR_BF16 ? DenseElement::kBF16
                                                         : DenseElement::kF16;
    const int64_t bytes = args.out_type == MR_F32 ? 4 : 2;
    for (int64_t part = 0; part < parts(); ++part) {
      const int64_t count = part_columns(part), first = column + part * kDenseLanes;
      for (int64_t r = 0; r < rows; ++r) {
        float* const y = scratch.sums + part * kFp4PartSums + r * kDenseLanes;
        for (int64_t c = 0; c < count; ++c) y[c] *= args.alpha;
        on.kernels.dense_narrow(type, y, count,
                                static_cast<uint8_t*>(args.c) + ((row + r) * args.ldc + first) * bytes);
      }
    }
  }
};

}  // namespace

size_t fp4_gemm_workspace_bytes(int threads) {
  Arena arena(nullptr);
  for (int t = 0; t < threads; ++t) take_fp4_scratch(arena);
  return arena.used();
}

void fp4_gemm(const Context& on, const mr_fp4_gemm_args& args, void* workspace) {
  Arena one(nullptr);
  take_fp4_scratch(one);
  constexpr int64_t kWide = kFp4Parts * kDenseLanes, kTilesEach = 4;
  const int64_t down = (args.m + kFp4Rows - 1) / kFp4Rows;
  const bool enough = (args.n + kWide - 1) / kWide * down >= kTilesEach * on.pool.size();
  const int64_t width = on.pool.size() == 1 || enough ? kWide : kDenseLanes,
                across = (args.n + width - 1) / width;
  on.pool.parallel_for(down * across, 1, [&](int64_t begin, int64_t end, int thread) {
    Arena arena(static_cast<uint8_t*>(workspace) + static_cast<size_t>(thread) * one.used());
    const Fp4Scratch scratch = take_fp4_scratch(arena);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across * kFp4Rows, column = i % across * width;
      const Fp4Tile tile{
          on, args, scratch, row, column, std::min(kFp4Rows, args.m - row), std::min(width, args.n - column)};
      tile.run();
      tile.store();
    }
  });
}

}  // namespace millrace::cpu
