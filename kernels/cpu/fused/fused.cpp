#include "kernels/cpu/fused/fused.h"

#include <array>
#include <numeric>

#include "kernels/cpu/fused/fused_parts.h"

namespace millrace::cpu {
namespace {

// Blocks of rows whose sums of dweight and dbias are taken apart and then added in order.
constexpr int64_t kMaxBlocks = 64, kMinRowsOfBlock = 16;
constexpr int64_t kKeptExps = 4096;  // floats of a row of softmax: 16 KiB
constexpr int64_t kMaxHalf = 2048;   // frequencies of a head of 4,096 dimensions

int64_t rows_of_block(int64_t rows) {
  return std::max(kMinRowsOfBlock, (rows + kMaxBlocks - 1) / kMaxBlocks);
}
int64_t blocks_of(int64_t rows) { return (rows + rows_of_block(rows) - 1) / rows_of_block(rows); }

}  // namespace

// ---------------------------------------------------------------- norms

void norm_rows_fused(const Context& ctx, const mr_norm_args& args) {
  each_row(ctx, args.rows, args.cols, [&](int64_t r) {
    const int64_t next = row_after(r, args.rows);
    NormRow op{};
    op.kind = args.kind;
    op.cols = args.cols;
    op.x = row_at(args.x, r);
    op.residual = row_at(args.residual, r);
    op.sum = row_at(args.sum, r);
    op.y = row_at(args.y, r);
    op.weight = row_of(args.weight);
    op.bias = row_of(args.bias);
    op.weight_offset = args.weight_offset;
    op.eps = args.eps;
    op.mean = args.mean == nullptr ? nullptr : args.mean + r;
    op.rstd = args.rstd == nullptr ? nullptr : args.rstd + r;
    op.quantize = args.quantize;
    if (args.quantize != MR_QUANTIZE_NONE) {
      op.codes = static_cast<uint8_t*>(args.codes) + r * args.codes_stride;
      op.scales = args.scales + r * args.scales_stride;
    }
    op.next[0] = row_at(args.x, next);
    op.next[1] = row_at(args.residual, next);
    ctx.kernels.fused.norm(op);
  });
}

size_t norm_backward_bytes(const mr_norm_backward_args& args) {
  if (args.dweight.data == nullptr && args.dbias.data == nullptr) return 0;
  return static_cast<size_t>(blocks_of(args.rows) * 2 * args.cols) * sizeof(float);
}

void norm_rows_backward(const Context& ctx, const mr_norm_backward_args& args, void* workspace) {
  const int64_t cols = args.cols, blocks = blocks_of(args.rows), per_block = rows_of_block(args.rows);
  auto* partials = static_cast<float*>(workspace);  // [blocks][2][cols]: dweight, dbias
  const bool wants_weight = args.dweight.data != nullptr, wants_bias = args.dbias.data != nullptr;
  ctx.pool.parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t block = begin; block < end; ++block) {
      float* dweight = wants_weight ? partials + block * 2 * cols : nullptr;
      float* dbias = wants_bias ? partials + block * 2 * cols + cols : nullptr;
      if (wants_weight) std::fill_n(dweight, cols, 0.0f);
      if (wants_bias) std::fill_n(dbias, cols, 0.0f);
      const int64_t last = std::min(args.rows, (block + 1) * per_block);
      for (int64_t r = block * per_block; r < last; ++r) {
        NormBackwardRow op{};
        op.kind = args.kind;
        op.cols = cols;
        op.x = row_at(args.x, r);
        op.dy = row_at(args.dy, r);
        op.dsum = row_at(args.dsum, r);
        op.dx = row_at(args.dx, r);
        op.weight = row_of(args.weight);
        op.weight_offset = args.weight_offset;
        op.mean = args.kind == MR_NORM_LAYER ? args.mean[r] : 0.0f;
        op.rstd = args.rstd[r];
        op.dweight = dweight;
        op.dbias = dbias;
        op.next[0] = row_at(args.x, row_after(r, args.rows));
        op.next[1] = row_at(args.dy, row_after(r, args.rows));
        ctx.kernels.fused.norm_backward(op);
      }
    }
  });
  std::array<int32_t, kMaxBlocks> in_order;
  std::iota(in_order.begin(), in_order.end(), 0);
  const auto add_up = [&](const mr_vector& to, int64_t offset) {
    if (to.data == nullptr) return;
    each_part(ctx, 1, cols, [&](int64_t, int64_t col, int64_t count) {
      const FloatRow from{partials == nullptr ? nullptr : partials + offset + col, MR_F32};
      ctx.kernels.fused.sum_rows(from, 2 * cols, in_order.data(), blocks, count, 1.0f, row_of(to, col),
                                 false);
    });
  };
  add_up(args.dweight, 0);
  add_up(args.dbias, cols);
}

// ---------------------------------------------------------------- rotary, activations, softmax, dropout

void rotary_rows_fused(const Context& ctx, const mr_rotary_args& args) {
  const int64_t half = args.rotary.num_freqs;
  const int64_t cols = static_cast<int64_t>(args.heads) * args.head_dim;
  each_row(ctx, args.rows, cols, [&](int64_t r) {
    float cosines[kMaxHalf], sines[kMaxHalf];
    ctx.kernels.fused.rotary_angles(args.rotary.inv_freq, half, args.positions[r], args.rotary.magnitude,
                                    cosines, sines);
    if (args.inverse != 0) {
      for (int64_t i = 0; i < half; ++i) sines[i] = -sines[i];
    }
    for (int64_t h = 0; h < args.heads; ++h) {
      const int64_t col = h * args.head_dim;
      ctx.kernels.fused.rotate(row_at(args.x, r, col), cosines, sines, half, args.rotary.interleaved != 0,
                               args.head_dim, row_at(args.y, r, col));
    }
  });
}

void activation_rows(const Context& ctx, const mr_activation_args& args) {
  each_part(ctx, args.rows, args.cols, [&](int64_t r, int64_t col, int64_t count) {
    ctx.kernels.fused.activation({args.kind, count, row_at(args.x, r, col), row_at(args.up, r, col),
                                  row_at(args.y, r, col), args.alpha, args.limit});
  });
}

void activation_rows_backward(const Context& ctx, const mr_activation_backward_args& args) {
  each_part(ctx, args.rows, args.cols, [&](int64_t r, int64_t col, int64_t count) {
    ctx.kernels.fused.activation_backward({args.kind, count, row_at(args.x, r, col), row_at(args.up, r, col),
                                           row_at(args.dy, r, col), row_at(args.dx, r, col),
                                           row_at(args.dup, r, col), args.alpha, args.limit});
  });
}

void softmax_rows(const Context& ctx, const mr_softmax_args& args) {
  const FusedKernels& kernels = ctx.kernels.fused;
  each_row(ctx, args.rows, args.cols, [&](int64_t r) {
    float exps[kKeptExps];  // an exp takes longer than a float's way to the first-level cache and back
    const bool keep = args.cols <= kKeptExps;
    const FloatRow x = row_at(args.x, r), y = row_at(args.y, r);
    const RowSum of = kernels.row_sum(x, args.cols, args.scale, keep ? exps : nullptr,
                                      row_at(args.x, row_after(r, args.rows)));
    if (keep) {
      kernels.scale({exps, MR_F32}, args.cols, 1.0f / of.sum, y, false);
    } else {
      kernels.softmax(x, args.cols, args.scale, of.max, 1.0f / of.sum, y);
    }
  });
}

void softmax_rows_backward(const Context& ctx, const mr_softmax_backward_args& args) {
  each_row(ctx, args.rows, args.cols, [&](int64_t r) {
    const int64_t next = row_after(r, args.rows);
    ctx.kernels.fused.softmax_backward(row_at(args.y, r), row_at(args.dy, r), args.cols, args.scale,
                                       row_at(args.dx, r), {row_at(args.y, next), row_at(args.dy, next)});
  });
}

void dropout_rows(const Context& ctx, const mr_dropout_args& args) {
  const philox::Keys keys = philox::keys_of(args.seed);
  each_part(ctx, args.rows, args.cols, [&](int64_t r, int64_t col, int64_t count) {
    const DropoutRow op{row_at(args.x, r, col),
                        row_at(args.y, r, col),
                        col,
                        count,
                        static_cast<uint32_t>(r),
                        static_cast<uint32_t>(args.offset),
                        static_cast<uint32_t>(args.offset >> 32),
                        philox::drop_below(args.p),
                        philox::keep_scale(args.p)};
    ctx.kernels.fused.dropout(op, keys);
  });
}

}  // namespace millrace::cpu
