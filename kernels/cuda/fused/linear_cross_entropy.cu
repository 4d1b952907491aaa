// Gradients of cross-entropy over hidden states times a weight, with no logits kept: classes go in chunks,
// and under each of them rows. A chunk's logits are one product (bf16 and f16 by the dense kernels, else by
// the split one), become dlogits where they lie, float32, and are multiplied into both gradients by the split
// product (gemm/split.h), whose sums over rows and classes are blocks of 256 added in order: chunks are whole
// blocks, and bits do not depend on them.
//
// Roofline: the products; dlogits are written and read once at 8 bytes for 6 times `in` operations.
#include <algorithm>

#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/online_sum.cuh"
#include "kernels/cuda/gemm/dense.h"
#include "kernels/cuda/gemm/split.h"

namespace millrace::cuda {
namespace {

using Args = mr_linear_cross_entropy_backward_args;

// Classes [first, first + cols of the part) of rows from `row` on, in place.
struct LogitGradientOp {
  Rows logits;
  const int32_t* targets;
  int32_t ignore_index;
  const float *lse, *dloss;
  int64_t first;
  struct Loaded {
    Raw8 logits;
    float lse, dloss;
    int32_t target;
  };
  __device__ Loaded load(int64_t row, int64_t col, int n) const {
    return {load8(logits, row, col, n), lse[row], dloss[row], targets[row]};
  }
  __device__ void finish(const Loaded& l, int64_t row, int64_t col, int n) const {
    Values8 v = to_float(logits, l.logits);
    const bool ignored = l.target == ignore_index;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float p = exp_of(v.v[i] - l.lse) - (first + col + i == l.target ? 1.0f : 0.0f);
      v.v[i] = ignored ? 0.0f : l.dloss * p;
    }
    store8(logits, row, col, n, v);
  }
};

// to = from, or to += from, rounded once.
struct RoundOp {
  Rows from, to;
  int32_t onto;
  struct Loaded {
    Raw8 from, to;
  };
  __device__ Loaded load(int64_t row, int64_t col, int n) const {
    return {load8(from, row, col, n), onto ? load8(to, row, col, n) : Raw8{}};
  }
  __device__ void finish(const Loaded& l, int64_t row, int64_t col, int n) const {
    Values8 v = to_float(from, l.from);
    if (onto) {
      const Values8 before = to_float(to, l.to);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) v.v[i] += before.v[i];
    }
    store8(to, row, col, n, v);
  }
};

struct Scratch {
  mr_rows logits;   // [chunk_rows, chunk_vocab]
  mr_rows dhidden;  // [rows, in]: the sums, or none
  mr_rows dweight;  // [chunk_vocab, in]: those of a chunk where dweight is not float32
};

bool keeps_sums(const mr_rows& out) { return out.data != nullptr && out.type != MR_F32; }

// With a null base it counts.
size_t take_scratch(const Args& args, uint8_t* base, Scratch& s) {
  size_t used = 0;
  const auto take = [&](int64_t rows, int64_t stride) {
    uint8_t* at = base == nullptr ? nullptr : base + used;
    used += (static_cast<size_t>(rows * stride) * sizeof(float) + 255) / 256 * 256;
    return mr_rows{at, MR_F32, stride};
  };
  // Rows of whole 16 bytes, whatever the last chunk has: the product's kernel must not depend on it.
  s.logits = take(args.chunk_rows, (args.chunk_vocab + 3) / 4 * 4);
  s.dhidden = keeps_sums(args.dhidden) ? take(args.rows, args.in) : args.dhidden;
  s.dweight = keeps_sums(args.dweight) ? take(args.chunk_vocab, args.in) : mr_rows{};
  return used;
}

mr_rows from_row(const mr_rows& rows, int64_t row) {
  return {static_cast<uint8_t*>(rows.data) + row * rows.stride * (rows.type == MR_F32 ? 4 : 2), rows.type,
          rows.stride};
}

SplitOperand operand_of(const mr_rows& rows, bool k_major) {
  SplitOperand p;
  p.type = rows.type == MR_F32 ? SplitType::kF32 : rows.type == MR_F16 ? SplitType::kF16 : SplitType::kBf16;
  p.data = rows.data, p.ld = rows.stride, p.k_major = k_major;
  return p;
}

// c[m, n] (+)= a b, sums in c.
void launch_sums(const SplitOperand& a, const SplitOperand& b, int64_t m, int64_t n, int64_t k,
                 const mr_rows& c, bool accumulate, const Launch& at) {
  SplitGemm g;
  g.a = a, g.b = b, g.m = m, g.n = n, g.k = k;
  g.c = c.data, g.ldc = c.stride, g.accumulate = accumulate;
  launch_split(g, at);
}

void launch_logits(const mr_rows& hidden, const mr_rows& weight, int64_t rows, int64_t classes, int64_t in,
                   const mr_rows& logits, const Launch& at) {
  if (hidden.type != weight.type || hidden.type == MR_F32)
    return launch_sums(operand_of(hidden, true), operand_of(weight, true), rows, classes, in, logits, false,
                       at);
  DenseGemm g;
  g.type = hidden.type == MR_F16 ? DenseType::kF16 : DenseType::kBf16;
  g.a = hidden.data, g.lda = hidden.stride, g.b = weight.data, g.ldb = weight.stride;
  g.m = rows, g.n = classes, g.k = in;
  g.c = logits.data, g.ldc = logits.stride;
  launch_dense(g, at);
}

void launch_round(const mr_rows& from, const mr_rows& to, int64_t rows, int64_t in, bool onto,
                  const Launch& at) {
  launch_each_row("rounding of gradients", RoundOp{rows_of(from), rows_of(to), onto}, rows, in, at);
}

}  // namespace

size_t linear_cross_entropy_backward_bytes(const Args& args) {
  Scratch none;
  return take_scratch(args, nullptr, none);
}

void launch_linear_cross_entropy_backward(const Args& args, void* workspace, const Launch& at) {
  const bool accumulate = args.accumulate != 0;
  if (args.rows == 0) {
    if (args.dweight.data == nullptr || accumulate) return;
    const auto bytes = static_cast<size_t>(args.dweight.type == MR_F32 ? 4 : 2);
    check_call(
        cudaMemset2DAsync(args.dweight.data, static_cast<size_t>(args.dweight.stride) * bytes, 0,
                          static_cast<size_t>(args.in) * bytes, static_cast<size_t>(args.vocab), at.stream),
        "cudaMemset2DAsync");
    return;
  }
  Scratch s;
  take_scratch(args, static_cast<uint8_t*>(workspace), s);
  const bool sums_apart = keeps_sums(args.dweight);
  for (int64_t first = 0; first < args.vocab; first += args.chunk_vocab) {
    const int64_t classes = std::min(args.chunk_vocab, args.vocab - first);
    const mr_rows weight = from_row(args.weight, first);
    const mr_rows dweight = sums_apart                     ? s.dweight
                            : args.dweight.data != nullptr ? from_row(args.dweight, first)
                                                           : mr_rows{};
    for (int64_t row = 0; row < args.rows; row += args.chunk_rows) {
      const int64_t rows = std::min(args.chunk_rows, args.rows - row);
      const mr_rows hidden = from_row(args.hidden, row);
      launch_logits(hidden, weight, rows, classes, args.in, s.logits, at);
      launch_each_row("gradient of logits",
                      LogitGradientOp{rows_of(s.logits), args.targets + row, args.ignore_index,
                                      args.lse + row, args.dloss + row, first},
                      rows, classes, at);
      if (args.dhidden.data != nullptr)
        launch_sums(operand_of(s.logits, true), operand_of(weight, false), rows, args.in, classes,
                    from_row(s.dhidden, row), first > 0, at);
      if (args.dweight.data != nullptr)
        launch_sums(operand_of(s.logits, false), operand_of(hidden, false), classes, args.in, rows, dweight,
                    row > 0 || (accumulate && !sums_apart), at);
    }
    if (sums_apart) launch_round(dweight, from_row(args.dweight, first), classes, args.in, accumulate, at);
  }
  if (keeps_sums(args.dhidden)) launch_round(s.dhidden, args.dhidden, args.rows, args.in, false, at);
}

}  // namespace millrace::cuda
