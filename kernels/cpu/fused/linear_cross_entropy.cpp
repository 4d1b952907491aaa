// Classes go in chunks, and under each of them rows: a chunk's logits [rows, classes] are one product, become
// dlogits where they lie, and are multiplied into both gradients while the second-level cache or memory still
// has them. 6 rows vocab in operations and never more than chunk_rows x chunk_vocab logits.
//
// Sums over rows and over classes are sums of blocks of 256 (dense_gemm_add), added in order, and chunks are
// whole blocks: bits do not depend on them, and 200,000 terms lose no more than a thousand. They are kept in
// float32, in the result itself where it is float32, else in the workspace.
#include "kernels/cpu/fused/linear_cross_entropy.h"

#include <algorithm>

#include "kernels/cpu/arena.h"
#include "kernels/cpu/fused/fused_parts.h"
#include "kernels/cpu/matmul/dense_gemm.h"

namespace millrace::cpu {

static_assert(kDenseDepth == MR_CROSS_ENTROPY_BLOCK);

namespace {

using Args = mr_linear_cross_entropy_backward_args;

struct Scratch {
  float* logits;    // [chunk_rows, chunk_vocab]
  mr_rows dhidden;  // [rows, in] float32: the sums, or none
  mr_rows dweight;  // [chunk_vocab, in] float32: those of a chunk where dweight is not float32
  uint8_t* gemm;
};

bool keeps_sums(const mr_rows& out) { return out.data != nullptr && out.type != MR_F32; }

Scratch take_scratch(Arena& arena, const Args& args, int threads) {
  Scratch s{};
  s.logits = arena.take<float>(args.chunk_rows * args.chunk_vocab);
  s.dhidden = keeps_sums(args.dhidden) ? mr_rows{arena.take<float>(args.rows * args.in), MR_F32, args.in}
                                       : args.dhidden;
  if (keeps_sums(args.dweight)) s.dweight = {arena.take<float>(args.chunk_vocab * args.in), MR_F32, args.in};
  s.gemm = arena.take<uint8_t>(static_cast<int64_t>(dense_gemm_workspace_bytes({}, threads)));
  return s;
}

mr_gemm_args product_of(const mr_rows& a, bool transpose_a, const mr_rows& b, bool transpose_b, float* c,
                        int64_t ldc) {
  mr_gemm_args g{};
  g.type = a.type, g.a = a.data, g.lda = a.stride, g.transpose_a = transpose_a ? 1 : 0;
  g.b_type = b.type, g.b = b.data, g.ldb = b.stride, g.transpose_b = transpose_b ? 1 : 0;
  g.out_type = MR_F32, g.c = c, g.ldc = ldc;
  g.alpha = 1.0f;
  return g;
}

mr_rows from_row(const mr_rows& rows, int64_t row) {
  return {row_at(rows, row).data, rows.type, rows.stride};
}

struct Chunks {
  const Context& ctx;
  const Args& args;
  const Scratch& scratch;

  // c[m, n] += the product; `begin`: c holds nothing yet.
  void add(const mr_gemm_args& g, bool begin) const {
    if (begin) {
      const mr_rows c{g.c, MR_F32, g.ldc};
      each_row(ctx, g.m, g.n, [&](int64_t r) { fill_zeros(row_at(c, r), g.n); });
    }
    dense_gemm_add(ctx, g, scratch.gemm);
  }
  // Rows [row, row + rows) and classes [first, first + classes): dlogits, [rows, classes].
  mr_rows dlogits(int64_t row, int64_t rows, int64_t first, int64_t classes) const {
    mr_gemm_args g = product_of(from_row(args.hidden, row), false, from_row(args.weight, first), true,
                                scratch.logits, classes);
    g.m = rows, g.n = classes, g.k = args.in;
    dense_gemm(ctx, g, scratch.gemm);
    const mr_rows logits{scratch.logits, MR_F32, classes};
    each_part(ctx, rows, classes, [&](int64_t r, int64_t col, int64_t count) {
      const FloatRow part = row_at(logits, r, col);
      const int32_t target = args.targets[row + r];
      if (target == args.ignore_index) return fill_zeros(part, count);
      cross_entropy_gradient(ctx.kernels.fused, part, count, target - first - col, args.lse[row + r],
                             args.dloss[row + r], part);
    });
    return logits;
  }
  void add_dhidden(const mr_rows& dlogits, int64_t row, int64_t rows, int64_t first, int64_t classes) const {
    const mr_rows to = from_row(scratch.dhidden, row);
    mr_gemm_args g = product_of(dlogits, false, from_row(args.weight, first), false,
                                static_cast<float*>(to.data), to.stride);
    g.m = rows, g.n = args.in, g.k = classes;
    add(g, first == 0);
  }
  // Sums of these classes over the rows so far; `begin`: there are none yet.
  void add_dweight(const mr_rows& dlogits, int64_t row, int64_t rows, const mr_rows& to, int64_t classes,
                   bool begin) const {
    mr_gemm_args g =
        product_of(dlogits, true, from_row(args.hidden, row), false, static_cast<float*>(to.data), to.stride);
    g.m = classes, g.n = args.in, g.k = rows;
    add(g, begin);
  }
  void round_rows(const mr_rows& from, const mr_rows& to, int64_t rows, bool onto) const {
    each_row(ctx, rows, args.in, [&](int64_t r) {
      ctx.kernels.fused.scale(row_at(from, r), args.in, 1.0f, row_at(to, r), onto);
    });
  }
};

}  // namespace

size_t linear_cross_entropy_backward_bytes(const Args& args, int threads) {
  Arena count(nullptr);
  take_scratch(count, args, threads);
  return count.used();
}

void linear_cross_entropy_backward(const Context& ctx, const Args& args, void* workspace) {
  check_classes(args.targets, args.rows, args.vocab, &args.ignore_index, "args.targets");
  const bool accumulate = args.accumulate != 0;
  if (args.rows == 0) {
    if (args.dweight.data == nullptr || accumulate) return;
    each_row(ctx, args.vocab, args.in, [&](int64_t v) { fill_zeros(row_at(args.dweight, v), args.in); });
    return;
  }
  Arena arena(static_cast<uint8_t*>(workspace));
  const Scratch scratch = take_scratch(arena, args, ctx.pool.size());
  const Chunks chunks{ctx, args, scratch};
  const bool sums_apart = keeps_sums(args.dweight);
  for (int64_t first = 0; first < args.vocab; first += args.chunk_vocab) {
    const int64_t classes = std::min(args.chunk_vocab, args.vocab - first);
    const mr_rows dweight = sums_apart ? scratch.dweight : from_row(args.dweight, first);
    for (int64_t row = 0; row < args.rows; row += args.chunk_rows) {
      const int64_t rows = std::min(args.chunk_rows, args.rows - row);
      const mr_rows dlogits = chunks.dlogits(row, rows, first, classes);
      if (args.dhidden.data != nullptr) chunks.add_dhidden(dlogits, row, rows, first, classes);
      if (args.dweight.data != nullptr)
        chunks.add_dweight(dlogits, row, rows, dweight, classes, row == 0 && (sums_apart || !accumulate));
    }
    if (sums_apart) chunks.round_rows(dweight, from_row(args.dweight, first), classes, accumulate);
  }
  if (keeps_sums(args.dhidden)) chunks.round_rows(scratch.dhidden, args.dhidden, args.rows, false);
}

}  // namespace millrace::cpu
