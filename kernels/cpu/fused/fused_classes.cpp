// The fused operations that are told classes: cross-entropy and embedding.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "kernels/cpu/fused/fused.h"
#include "kernels/cpu/fused/fused_parts.h"

namespace millrace::cpu {
namespace {

float element(const FloatRow& row, const FusedKernels& kernels) {
  float value = 0.0f;
  kernels.scale(row, 1, 1.0f, {&value, MR_F32}, false);
  return value;
}

void add_to(const FloatRow& row, float by, const FusedKernels& kernels) {
  kernels.scale({&by, MR_F32}, 1, 1.0f, row, true);
}

FloatRow at(const FloatRow& row, int64_t i) {
  return {static_cast<uint8_t*>(row.data) + i * (row.type == MR_F32 ? 4 : 2), row.type};
}

struct TokenOrder {
  int32_t* starts;     // [vocab + 1]: where the positions of a token begin
  int32_t* positions;  // [rows], by token, then in order
};
TokenOrder take_order(Arena& arena, int64_t rows, int64_t vocab) {
  auto* starts = arena.take<int32_t>(vocab + 1);
  return {starts, arena.take<int32_t>(rows)};
}

// A counting sort: stable.
void sort_by_token(const int32_t* tokens, int64_t rows, int64_t vocab, const TokenOrder& to) {
  std::fill_n(to.starts, vocab + 1, 0);
  for (int64_t t = 0; t < rows; ++t) ++to.starts[tokens[t]];
  int32_t before = 0;
  for (int64_t v = 0; v <= vocab; ++v) {  // where the positions of v end
    before += to.starts[v];
    to.starts[v] = before;
  }
  for (int64_t t = rows - 1; t >= 0; --t) to.positions[--to.starts[tokens[t]]] = static_cast<int32_t>(t);
}

}  // namespace

void check_classes(const int32_t* ids, int64_t count, int64_t classes, const int32_t* ignored,
                   const char* name) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= 0 && ids[i] < classes) continue;
    if (ignored != nullptr && ids[i] == *ignored) continue;
    throw_error(ErrorCode::kBadInput, "{}[{}] is {}, expected 0 to {}{}", name, i, ids[i], classes - 1,
                ignored == nullptr ? "" : ", or args.ignore_index");
  }
}

void fill_zeros(const FloatRow& row, int64_t count) {
  std::fill_n(static_cast<uint8_t*>(row.data), count * (row.type == MR_F32 ? 4 : 2), uint8_t{0});
}

void cross_entropy_gradient(const FusedKernels& kernels, const FloatRow& logits, int64_t count,
                            int64_t target, float lse, float dloss, const FloatRow& to) {
  const bool here = target >= 0 && target < count;
  const float logit = here ? element(at(logits, target), kernels) : 0.0f;  // `to` may lie there
  kernels.softmax(logits, count, 1.0f, lse, dloss, to);
  if (!here) return;
  // Rounded once, as the others are.
  fill_zeros(at(to, target), 1);
  add_to(at(to, target), dloss * (std::exp(logit - lse) - 1.0f), kernels);
}

void cross_entropy_rows(const Context& ctx, const mr_cross_entropy_args& args) {
  check_classes(args.targets, args.rows, args.vocab, &args.ignore_index, "args.targets");
  each_row(ctx, args.rows, args.vocab, [&](int64_t r) {
    const RowSum of = ctx.kernels.fused.row_sum(row_at(args.logits, r), args.vocab, 1.0f, nullptr,
                                                row_at(args.logits, row_after(r, args.rows)));
    const float lse = of.max + std::log(of.sum);
    const int32_t target = args.targets[r];
    args.lse[r] = lse;
    args.loss[r] =
        target == args.ignore_index ? 0.0f : lse - element(row_at(args.logits, r, target), ctx.kernels.fused);
  });
}

void cross_entropy_rows_backward(const Context& ctx, const mr_cross_entropy_backward_args& args) {
  check_classes(args.targets, args.rows, args.vocab, &args.ignore_index, "args.targets");
  const FusedKernels& kernels = ctx.kernels.fused;
  each_part(ctx, args.rows, args.vocab, [&](int64_t r, int64_t col, int64_t count) {
    const FloatRow to = row_at(args.dlogits, r, col);
    const int32_t target = args.targets[r];
    if (target == args.ignore_index) return fill_zeros(to, count);
    cross_entropy_gradient(kernels, row_at(args.logits, r, col), count, target - col, args.lse[r],
                           args.dloss[r], to);
  });
}

void embedding_rows(const Context& ctx, const mr_embedding_args& args) {
  check_classes(args.tokens, args.rows, args.vocab, nullptr, "args.tokens");
  each_row(ctx, args.rows, args.cols, [&](int64_t t) {
    ctx.kernels.fused.scale(row_at(args.table, args.tokens[t]), args.cols, args.scale, row_at(args.y, t),
                            false);
  });
}

size_t embedding_backward_bytes(const mr_embedding_backward_args& args) {
  Arena count(nullptr);
  take_order(count, args.rows, args.vocab);
  return count.used();
}

void embedding_rows_backward(const Context& ctx, const mr_embedding_backward_args& args, void* workspace) {
  check_classes(args.tokens, args.rows, args.vocab, nullptr, "args.tokens");
  Arena arena(static_cast<uint8_t*>(workspace));
  const TokenOrder order = take_order(arena, args.rows, args.vocab);
  sort_by_token(args.tokens, args.rows, args.vocab, order);
  const bool accumulate = args.accumulate != 0;
  each_row(ctx, args.vocab, args.cols, [&](int64_t v) {
    const int64_t count = order.starts[v + 1] - order.starts[v];
    if (accumulate && count == 0) return;
    ctx.kernels.fused.sum_rows(row_at(args.dy, 0), args.dy.stride, order.positions + order.starts[v], count,
                               args.cols, args.scale, row_at(args.dtable, v), accumulate);
  });
}

}  // namespace millrace::cpu
