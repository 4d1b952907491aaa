// A tile of 256 x 64 outputs is a task. K goes in chunks of 256 (128 where every 128 have scales of their
// own): both operands' chunks are widened to floats once, A as it lies, B to rows of 64 lanes. A chunk of A
// is 256 KB, within the second-level cache; its conversion costs 1/64 of the multiply-adds, that of B 1/256.
//
// int8: the sum of 256 products is a whole number below 2^24, exact in float32; chunks are added in int32.
//
// Gates lie n / 2 columns from what they multiply, and a scale is that of 128 outputs: such sums, with their
// bias, go to memory, and rows are finished when all are there.
#include "kernels/cpu/matmul/dense_gemm.h"

#include <algorithm>
#include <cmath>

#include "base/float_bits.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kRows = 256, kChunk = kDenseDepth, kScaledChunk = 128;

struct DenseScratch {
  float *a, *b, *sums, *totals, *staging;
  int32_t* counts;
};

DenseScratch take_scratch(Arena& arena) {
  DenseScratch s{};
  s.a = arena.take<float>(kRows * kChunk);
  s.b = arena.take<float>(kChunk * kDenseLanes);
  s.sums = arena.take<float>(kRows * kDenseLanes);
  s.totals = arena.take<float>(kRows * kDenseLanes);
  s.staging = arena.take<float>(kChunk + kDenseLanes);
  s.counts = arena.take<int32_t>(kRows * kDenseLanes);
  return s;
}

DenseElement element_of(mr_dtype type) {
  switch (type) {
    case MR_F16:
      return DenseElement::kF16;
    case MR_BF16:
      return DenseElement::kBF16;
    case MR_F8_E4M3:
      return DenseElement::kE4M3;
    case MR_F8_E5M2:
      return DenseElement::kE5M2;
    case MR_I8:
      return DenseElement::kI8;
    default:
      return DenseElement::kF32;
  }
}
int64_t bytes_of_element(mr_dtype type) {
  return type == MR_F32 ? 4 : type == MR_F16 || type == MR_BF16 ? 2 : 1;
}

float read_out(const void* from, int64_t at, mr_dtype type) {
  if (type == MR_F32) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return type == MR_BF16 ? to_float(BFloat16{bits}) : to_float(Half{bits});
}
void write_out(void* to, int64_t at, mr_dtype type, float value) {
  if (type == MR_F32) {
    static_cast<float*>(to)[at] = value;
  } else {
    static_cast<uint16_t*>(to)[at] = type == MR_BF16 ? to_bfloat16(value).bits : to_half(value).bits;
  }
}

bool is_gated(const mr_gemm_args& args) {
  return args.activation == MR_GEMM_SWIGLU || args.activation == MR_GEMM_CLAMPED_SWIGLU;
}
bool goes_by_rows(const mr_gemm_args& args) { return is_gated(args) || args.out_type == MR_F8_E4M3; }

float activate(float x, mr_gemm_activation activation) {
  switch (activation) {
    case MR_GEMM_GELU:
      return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    case MR_GEMM_GELU_TANH:
      return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    case MR_GEMM_SILU:
      return x / (1.0f + std::exp(-x));
    default:
      return x;
  }
}
float activate_gate(float gate, float up, const mr_gemm_args& args) {
  if (args.activation == MR_GEMM_SWIGLU) return gate / (1.0f + std::exp(-gate)) * up;
  const float limit = args.gate_limit, g = gate > limit ? limit : gate;  // NaN stays
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return g / (1.0f + std::exp(-args.gate_alpha * g)) * (u + 1.0f);
}

// Row `row` of c from its sums and bias, [n]; they are overwritten.
void finish_row(const mr_gemm_args& args, float* values, int64_t row) {
  const bool gated = is_gated(args);
  const int64_t outputs = gated ? args.n / 2 : args.n;
  for (int64_t j = 0; j < outputs; ++j) {
    values[j] =
        gated ? activate_gate(values[j], values[j + outputs], args) : activate(values[j], args.activation);
    if (args.residual != nullptr)
      values[j] += read_out(args.residual, row * args.residual_stride + j, args.out_type);
    if (args.out_type != MR_F8_E4M3) write_out(args.c, row * args.ldc + j, args.out_type, values[j]);
  }
  if (args.out_type != MR_F8_E4M3) return;
  auto* codes = static_cast<uint8_t*>(args.c) + row * args.ldc;
  for (int64_t begin = 0; begin < outputs; begin += 128) {
    const int64_t end = std::min<int64_t>(begin + 128, outputs);
    float most = 0.0f;
    for (int64_t j = begin; j < end; ++j) most = std::max(most, std::abs(values[j]));
    const float scale = most / 448.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    args.c_scales[row * args.c_scale_stride + begin / 128] = scale;
    for (int64_t j = begin; j < end; ++j) codes[j] = to_fp8_e4m3(values[j] * inverse).bits;
  }
}

// Scales of an operand [outer][k]: that of (i, k) is at i / block * step + k / k_block * k_step.
struct Scales {
  const float* data;
  int64_t block, k_block, step, k_step;

  bool along_k() const { return k_block != 1; }  // one for a chunk
  const float* of(int64_t i, int64_t k) const { return data + i / block * step + k / k_block * k_step; }
};
Scales a_scales_of(const mr_gemm_args& args) {
  const int64_t stride = args.a_scale_stride, rows = args.a_scale_rows, cols = args.a_scale_cols;
  if (rows == 0) return {args.a_scales, 1, kScaledChunk, stride, 1};
  return args.transpose_a ? Scales{args.a_scales, cols, rows, 1, stride}
                          : Scales{args.a_scales, rows, cols, stride, 1};
}
Scales b_scales_of(const mr_gemm_args& args) {
  const int64_t stride = args.b_scale_stride, rows = args.b_scale_rows, cols = args.b_scale_cols;
  if (rows == 0) return {args.b_scales, 128, kScaledChunk, stride, 1};
  return args.transpose_b ? Scales{args.b_scales, rows, cols, stride, 1}
                          : Scales{args.b_scales, cols, rows, 1, stride};
}
bool is_fp8(mr_dtype type) { return type == MR_F8_E4M3 || type == MR_F8_E5M2; }

struct Tile {
  const Context& on;
  const mr_gemm_args& args;
  const DenseScratch& scratch;
  float* values;                       // [m][n]: where sums with their bias go, or null
  bool continues;                      // sums begin at c (dense_gemm_add)
  int64_t row, column, rows, columns;  // of the sums

  const uint8_t* a_at(int64_t at) const {
    return static_cast<const uint8_t*>(args.a) + at * bytes_of_element(args.type);
  }
  const uint8_t* b_at(int64_t at) const {
    return static_cast<const uint8_t*>(args.b) + at * bytes_of_element(args.b_type);
  }
  // To [rows][depth] or, transposed, [depth][rows]: as it lies.
  void load_a(int64_t k, int64_t depth) const {
    const DenseElement type = element_of(args.type);
    if (args.transpose_a) {
      for (int64_t i = 0; i < depth; ++i)
        on.kernels.dense_widen(type, a_at((k + i) * args.lda + row), rows, scratch.a + i * kRows);
    } else {
      for (int64_t r = 0; r < rows; ++r)
        on.kernels.dense_widen(type, a_at((row + r) * args.lda + k), depth, scratch.a + r * kChunk);
    }
  }
  // To [depth][64]; lanes behind the last column are zero.
  void load_b(int64_t k, int64_t depth) const {
    const DenseElement type = element_of(args.b_type);
    if (columns < kDenseLanes) std::fill_n(scratch.b, depth * kDenseLanes, 0.0f);
    if (args.transpose_b) {
      for (int64_t c = 0; c < columns; ++c) {
        on.kernels.dense_widen(type, b_at((column + c) * args.ldb + k), depth, scratch.staging);
        for (int64_t i = 0; i < depth; ++i) scratch.b[i * kDenseLanes + c] = scratch.staging[i];
      }
    } else {
      for (int64_t i = 0; i < depth; ++i) {
        on.kernels.dense_widen(type, b_at((k + i) * args.ldb + column), columns, scratch.b + i * kDenseLanes);
      }
    }
  }
  // Scales that change along k cannot wait for a sum: the elements of a chunk times theirs.
  void scale_a(const Scales& scales, int64_t k, int64_t depth) const {
    const int64_t row_stride = args.transpose_a ? 1 : kChunk, k_stride = args.transpose_a ? kRows : 1;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < depth; ++i)
        scratch.a[r * row_stride + i * k_stride] *= *scales.of(row + r, k + i);
    }
  }
  void scale_b(const Scales& scales, int64_t k, int64_t depth) const {
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t c = 0; c < columns; ++c) scratch.b[i * kDenseLanes + c] *= *scales.of(column + c, k + i);
    }
  }
  void multiply(int64_t k, int64_t depth, bool add) const {
    load_a(k, depth);
    load_b(k, depth);
    multiply_loaded(depth, add);
  }
  void multiply_loaded(int64_t depth, bool add) const {
    on.kernels.dense_panel({scratch.a, args.transpose_a ? 1 : kChunk, args.transpose_a ? kRows : 1, scratch.b,
                            scratch.sums, rows, depth, (columns + 31) / 32 * 32, add});
  }
  template <class Body>
  void each(const Body& body) const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) body(r, c, r * kDenseLanes + c);
    }
  }
  // The sums, in scratch.sums.
  void run() const {
    std::fill_n(scratch.sums, rows * kDenseLanes, 0.0f);
    if (is_fp8(args.type)) return run_scaled();
    if (args.type == MR_I8) return run_whole_numbers();
    if (continues) return run_on();
    for (int64_t k = 0; k < args.k; k += kChunk) multiply(k, std::min(kChunk, args.k - k), k > 0);
  }
  // c and then the sum of each chunk of k: many thousands of products lose less than in one chain.
  void run_on() const {
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(static_cast<const float*>(args.c) + (row + r) * args.ldc + column, columns,
                  scratch.totals + r * kDenseLanes);
    for (int64_t k = 0; k < args.k; k += kChunk) {
      multiply(k, std::min(kChunk, args.k - k), false);
      each([&](int64_t, int64_t, int64_t at) { scratch.totals[at] += scratch.sums[at]; });
    }
    each([&](int64_t, int64_t, int64_t at) { scratch.sums[at] = scratch.totals[at]; });
  }
  void run_scaled() const {
    const Scales of_a = a_scales_of(args), of_b = b_scales_of(args);
    std::fill_n(scratch.totals, rows * kDenseLanes, 0.0f);
    for (int64_t k = 0; k < args.k; k += kScaledChunk) {
      const int64_t depth = std::min(kScaledChunk, args.k - k);
      load_a(k, depth);
      load_b(k, depth);
      if (!of_a.along_k()) scale_a(of_a, k, depth);
      if (!of_b.along_k()) scale_b(of_b, k, depth);
      multiply_loaded(depth, false);
      each([&](int64_t r, int64_t c, int64_t at) {
        const float scale = (of_a.along_k() ? *of_a.of(row + r, k) : 1.0f) *
                            (of_b.along_k() ? *of_b.of(column + c, k) : 1.0f);
        scratch.totals[at] = std::fma(scratch.sums[at], scale, scratch.totals[at]);
      });
    }
    std::copy_n(scratch.totals, rows * kDenseLanes, scratch.sums);
  }
  void run_whole_numbers() const {
    std::fill_n(scratch.counts, rows * kDenseLanes, 0);
    for (int64_t k = 0; k < args.k; k += kChunk) {
      multiply(k, std::min(kChunk, args.k - k), false);
      each([&](int64_t, int64_t, int64_t at) {
        scratch.counts[at] += static_cast<int32_t>(scratch.sums[at]);
      });
    }
    each([&](int64_t r, int64_t c, int64_t at) {
      auto sum = static_cast<float>(scratch.counts[at]);
      if (args.a_scales != nullptr) sum *= args.a_scales[row + r];
      if (args.b_scales != nullptr) sum *= args.b_scales[column + c];
      scratch.sums[at] = sum;
    });
  }
  void store() const {
    each([&](int64_t r, int64_t c, int64_t at) {
      float y = args.alpha * scratch.sums[at];
      if (args.bias != nullptr) y += args.bias[column + c];
      if (values != nullptr) {
        values[(row + r) * args.n + column + c] = y;
        return;
      }
      y = activate(y, args.activation);
      if (args.residual != nullptr)
        y += read_out(args.residual, (row + r) * args.residual_stride + column + c, args.out_type);
      write_out(args.c, (row + r) * args.ldc + column + c, args.out_type, y);
    });
  }
};

}  // namespace

size_t dense_gemm_workspace_bytes(const mr_gemm_args& args, int threads) {
  Arena arena(nullptr);
  for (int t = 0; t < threads; ++t) take_scratch(arena);
  if (goes_by_rows(args)) arena.take<float>(args.m * args.n);
  return arena.used();
}

namespace {

void run_tiles(const Context& on, const mr_gemm_args& args, void* workspace, bool continues) {
  Arena one(nullptr);
  take_scratch(one);
  auto* const base = static_cast<uint8_t*>(workspace);
  float* const values =
      goes_by_rows(args) ? reinterpret_cast<float*>(base + static_cast<size_t>(on.pool.size()) * one.used())
                         : nullptr;
  const int64_t down = (args.m + kRows - 1) / kRows, across = (args.n + kDenseLanes - 1) / kDenseLanes;
  on.pool.parallel_for(down * across, 1, [&](int64_t begin, int64_t end, int thread) {
    Arena arena(base + static_cast<size_t>(thread) * one.used());
    const DenseScratch scratch = take_scratch(arena);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across * kRows, column = i % across * kDenseLanes;
      const Tile tile{on,
                      args,
                      scratch,
                      values,
                      continues,
                      row,
                      column,
                      std::min(kRows, args.m - row),
                      std::min<int64_t>(kDenseLanes, args.n - column)};
      tile.run();
      tile.store();
    }
  });
  if (values == nullptr) return;
  on.pool.parallel_for(args.m, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) finish_row(args, values + row * args.n, row);
  });
}

}  // namespace

void dense_gemm(const Context& on, const mr_gemm_args& args, void* workspace) {
  run_tiles(on, args, workspace, false);
}

void dense_gemm_add(const Context& on, const mr_gemm_args& args, void* workspace) {
  run_tiles(on, args, workspace, true);
}

}  // namespace millrace::cpu
