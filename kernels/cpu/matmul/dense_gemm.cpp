// A tile of 256 x 256 outputs, or of 64 columns where threads would have nothing to do, is a task. K goes in
// chunks of 256 (128 where every 128 have scales of their own): both operands' chunks are widened to floats
// once, A as it lies, B 64 columns at a time to rows of 64 lanes. A chunk of A is 256 KB, within the
// second-level cache.
//
// int8: dot products of bytes where the processor has them. Elsewhere floats: the sum of 256 products is a
// whole number below 2^24, exact in float32; chunks are added in int32.
//
// Where there are tiles (AMX) bf16 and int8 go through them, for any number of rows (dense_amx.h): a task is
// up to 512 x 512 outputs, for packing an operand costs as much as multiplying it three times.
//
// Gates lie n / 2 columns from what they multiply, and a scale is that of 128 outputs: such sums, with their
// bias, go to memory, and rows are finished when all are there.
#include "kernels/cpu/matmul/dense_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/float_bits.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kRows = 256, kChunk = kDenseDepth, kScaledChunk = 128;
constexpr int64_t kParts = 4, kPartSums = kRows * kDenseLanes;  // of 64 columns
constexpr int64_t kByteChunk = 4 * kChunk;                      // as many bytes
// By tiles: 512 KiB of A and 1 MiB of sums, within the second-level cache of every processor with AMX.
constexpr int64_t kAmxRows = 512, kAmxParts = 8, kAmxChunk = 1024;  // bytes of k

struct DenseScratch {
  float *a, *b, *sums, *totals;
  int32_t *counts, *a_sums;
};

DenseScratch take_scratch(Arena& arena) {
  DenseScratch s{};
  s.a = arena.take<float>(std::max(kRows * kChunk, kAmxRows * kAmxChunk / 4));
  s.b = arena.take<float>(std::max(kChunk, kAmxChunk / 4) * kDenseLanes);
  s.sums = arena.take<float>(std::max(kParts * kPartSums, kAmxParts * kAmxRows * kDenseLanes));
  s.totals = arena.take<float>(kParts * kPartSums);
  s.counts = arena.take<int32_t>(kParts * kPartSums);
  s.a_sums = arena.take<int32_t>(kRows);
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

bool is_gated(const mr_gemm_args& args) {
  return args.activation == MR_GEMM_SWIGLU || args.activation == MR_GEMM_CLAMPED_SWIGLU;
}
bool goes_by_rows(const mr_gemm_args& args) { return is_gated(args) || args.out_type == MR_F8_E4M3; }

const void* row_at(const void* base, int64_t at, mr_dtype type) {
  return static_cast<const uint8_t*>(base) + at * bytes_of_element(type);
}
void* row_at(void* base, int64_t at, mr_dtype type) {
  return static_cast<uint8_t*>(base) + at * bytes_of_element(type);
}

// y = activation(y), up to 64 of them.
void activate(const KernelTable& kernels, mr_gemm_activation activation, float* y, int64_t count) {
  if (activation == MR_GEMM_GELU) kernels.gelu(y, count, y);
  if (activation == MR_GEMM_GELU_TANH) kernels.gelu_tanh(y, count, y);
  if (activation == MR_GEMM_SILU) {
    alignas(64) float ones[kDenseLanes];
    std::fill_n(ones, kDenseLanes, 1.0f);
    kernels.silu_mul(y, ones, count, y);
  }
}

// Outputs [first, first + count) of a row of c, at most 64: the residual is added, elements are written.
void put_outputs(const Context& on, const mr_gemm_args& args, float* y, int64_t row, int64_t first,
                 int64_t count) {
  const DenseElement type = element_of(args.out_type);
  if (args.residual != nullptr) {
    alignas(64) float residual[kDenseLanes];
    on.kernels.dense_widen(type, row_at(args.residual, row * args.residual_stride + first, args.out_type),
                           count, residual);
    for (int64_t i = 0; i < count; ++i) y[i] += residual[i];
  }
  on.kernels.dense_narrow(type, y, count, row_at(args.c, row * args.ldc + first, args.out_type));
}

void put_fp8(const mr_gemm_args& args, const float* values, int64_t row, int64_t outputs) {
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

// Row `row` of c from its sums and bias, [n]; they are overwritten.
void finish_row(const Context& on, const mr_gemm_args& args, float* values, int64_t row) {
  const int64_t outputs = is_gated(args) ? args.n / 2 : args.n;
  for (int64_t first = 0; first < outputs; first += kDenseLanes) {
    const int64_t count = std::min<int64_t>(kDenseLanes, outputs - first);
    float* const y = values + first;
    if (args.activation == MR_GEMM_SWIGLU) {
      on.kernels.silu_mul(y, y + outputs, count, y);
    } else if (args.activation == MR_GEMM_CLAMPED_SWIGLU) {
      on.kernels.clamped_swiglu(y, y + outputs, args.gate_alpha, args.gate_limit, count, y);
    } else {
      activate(on.kernels, args.activation, y, count);
    }
    if (args.out_type != MR_F8_E4M3) put_outputs(on, args, y, row, first, count);
  }
  if (args.out_type == MR_F8_E4M3) put_fp8(args, values, row, outputs);
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

bool few_rows(const mr_gemm_args& args) {
  const bool floats = args.type == MR_F32 || args.type == MR_F16 || args.type == MR_BF16;
  return floats && args.m <= kDenseFewRows && !args.transpose_a;
}

// So few that reading B is all that costs.
bool is_few(const mr_gemm_args& args) { return args.m <= kTileHeight; }
// Up to so many rows go by vectors, in the order of tiles.
constexpr int64_t kAmxFewRows = 4;
bool by_tiles(const Context& on, const mr_gemm_args& args) {
  const bool bf16 = args.type == MR_BF16 && args.b_type == MR_BF16;
  return on.kernels.dense_tiles != nullptr && (bf16 || args.type == MR_I8);
}

struct Tile {
  const Context& on;
  const mr_gemm_args& args;
  const DenseScratch& scratch;
  float* values;                       // [m][n]: where sums with their bias go, or null
  bool continues;                      // sums begin at c (dense_gemm_add)
  int64_t row, column, rows, columns;  // of the sums: [part of 64 columns][256 rows, by tiles 512][64]
  bool tiles;                          // of AMX
  int64_t part_sums = tiles ? kAmxRows * kDenseLanes : kPartSums;

  const uint8_t* a_at(int64_t at) const {
    return static_cast<const uint8_t*>(args.a) + at * bytes_of_element(args.type);
  }
  const uint8_t* b_at(int64_t at) const {
    return static_cast<const uint8_t*>(args.b) + at * bytes_of_element(args.b_type);
  }
  int64_t parts() const { return (columns + kDenseLanes - 1) / kDenseLanes; }
  int64_t part_columns(int64_t part) const {
    return std::min<int64_t>(kDenseLanes, columns - part * kDenseLanes);
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
  void load_b(int64_t part, int64_t k, int64_t depth) const {
    const DenseElement type = element_of(args.b_type);
    const int64_t first = column + part * kDenseLanes, count = part_columns(part);
    if (count < kDenseLanes) std::fill_n(scratch.b, depth * kDenseLanes, 0.0f);
    if (args.transpose_b) {
      on.kernels.dense_transpose({type, b_at(first * args.ldb + k), args.ldb * bytes_of_element(args.b_type),
                                  count, depth, scratch.b});
    } else {
      for (int64_t i = 0; i < depth; ++i)
        on.kernels.dense_widen(type, b_at((k + i) * args.ldb + first), count, scratch.b + i * kDenseLanes);
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
  void scale_b(const Scales& scales, int64_t part, int64_t k, int64_t depth) const {
    const int64_t first = column + part * kDenseLanes, count = part_columns(part);
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t c = 0; c < count; ++c) scratch.b[i * kDenseLanes + c] *= *scales.of(first + c, k + i);
    }
  }
  // The chunks of A and of B that are there.
  void multiply_loaded(int64_t part, int64_t depth, bool add) const {
    on.kernels.dense_panel({scratch.a, args.transpose_a ? 1 : kChunk, args.transpose_a ? kRows : 1, scratch.b,
                            scratch.sums + part * part_sums, rows, depth, (part_columns(part) + 31) / 32 * 32,
                            add});
  }
  void multiply(int64_t k, int64_t depth, bool add) const {
    load_a(k, depth);
    for (int64_t part = 0; part < parts(); ++part) {
      load_b(part, k, depth);
      multiply_loaded(part, depth, add);
    }
  }
  // Body of row, column and place of each sum.
  template <class Body>
  void each(const Body& body) const {
    for (int64_t part = 0; part < parts(); ++part) {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t count = part_columns(part), at = part * part_sums + r * kDenseLanes;
        for (int64_t c = 0; c < count; ++c) body(r, part * kDenseLanes + c, at + c);
      }
    }
  }
  // Elements of B go straight to registers.
  bool few() const {
    return few_rows(args) && !continues && (!tiles || (args.transpose_b == 0 && args.m <= kAmxFewRows));
  }
  void run_few() const {
    // Of k: what fits where a chunk of A does; where B is read several times, what stays in the cache.
    const int64_t chunk = args.transpose_b != 0 || rows <= 4 ? kRows * kChunk / kDenseFewRows : kChunk / 2;
    for (int64_t k = 0; k < args.k; k += chunk) {
      const int64_t depth = std::min(chunk, args.k - k);
      for (int64_t r = 0; r < rows; ++r)
        on.kernels.dense_widen(element_of(args.type), a_at((row + r) * args.lda + k), depth,
                               scratch.a + r * chunk);
      const auto few = tiles ? on.kernels.dense_tiles->few : on.kernels.dense_few;
      few({element_of(args.b_type), args.transpose_b != 0,
           b_at(args.transpose_b ? column * args.ldb + k : k * args.ldb + column),
           args.ldb * bytes_of_element(args.b_type), columns, depth, scratch.a, chunk, rows, scratch.sums,
           part_sums, k > 0});
    }
  }
  // The sums, in scratch.sums.
  void run() const {
    if (is_fp8(args.type)) return run_scaled();
    if (args.type == MR_I8) return run_whole_numbers();
    if (continues) return run_on();
    if (args.k > 0 && few()) return run_few();
    if (args.k > 0 && tiles) return run_by_tiles();
    if (args.k == 0) each([&](int64_t, int64_t, int64_t at) { scratch.sums[at] = 0.0f; });
    for (int64_t k = 0; k < args.k; k += kChunk) multiply(k, std::min(kChunk, args.k - k), k > 0);
  }
  // c and then the sum of each chunk of k: many thousands of products lose less than in one chain.
  void run_on() const {
    each([&](int64_t r, int64_t c, int64_t at) {
      scratch.totals[at] = static_cast<const float*>(args.c)[(row + r) * args.ldc + column + c];
    });
    for (int64_t k = 0; k < args.k; k += kChunk) {
      multiply(k, std::min(kChunk, args.k - k), false);
      each([&](int64_t, int64_t, int64_t at) { scratch.totals[at] += scratch.sums[at]; });
    }
    each([&](int64_t, int64_t, int64_t at) { scratch.sums[at] = scratch.totals[at]; });
  }
  void run_scaled() const {
    const Scales of_a = a_scales_of(args), of_b = b_scales_of(args);
    each([&](int64_t, int64_t, int64_t at) { scratch.totals[at] = 0.0f; });
    for (int64_t k = 0; k < args.k; k += kScaledChunk) {
      const int64_t depth = std::min(kScaledChunk, args.k - k);
      load_a(k, depth);
      if (!of_a.along_k()) scale_a(of_a, k, depth);
      for (int64_t part = 0; part < parts(); ++part) {
        load_b(part, k, depth);
        if (!of_b.along_k()) scale_b(of_b, part, k, depth);
        multiply_loaded(part, depth, false);
        add_scaled(part, k, of_a, of_b);
      }
    }
    each([&](int64_t, int64_t, int64_t at) { scratch.sums[at] = scratch.totals[at]; });
  }
  // totals += sums times the scales of a chunk.
  void add_scaled(int64_t part, int64_t k, const Scales& of_a, const Scales& of_b) const {
    alignas(64) float b[kDenseLanes], scale[kDenseLanes];
    const int64_t first = column + part * kDenseLanes, count = part_columns(part);
    for (int64_t c = 0; c < count; ++c) b[c] = of_b.along_k() ? *of_b.of(first + c, k) : 1.0f;
    for (int64_t r = 0; r < rows; ++r) {
      const float a = of_a.along_k() ? *of_a.of(row + r, k) : 1.0f;
      for (int64_t c = 0; c < count; ++c) scale[c] = a * b[c];
      const int64_t at = part * part_sums + r * kDenseLanes;
      on.kernels.dense_multiply_add(scratch.sums + at, scale, count, scratch.totals + at);
    }
  }
  // Float sums, of int8 int32.
  void run_by_tiles() const {
    const DenseTileKernels& kernels = *on.kernels.dense_tiles;
    const int64_t element = bytes_of_element(args.type), group = kAmxChunk * kTileHeight;  // bytes
    // Few rows: B is read as it lies, and prefetched; behind the end of rows of B come the next task's.
    const bool few = is_few(args);
    const auto ahead = [&](int64_t k, int64_t depth) -> int64_t {
      if (!few) return 0;
      if (args.transpose_b == 0) return depth * args.ldb * element;
      return (k + depth < args.k ? depth : kDenseLanes * args.ldb - k) * element;
    };
    const int64_t chunk = (few && args.transpose_b == 0 ? kDenseTileDepth : kAmxChunk) / element;
    auto *const a = reinterpret_cast<uint8_t*>(scratch.a), *const b = reinterpret_cast<uint8_t*>(scratch.b);
    for (int64_t k = 0; k < args.k; k += chunk) {
      const int64_t depth = std::min(chunk, args.k - k);
      const int64_t deep = (depth * element + kDenseTileDepth - 1) / kDenseTileDepth;
      kernels.rows({a_at(args.transpose_a ? k * args.lda + row : row * args.lda + k), args.lda * element,
                    args.transpose_a == 0, element, rows, depth, a, group, 0});
      for (int64_t part = 0; part < parts(); ++part) {
        const int64_t first = column + part * kDenseLanes, count = part_columns(part);
        kernels.columns({b_at(args.transpose_b ? first * args.ldb + k : k * args.ldb + first),
                         args.ldb * element, args.transpose_b != 0, element, count, depth, b, group,
                         ahead(k, depth)});
        kernels.products(
            {a, b, group, rows, count, deep, scratch.sums + part * part_sums, k > 0, args.type == MR_I8});
      }
    }
  }
  void run_whole_numbers() const {
    if (tiles) return run_tile_counts();
    each([&](int64_t, int64_t, int64_t at) { scratch.counts[at] = 0; });
    if (on.kernels.dense_dots != nullptr) {
      for (int64_t k = 0; k < args.k; k += kByteChunk) add_dots(k, std::min(kByteChunk, args.k - k));
    } else {
      for (int64_t k = 0; k < args.k; k += kChunk) {
        multiply(k, std::min(kChunk, args.k - k), false);
        each([&](int64_t, int64_t, int64_t at) {
          scratch.counts[at] += static_cast<int32_t>(scratch.sums[at]);
        });
      }
    }
    scale_counts([&](int64_t at) { return scratch.counts[at]; });
  }
  void run_tile_counts() const {
    if (args.k == 0) return each([&](int64_t, int64_t, int64_t at) { scratch.sums[at] = 0.0f; });
    run_by_tiles();
    scale_counts([&](int64_t at) {
      int32_t count;
      std::memcpy(&count, scratch.sums + at, sizeof count);
      return count;
    });
  }
  template <class Count>
  void scale_counts(const Count& count) const {
    each([&](int64_t r, int64_t c, int64_t at) {
      auto sum = static_cast<float>(count(at));
      if (args.a_scales != nullptr) sum *= args.a_scales[row + r];
      if (args.b_scales != nullptr) sum *= args.b_scales[column + c];
      scratch.sums[at] = sum;
    });
  }
  // counts += the products of a chunk of k; both operands are padded with zeros to fours.
  void add_dots(int64_t k, int64_t depth) const {
    auto* const codes = reinterpret_cast<int8_t*>(scratch.a);
    auto* const packed = reinterpret_cast<uint8_t*>(scratch.b);
    const int64_t fours = (depth + 3) / 4;
    for (int64_t r = 0; r < rows; ++r) {
      int8_t* const to = codes + r * kByteChunk;
      const auto* from = reinterpret_cast<const int8_t*>(args.transpose_a ? a_at(k * args.lda + row + r)
                                                                          : a_at((row + r) * args.lda + k));
      const int64_t step = args.transpose_a ? args.lda : 1;
      for (int64_t i = 0; i < depth; ++i) to[i] = from[i * step];
      std::fill(to + depth, to + 4 * fours, int8_t{0});
      int32_t sum = 0;
      for (int64_t i = 0; i < depth; ++i) sum += to[i];
      scratch.a_sums[r] = sum;
    }
    for (int64_t part = 0; part < parts(); ++part) {
      pack_fours(part, k, depth, packed);
      on.kernels.dense_dots(
          {codes, kByteChunk, packed, scratch.a_sums, scratch.counts + part * part_sums, rows, 4 * fours});
    }
  }
  // To [depth / 4][64][4].
  void pack_fours(int64_t part, int64_t k, int64_t depth, uint8_t* to) const {
    const int64_t first = column + part * kDenseLanes, count = part_columns(part), whole = depth / 4 * 4;
    const int64_t done = args.transpose_b ? whole : 0;
    if (done > 0) {
      on.kernels.dense_transpose({DenseElement::kF32, b_at(first * args.ldb + k), args.ldb, count, whole / 4,
                                  reinterpret_cast<float*>(to)});
    }
    if (done < depth) std::fill(to + whole * kDenseLanes, to + (depth + 3) / 4 * 4 * kDenseLanes, uint8_t{0});
    for (int64_t i = done; i < depth; ++i) {
      const uint8_t* from =
          args.transpose_b ? b_at(first * args.ldb + k + i) : b_at((k + i) * args.ldb + first);
      const int64_t step = args.transpose_b ? args.ldb : 1;
      uint8_t* const at = to + i / 4 * 4 * kDenseLanes + i % 4;
      for (int64_t c = 0; c < count; ++c) at[4 * c] = from[c * step];
    }
  }
  void store() const {
    for (int64_t part = 0; part < parts(); ++part) {
      const int64_t first = column + part * kDenseLanes, count = part_columns(part);
      for (int64_t r = 0; r < rows; ++r)
        store_row(scratch.sums + part * part_sums + r * kDenseLanes, row + r, first, count);
    }
  }
  void store_row(float* y, int64_t at, int64_t first, int64_t count) const {
    if (args.alpha != 1.0f) {
      for (int64_t c = 0; c < count; ++c) y[c] *= args.alpha;
    }
    if (args.bias != nullptr) {
      for (int64_t c = 0; c < count; ++c) y[c] += args.bias[first + c];
    }
    if (values != nullptr) {
      std::copy_n(y, count, values + at * args.n + first);
      return;
    }
    activate(on.kernels, args.activation, y, count);
    put_outputs(on, args, y, at, first, count);
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

// Rows and columns of a task: as many as it can have where every thread has a few of them.
struct TaskSize {
  int64_t rows, columns;

  int64_t tasks(const mr_gemm_args& args) const { return down(args) * across(args); }
  int64_t down(const mr_gemm_args& args) const { return (args.m + rows - 1) / rows; }
  int64_t across(const mr_gemm_args& args) const { return (args.n + columns - 1) / columns; }
};
TaskSize task_size(const Context& on, const mr_gemm_args& args, bool tiles) {
  constexpr int64_t kTasksEach = 4;
  TaskSize size = tiles ? TaskSize{kAmxRows, kAmxParts * kDenseLanes} : TaskSize{kRows, kParts * kDenseLanes};
  const auto few = [&] { return on.pool.size() > 1 && size.tasks(args) < kTasksEach * on.pool.size(); };
  if (!tiles && few()) size.columns = kDenseLanes;
  while (tiles && few() && size.columns > kDenseLanes) {
    size.columns /= 2;
    if (few() && size.rows > kRows) size.rows /= 2;
  }
  if (tiles && is_few(args) && args.transpose_b != 0) size.columns = kDenseLanes;
  return size;
}

void run_tiles(const Context& on, const mr_gemm_args& args, void* workspace, bool continues) {
  Arena one(nullptr);
  take_scratch(one);
  auto* const base = static_cast<uint8_t*>(workspace);
  float* const values =
      goes_by_rows(args) ? reinterpret_cast<float*>(base + static_cast<size_t>(on.pool.size()) * one.used())
                         : nullptr;
  const bool tiles = by_tiles(on, args) && !continues;
  const TaskSize size = task_size(on, args, tiles);
  const int64_t across = size.across(args);
  on.pool.parallel_for(size.tasks(args), 1, [&](int64_t begin, int64_t end, int thread) {
    Arena arena(base + static_cast<size_t>(thread) * one.used());
    const DenseScratch scratch = take_scratch(arena);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across * size.rows, column = i % across * size.columns;
      const Tile tile{on,
                      args,
                      scratch,
                      values,
                      continues,
                      row,
                      column,
                      std::min(size.rows, args.m - row),
                      std::min(size.columns, args.n - column),
                      tiles};
      tile.run();
      tile.store();
    }
  });
  if (values == nullptr) return;
  on.pool.parallel_for(args.m, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) finish_row(on, args, values + row * args.n, row);
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
