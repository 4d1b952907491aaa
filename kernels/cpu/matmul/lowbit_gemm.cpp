// A task is 64 outputs of up to 256 rows. Units are widened to floats one at a time, [reduced][64 outputs],
// and multiplied as in dense_gemm.cpp; widening a unit costs what 4 to 8 rows of products do.
#include "kernels/cpu/matmul/lowbit_gemm.h"

#include <algorithm>

#include "base/float_bits.h"
#include "kernels/quant/lowbit_units.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kLowbitRows = 256;
static_assert(kDenseLanes == quant::kUnitRows && kDenseLanes == quant::kUnitColumns / 2);

struct LowbitScratch {
  float *a, *b, *sums;
};
LowbitScratch take_lowbit_scratch(Arena& arena) {
  LowbitScratch s{};
  s.a = arena.take<float>(kLowbitRows * quant::kUnitColumns);
  s.b = arena.take<float>(quant::kUnitColumns * kDenseLanes);
  s.sums = arena.take<float>(kLowbitRows * kDenseLanes);
  return s;
}

struct LowbitTile {
  const Context& on;
  const mr_lowbit_gemm_args& args;
  const LowbitScratch& scratch;
  int64_t expert, row, rows, first;  // first output, a multiple of 64

  int64_t reduced() const { return args.backward ? args.n : args.k; }
  int64_t outputs() const { return args.backward ? args.k : args.n; }
  int64_t depth() const { return args.backward ? quant::kUnitRows : quant::kUnitColumns; }

  // To [depth][64]: rows of a unit are outputs or, backward, one half of its columns.
  void load_weights(int64_t k) const {
    const quant::UnitGrid grid(args.n, args.k);
    const int64_t tile = (args.backward ? k : first) / quant::kUnitRows;
    const int64_t column_unit = (args.backward ? first : k) / quant::kUnitColumns;
    const uint8_t* unit =
        static_cast<const uint8_t*>(args.weights) +
        (expert * grid.units() + tile * grid.column_units + column_unit) * quant::unit_bytes(args.format);
    const int begin = args.backward && first % quant::kUnitColumns != 0 ? quant::kUnitWords / 2 : 0;
    const int end = args.backward ? begin + quant::kUnitWords / 2 : quant::kUnitWords;
    for (int at = begin; at < end; ++at) {
      float w[8];
      quant::unit_weights(unit, args.format, at, w);
      for (int i = 0; i < 8; ++i) {
        const quant::UnitPlace place(at, i);
        const int64_t r = place.row, c = place.column;
        scratch.b[args.backward ? r * kDenseLanes + c % kDenseLanes : c * kDenseLanes + r] = w[i];
      }
    }
  }
  void run() const {
    std::fill_n(scratch.sums, rows * kDenseLanes, 0.0f);
    const auto* x = static_cast<const uint16_t*>(args.x);
    for (int64_t k = 0; k < reduced(); k += depth()) {
      const int64_t count = std::min(depth(), reduced() - k);
      for (int64_t r = 0; r < rows; ++r)
        on.kernels.dense_widen(DenseElement::kBF16, x + (row + r) * args.ldx + k, count,
                               scratch.a + r * quant::kUnitColumns);
      load_weights(k);
      on.kernels.dense_panel(
          {scratch.a, quant::kUnitColumns, 1, scratch.b, scratch.sums, rows, count, kDenseLanes, k > 0});
    }
  }
  void store() const {
    const float scale = args.expert_scales != nullptr ? args.alpha * args.expert_scales[expert] : args.alpha;
    const int64_t columns = std::min<int64_t>(kDenseLanes, outputs() - first);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        float y = scale * scratch.sums[r * kDenseLanes + c];
        if (args.bias != nullptr) y += args.bias[expert * args.n + first + c];
        const int64_t at = (row + r) * args.ldy + first + c;
        if (args.out_type == MR_F32) {
          static_cast<float*>(args.y)[at] = y;
        } else {
          static_cast<uint16_t*>(args.y)[at] =
              args.out_type == MR_BF16 ? to_bfloat16(y).bits : to_half(y).bits;
        }
      }
    }
  }
};

}  // namespace

void lowbit_repack(const Context& on, const mr_lowbit_matrix& matrix, void* to) {
  const quant::UnitGrid grid(matrix.n, matrix.k);
  const int groups = quant::kUnitColumns / quant::lowbit_group(matrix.format);
  on.pool.parallel_for(matrix.experts * grid.units(), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t expert = i / grid.units(), tile = i % grid.units() / grid.column_units,
                    column_unit = i % grid.column_units;
      uint8_t* unit = static_cast<uint8_t*>(to) + i * quant::unit_bytes(matrix.format);
      for (int at = 0; at < quant::kUnitWords; ++at) {
        const uint32_t word = quant::pack_unit_word(matrix, expert, tile, column_unit, at);
        std::memcpy(unit + 4 * at, &word, 4);
      }
      for (int at = 0; at < groups * quant::kUnitRows; ++at)
        quant::pack_unit_scale(matrix, expert, tile, column_unit, at / quant::kUnitRows,
                               at % quant::kUnitRows, unit);
    }
  });
}

size_t lowbit_gemm_workspace_bytes(int threads) {
  Arena arena(nullptr);
  for (int t = 0; t < threads; ++t) take_lowbit_scratch(arena);
  return arena.used();
}

void lowbit_gemm(const Context& on, const mr_lowbit_gemm_args& args, void* workspace) {
  Arena one(nullptr);
  take_lowbit_scratch(one);
  const int64_t outputs = args.backward ? args.k : args.n, across = (outputs + kDenseLanes - 1) / kDenseLanes;
  for (int64_t expert = 0; expert < args.experts; ++expert) {
    const int64_t first_row = args.offsets != nullptr ? args.offsets[expert] : 0;
    const int64_t last_row = args.offsets != nullptr ? args.offsets[expert + 1] : args.m;
    const int64_t down = (last_row - first_row + kLowbitRows - 1) / kLowbitRows;
    on.pool.parallel_for(down * across, 1, [&](int64_t begin, int64_t end, int thread) {
      Arena arena(static_cast<uint8_t*>(workspace) + static_cast<size_t>(thread) * one.used());
      const LowbitScratch scratch = take_lowbit_scratch(arena);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = first_row + i / across * kLowbitRows;
        const LowbitTile tile{
            on, args, scratch, expert, row, std::min(kLowbitRows, last_row - row), i % across * kDenseLanes};
        tile.run();
        tile.store();
      }
    });
  }
}

}  // namespace millrace::cpu
