// A task is 64 outputs of up to 256 rows of an expert. Few rows are multiplied with weights that never leave
// the registers; for more, units are widened to floats one at a time, [reduced][64 outputs], and multiplied
// as in dense_gemm.cpp. An output is the same chain of products in the same order.
//
// Where there are tiles (AMX) weights become tiles of bf16, for any number of rows, and a task is four times
// as wide where every thread has a few of them: rows of x are packed once for 256 outputs.
#include "kernels/cpu/matmul/lowbit_gemm.h"

#include <algorithm>
#include <cstring>

#include "kernels/quant/lowbit_units.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kLowbitRows = 256;
constexpr int64_t kLowbitParts = 4;       // of 64 outputs, in a task by tiles
constexpr int64_t kLowbitTileK = 512;     // of what is summed, by tiles
constexpr int64_t kLowbitFewTileK = 128;  // of few rows: packed weights stay in the first-level cache
static_assert(kLowbitUnitRows == quant::kUnitRows && kLowbitUnitColumns == quant::kUnitColumns &&
              kDenseLanes == kLowbitUnitRows && kDenseLanes == kLowbitUnitColumns / 2);

LowbitFormat lowbit_format(mr_lowbit_format format) {
  switch (format) {
    case MR_LOWBIT_MXFP4:
      return LowbitFormat::kMXFP4;
    case MR_LOWBIT_NVFP4:
      return LowbitFormat::kNVFP4;
    case MR_LOWBIT_INT4_32:
      return LowbitFormat::kInt4By32;
    default:
      return LowbitFormat::kInt4By128;
  }
}
DenseElement lowbit_out(mr_dtype type) {
  return type == MR_F32 ? DenseElement::kF32 : type == MR_BF16 ? DenseElement::kBF16 : DenseElement::kF16;
}

struct LowbitScratch {
  float *a, *b, *sums, *turned, *few;
  uint16_t* tiles;  // of weights
};
LowbitScratch take_lowbit_scratch(Arena& arena, const mr_lowbit_gemm_args& args) {
  LowbitScratch s{};
  s.a = arena.take<float>(kLowbitRows * kLowbitTileK / 2);  // tiles of bf16; floats of a unit need no more
  s.b = arena.take<float>(kLowbitUnitColumns * kDenseLanes);
  s.tiles = arena.take<uint16_t>(kLowbitTileK * kDenseLanes);
  s.sums = arena.take<float>(kLowbitParts * kLowbitRows * kDenseLanes);
  s.turned = arena.take<float>(kLowbitUnitRows * kDenseLanes);
  s.few = arena.take<float>(args.backward ? 0 : std::min(kLowbitFewRows, args.m) * args.k);
  return s;
}

struct LowbitTile {
  const Context& on;
  const mr_lowbit_gemm_args& args;
  const LowbitScratch& scratch;
  int64_t expert, row, rows, first;  // first output, a multiple of 64
  int64_t columns;                   // at most 64, by tiles 256; sums: [part of 64][256 rows][64]

  int64_t reduced() const { return args.backward ? args.n : args.k; }
  int64_t outputs() const { return args.backward ? args.k : args.n; }
  const uint8_t* unit(int64_t tile, int64_t column_unit) const {
    const quant::UnitGrid grid(args.n, args.k);
    return static_cast<const uint8_t*>(args.weights) +
           (expert * grid.units() + tile * grid.column_units + column_unit) *
               lowbit_unit_bytes(lowbit_format(args.format));
  }
  void run() const {
    if (reduced() == 0) {
      std::fill_n(scratch.sums, kLowbitParts * kLowbitRows * kDenseLanes, 0.0f);
    } else if (on.kernels.dense_tiles != nullptr) {
      rows == 1 && args.backward == 0 ? run_one() : run_tiles();
    } else if (args.backward) {
      run_backward();
    } else if (rows <= kLowbitFewRows) {
      run_few();
    } else {
      run_forward();
    }
  }
  void run_one() const {
    on.kernels.dense_widen(DenseElement::kBF16, static_cast<const uint16_t*>(args.x) + row * args.ldx, args.k,
                           scratch.few);
    for (int64_t part = 0; part * kDenseLanes < columns; ++part) {
      on.kernels.dense_tiles->one_row({lowbit_format(args.format), unit(first / kLowbitUnitRows + part, 0),
                                       args.k, scratch.few, args.k, 1,
                                       scratch.sums + part * kLowbitRows * kDenseLanes});
    }
  }
  void run_tiles() const {
    const DenseTileKernels& tiles = *on.kernels.dense_tiles;
    const int64_t chunk = rows <= kTileHeight ? kLowbitFewTileK : kLowbitTileK;
    constexpr int64_t kElement = 2, kGroup = kLowbitTileK * kElement * kTileHeight;  // bytes
    auto *const a = reinterpret_cast<uint8_t*>(scratch.a), *const b =
                                                               reinterpret_cast<uint8_t*>(scratch.tiles);
    for (int64_t k = 0; k < reduced(); k += chunk) {
      const int64_t depth = std::min(chunk, reduced() - k);
      const int64_t deep = (depth * kElement + kDenseTileDepth - 1) / kDenseTileDepth;
      const auto* const x = static_cast<const uint8_t*>(args.x) + (row * args.ldx + k) * kElement;
      tiles.rows({x, args.ldx * kElement, true, kElement, rows, depth, a, kGroup, 0});
      for (int64_t part = 0; part * kDenseLanes < columns; ++part) {
        args.backward ? pack_turned(part, k, depth, b, kGroup) : pack_weights(part, k, depth, b, kGroup);
        tiles.products({a, b, kGroup, rows, std::min<int64_t>(kDenseLanes, columns - part * kDenseLanes),
                        deep, scratch.sums + part * kLowbitRows * kDenseLanes, k > 0, false});
      }
    }
  }
  // Columns [k, k + depth) of 64 rows of weights.
  void pack_weights(int64_t part, int64_t k, int64_t depth, uint8_t* to, int64_t group) const {
    for (int64_t i = 0; i < depth; i += kLowbitUnitColumns) {
      on.kernels.dense_tiles->weights(
          lowbit_format(args.format), unit(first / kLowbitUnitRows + part, (k + i) / kLowbitUnitColumns),
          std::min<int64_t>(kLowbitUnitColumns, depth - i), to + i / 32 * kDenseTileBytes, group);
    }
  }
  // Rows [n, n + depth) of 64 columns of weights: half of each unit, as rows of bf16.
  void pack_turned(int64_t part, int64_t n, int64_t depth, uint8_t* to, int64_t group) const {
    const int64_t column = first + part * kDenseLanes, half = column % kLowbitUnitColumns;
    const int64_t there = std::min<int64_t>(kLowbitUnitColumns, args.k - column + half);
    const int64_t wanted = std::min<int64_t>(kDenseLanes, there - half);
    auto* const halves = reinterpret_cast<uint8_t*>(scratch.turned);
    for (int64_t i = 0; i < depth; i += kLowbitUnitRows) {
      on.kernels.lowbit_widen(lowbit_format(args.format),
                              unit((n + i) / kLowbitUnitRows, column / kLowbitUnitColumns), there, scratch.b);
      on.kernels.dense_narrow(DenseElement::kBF16, scratch.b + half * kDenseLanes, wanted * kDenseLanes,
                              halves);
      on.kernels.dense_tiles->columns({halves, kDenseLanes * 2, true, 2, wanted,
                                       std::min<int64_t>(kLowbitUnitRows, depth - i),
                                       to + i / 32 * kDenseTileBytes, group, 0});
    }
  }
  void run_few() const {
    const auto* from = static_cast<const uint16_t*>(args.x);
    for (int64_t r = 0; r < rows; ++r)
      on.kernels.dense_widen(DenseElement::kBF16, from + (row + r) * args.ldx, args.k,
                             scratch.few + r * args.k);
    on.kernels.lowbit_rows({lowbit_format(args.format), unit(first / kLowbitUnitRows, 0), args.k, scratch.few,
                            args.k, rows, scratch.sums});
  }
  void run_forward() const {
    for (int64_t k = 0; k < args.k; k += kLowbitUnitColumns) {
      const int64_t count = std::min<int64_t>(kLowbitUnitColumns, args.k - k);
      on.kernels.lowbit_widen(lowbit_format(args.format),
                              unit(first / kLowbitUnitRows, k / kLowbitUnitColumns), count, scratch.b);
      multiply(scratch.b, k, count);
    }
  }
  // Of a unit the half that has these columns, turned to [row][64 columns].
  void run_backward() const {
    const int64_t half = first % kLowbitUnitColumns;
    const int64_t there =
        std::min<int64_t>(kLowbitUnitColumns, args.k - first + half);  // columns of the unit
    for (int64_t n = 0; n < args.n; n += kLowbitUnitRows) {
      const int64_t count = std::min<int64_t>(kLowbitUnitRows, args.n - n);
      on.kernels.lowbit_widen(lowbit_format(args.format),
                              unit(n / kLowbitUnitRows, first / kLowbitUnitColumns), there, scratch.b);
      std::fill_n(scratch.turned, kLowbitUnitRows * kDenseLanes, 0.0f);
      on.kernels.dense_transpose(
          {DenseElement::kF32, reinterpret_cast<const uint8_t*>(scratch.b + half * kDenseLanes),
           kDenseLanes * 4, std::min<int64_t>(kDenseLanes, there - half), kLowbitUnitRows, scratch.turned});
      multiply(scratch.turned, n, count);
    }
  }
  void multiply(const float* weights, int64_t k, int64_t count) const {
    const auto* from = static_cast<const uint16_t*>(args.x);
    for (int64_t r = 0; r < rows; ++r)
      on.kernels.dense_widen(DenseElement::kBF16, from + (row + r) * args.ldx + k, count,
                             scratch.a + r * kLowbitUnitColumns);
    on.kernels.dense_panel(
        {scratch.a, kLowbitUnitColumns, 1, weights, scratch.sums, rows, count, kDenseLanes, k > 0});
  }
  void store() const {
    const float scale = args.expert_scales != nullptr ? args.alpha * args.expert_scales[expert] : args.alpha;
    for (int64_t part = 0; part * kDenseLanes < columns; ++part) store(part, scale);
  }
  void store(int64_t part, float scale) const {
    const int64_t begin = first + part * kDenseLanes,
                  count = std::min<int64_t>(kDenseLanes, columns - part * kDenseLanes);
    const float* bias = args.bias == nullptr ? nullptr : args.bias + expert * args.n + begin;
    const int64_t bytes = args.out_type == MR_F32 ? 4 : 2;
    for (int64_t r = 0; r < rows; ++r) {
      float* y = scratch.sums + (part * kLowbitRows + r) * kDenseLanes;
      for (int64_t c = 0; c < count; ++c) y[c] *= scale;
      if (bias != nullptr) {
        for (int64_t c = 0; c < count; ++c) y[c] += bias[c];
      }
      on.kernels.dense_narrow(lowbit_out(args.out_type), y, count,
                              static_cast<uint8_t*>(args.y) + ((row + r) * args.ldy + begin) * bytes);
    }
  }
};

// Unit (tile, column_unit) of an expert.
void pack_unit(const mr_lowbit_matrix& m, int64_t expert, int64_t tile, int64_t column_unit, uint8_t* unit) {
  const LowbitFormat format = lowbit_format(m.format);
  const int64_t n0 = tile * kLowbitUnitRows, k0 = column_unit * kLowbitUnitColumns;
  std::memset(unit, 0, static_cast<size_t>(lowbit_unit_bytes(format)));
  for (int64_t eight = 0; eight < kLowbitUnitColumns / kLowbitEight; ++eight) {
    for (int64_t r = 0; r < kLowbitUnitRows; ++r) {
      uint32_t word = 0;
      for (int64_t j = 0; j < kLowbitEight; ++j) {
        const int64_t n = n0 + r, k = k0 + eight * kLowbitEight + j;
        if (n < m.n && k < m.k) word |= quant::published_code(m, expert, n, k) << (4 * j);
      }
      std::memcpy(unit + 4 * (eight * kLowbitUnitRows + r), &word, 4);
    }
  }
  const int columns = lowbit_group_columns(format);
  for (int64_t group = 0; group < kLowbitUnitColumns / columns; ++group) {
    for (int64_t r = 0; r < kLowbitUnitRows; ++r) {
      const int64_t n = n0 + r, k = k0 + group * columns;
      if (n >= m.n || k >= m.k) continue;  // weights of zero
      const uint32_t scale = quant::published_scale(m, expert, n, k / columns);
      uint8_t* const at = unit + kLowbitCodeBytes +
                          group * (lowbit_is_int4(format) ? kLowbitInt4GroupBytes : kLowbitUnitRows);
      if (!lowbit_is_int4(format)) {
        // An e4m3's sign is not looked at.
        at[r] = static_cast<uint8_t>(format == LowbitFormat::kNVFP4 ? scale & 127u : scale);
        continue;
      }
      const auto half = static_cast<uint16_t>(scale);
      std::memcpy(at + 2 * r, &half, 2);
      at[2 * kLowbitUnitRows + r] = static_cast<uint8_t>(quant::published_zero(m, expert, n, k / columns));
    }
  }
}

// Outputs of a task.
int64_t task_width(const Context& on, int64_t outputs, int64_t pieces) {
  constexpr int64_t kWide = kLowbitParts * kDenseLanes, kTasksEach = 4;
  const bool enough = (outputs + kWide - 1) / kWide * pieces >= kTasksEach * on.pool.size();
  return on.kernels.dense_tiles != nullptr && (on.pool.size() == 1 || enough) ? kWide : kDenseLanes;
}

}  // namespace

void lowbit_repack(const Context& on, const mr_lowbit_matrix& matrix, void* to) {
  const quant::UnitGrid grid(matrix.n, matrix.k);
  on.pool.parallel_for(matrix.experts * grid.units(), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i % grid.units();
      pack_unit(matrix, i / grid.units(), at / grid.column_units, at % grid.column_units,
                static_cast<uint8_t*>(to) + i * lowbit_unit_bytes(lowbit_format(matrix.format)));
    }
  });
}

size_t lowbit_gemm_workspace_bytes(const mr_lowbit_gemm_args& args, int threads) {
  Arena arena(nullptr);
  for (int t = 0; t < threads; ++t) take_lowbit_scratch(arena, args);
  return arena.used();
}

void lowbit_gemm(const Context& on, const mr_lowbit_gemm_args& args, void* workspace) {
  Arena one(nullptr);
  take_lowbit_scratch(one, args);
  const int64_t outputs = args.backward ? args.k : args.n;
  const auto first_of = [&](int64_t e) -> int64_t { return args.offsets != nullptr ? args.offsets[e] : 0; };
  const auto last_of = [&](int64_t e) -> int64_t {
    return args.offsets != nullptr ? args.offsets[e + 1] : args.m;
  };
  // All experts in one loop: pieces of 256 rows, of which an expert begins a new one.
  const auto pieces_of = [&](int64_t e) {
    return (last_of(e) - first_of(e) + kLowbitRows - 1) / kLowbitRows;
  };
  int64_t pieces = 0;
  for (int64_t e = 0; e < args.experts; ++e) pieces += pieces_of(e);
  const int64_t width = task_width(on, outputs, pieces), across = (outputs + width - 1) / width;
  on.pool.parallel_for(pieces * across, 1, [&](int64_t begin, int64_t end, int thread) {
    Arena arena(static_cast<uint8_t*>(workspace) + static_cast<size_t>(thread) * one.used());
    const LowbitScratch scratch = take_lowbit_scratch(arena, args);
    int64_t expert = 0, before = 0;  // pieces of experts before this one
    for (int64_t i = begin; i < end; ++i) {
      while (i / across >= before + pieces_of(expert)) before += pieces_of(expert++);
      const int64_t row = first_of(expert) + (i / across - before) * kLowbitRows;
      const LowbitTile tile{on,
                            args,
                            scratch,
                            expert,
                            row,
                            std::min(kLowbitRows, last_of(expert) - row),
                            i % across * width,
                            std::min(width, outputs - i % across * width)};
      tile.run();
      tile.store();
    }
  });
}

}  // namespace millrace::cpu
