#include "kernels/cpu/attention/flash_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "kernels/cpu/attention/flash_task.h"

namespace millrace::cpu {
namespace {

constexpr int32_t kKeysPerScale = 128;

int32_t flash_ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

FlashType flash_type(mr_dtype type) {
  return type == MR_F32    ? FlashType::kF32
         : type == MR_F16  ? FlashType::kF16
         : type == MR_BF16 ? FlashType::kBF16
                           : FlashType::kFp8;
}
int64_t flash_element_size(FlashType type) {
  return type == FlashType::kF32 ? 4 : type == FlashType::kFp8 ? 1 : 2;
}

FlashProblem plain_problem(const mr_flash_problem& p) {
  FlashProblem to{p.heads,
                  p.kv_heads,
                  p.head_dim,
                  p.value_dim,
                  p.scale,
                  p.softcap,
                  p.window_left,
                  p.window_right,
                  p.sinks,
                  0,
                  0,
                  0,
                  nullptr,
                  nullptr,
                  flash_nodes(std::max(p.max_q, p.max_k))};
  if (p.blocks != nullptr) {
    to.block_q = p.blocks->block_q;
    to.block_k = p.blocks->block_k;
    to.q_blocks = p.blocks->q_blocks;
    to.row_starts = p.blocks->row_starts;
    to.columns = p.blocks->columns;
  }
  return to;
}

// Sequence b of a tensor whose sequences have their rows one after the other from `ragged` on (cu), or are a
// batch_stride apart.
FlashRows rows_of(const mr_flash_tensor& t, FlashType type, const int32_t* cu, int32_t b) {
  const int64_t size = flash_element_size(type);
  FlashRows rows;
  rows.type = type;
  rows.row_bytes = t.seq_stride * size;
  rows.head_bytes = t.head_stride * size;
  rows.data = static_cast<uint8_t*>(t.data);
  const int64_t offset = cu != nullptr ? cu[b] * rows.row_bytes : b * t.batch_stride * size;
  if (rows.data != nullptr) rows.data += offset;
  return rows;
}

void put_pages(const mr_flash_problem& p, const mr_flash_tensor& t, int32_t b, FlashRows& rows) {
  rows.data = static_cast<uint8_t*>(t.data);
  rows.pages = p.pages + b * p.pages_stride;
  rows.page_tokens = p.page_tokens;
  rows.page_bytes = t.batch_stride * flash_element_size(rows.type);
}

void put_scales(const mr_flash_problem& p, int32_t b, FlashSequence& s) {
  const int64_t first_query = p.cu_q != nullptr ? p.cu_q[b] : int64_t{b} * p.max_q;
  s.q.scales = p.q_scales + first_query * p.heads;
  s.q.scale_row = p.heads;
  s.q.scale_head = 1;
  const int64_t groups = flash_ceil_div(p.max_k, kKeysPerScale), first = int64_t{b} * p.kv_heads * groups;
  s.k.scales = p.k_scales + first;
  s.v.scales = p.v_scales + first;
  for (FlashRows* rows : {&s.k, &s.v}) {
    rows->rows_per_scale = kKeysPerScale;
    rows->scale_row = 1;
    rows->scale_head = groups;
  }
}

int32_t query_length(const mr_flash_problem& p, int32_t b) {
  return p.cu_q == nullptr ? p.max_q : p.cu_q[b + 1] - p.cu_q[b];
}
int32_t key_length(const mr_flash_problem& p, int32_t b) {
  if (p.pages != nullptr) return p.k_lengths[b];
  return p.cu_k == nullptr ? p.max_k : p.cu_k[b + 1] - p.cu_k[b];
}

FlashSequence sequence_of(const mr_flash_problem& p, const FlashTensors& t, const FlashWorkspace& w,
                          int32_t b) {
  const FlashType type = flash_type(p.type);
  const FlashType out_type = t.partial()               ? FlashType::kF32
                             : type == FlashType::kFp8 ? FlashType::kBF16
                                                       : type;
  const int32_t* cu_k = p.pages == nullptr ? p.cu_k : nullptr;
  FlashSequence s{};
  s.q = rows_of(t.q, type, p.cu_q, b);
  s.k = rows_of(t.k, type, cu_k, b);
  s.v = rows_of(t.v, type, cu_k, b);
  s.out = rows_of(t.out, out_type, p.cu_q, b);
  if (p.pages != nullptr) {
    put_pages(p, t.k, b, s.k);
    put_pages(p, t.v, b, s.v);
  }
  if (type == FlashType::kFp8) put_scales(p, b, s);
  if (t.grads != nullptr) {
    s.d_out = rows_of(t.grads->d_out, type, p.cu_q, b);
    s.d_q = rows_of(t.grads->d_q, out_type, p.cu_q, b);
    s.d_k = rows_of(t.grads->d_k, out_type, cu_k, b);
    s.d_v = rows_of(t.grads->d_v, out_type, cu_k, b);
  }
  s.q_len = query_length(p, b);
  s.k_len = key_length(p, b);
  s.shift = t.partial() ? int64_t{t.q_first[b]} - t.k_first[b] : int64_t{s.k_len} - s.q_len;
  s.q_chunk = t.partial() ? t.q_first[b] / kFlashChunk : 0;
  s.k_chunk = t.partial() ? t.k_first[b] / kFlashChunk : 0;
  const int64_t first_row = p.cu_q != nullptr ? p.cu_q[b] : int64_t{b} * p.heads * p.max_q;
  s.row_stride = p.cu_q != nullptr ? p.cu_q[p.batch] : p.max_q;
  s.lse = t.lse == nullptr ? nullptr : t.lse + first_row;
  s.delta = w.delta == nullptr ? nullptr : w.delta + first_row;
  return s;
}

// How the heads of a group and the queries of a sequence make tiles of 64 rows.
struct QueryTiling {
  explicit QueryTiling(const FlashProblem& p)
      : group(p.heads / p.kv_heads),
        heads(p.block_q > 0 ? 1 : std::min(group, kFlashTile)),
        splits(flash_ceil_div(group, heads)),
        queries(kFlashTile / heads) {}
  int32_t group;    // heads of a KV head
  int32_t heads;    // of a tile
  int32_t splits;   // tiles that a group is cut into
  int32_t queries;  // of a tile
};

// Tiles of a task: as many as leave every thread a few tasks. A block-sparse task lies in one block.
int32_t tiles_per_task(const Context& ctx, const FlashProblem& p, int64_t tiles) {
  if (p.block_q > 0) return 1;
  constexpr int64_t kTasksPerThread = 4;  // so that the last ones end together
  return static_cast<int32_t>(
      std::clamp<int64_t>(tiles / (kTasksPerThread * ctx.pool.size()), 1, kFlashTiles));
}

// All query rows, the last queries first: with a causal mask they have the most keys.
void for_query_tiles(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                     const FlashWorkspace& w, FlashFn kernel) {
  const FlashProblem p = plain_problem(problem);
  const QueryTiling tiling(p);
  const int64_t each = int64_t{problem.batch} * p.kv_heads * tiling.splits;
  const int32_t queries =
      tiling.queries * tiles_per_task(ctx, p, each * flash_ceil_div(problem.max_q, tiling.queries));
  const int64_t tasks = flash_ceil_div(problem.max_q, queries);
  ctx.pool.parallel_for(tasks * each, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      const auto rest = static_cast<int32_t>(i % each), b = rest / (p.kv_heads * tiling.splits);
      const int32_t split = rest % tiling.splits, kv_head = rest / tiling.splits % p.kv_heads;
      const auto first = static_cast<int32_t>((tasks - 1 - i / each) * queries);
      const FlashSequence s = sequence_of(problem, tensors, w, b);
      if (first >= s.q_len) continue;
      const int32_t head = kv_head * tiling.group + split * tiling.heads;
      const int32_t num_heads = std::min(tiling.heads, tiling.group - split * tiling.heads);
      const int32_t count = std::min(queries, s.q_len - first) * num_heads;
      kernel({&p, &s, b, head, num_heads, kv_head, first, count, tiling.queries,
              w.scratch + thread * w.scratch_floats});
    }
  });
}

void for_key_tiles(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                   const FlashWorkspace& w, FlashFn kernel) {
  const FlashProblem p = plain_problem(problem);
  const int32_t group = p.heads / p.kv_heads;
  const int64_t each = int64_t{problem.batch} * p.kv_heads;
  const int32_t keys = kFlashTile * tiles_per_task(ctx, p, each * flash_ceil_div(problem.max_k, kFlashTile));
  const int64_t tasks = flash_ceil_div(problem.max_k, keys);
  ctx.pool.parallel_for(tasks * each, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      const auto rest = static_cast<int32_t>(i % each), b = rest / p.kv_heads, kv_head = rest % p.kv_heads;
      const auto first = static_cast<int32_t>(i / each * keys);
      const FlashSequence s = sequence_of(problem, tensors, w, b);
      if (first >= s.k_len) continue;
      kernel({&p, &s, b, kv_head * group, group, kv_head, first, std::min(keys, s.k_len - first), kFlashTile,
              w.scratch + thread * w.scratch_floats});
    }
  });
}

// d_sinks[h] = -sum over rows of exp(sink - lse) * delta, in double: rows of a chunk in order, then chunks in
// order.
void sink_gradients(const Context& ctx, const mr_flash_problem& p, const FlashTensors& t,
                    const FlashWorkspace& w) {
  ctx.pool.parallel_for(p.heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t h = begin; h < end; ++h) {
      double sum = 0;
      const double sink = p.sinks[h];
      for (int32_t b = 0; b < p.batch && sink != -std::numeric_limits<double>::infinity(); ++b) {
        const FlashSequence s = sequence_of(p, t, w, b);
        for (int32_t first = 0; first < s.q_len; first += kFlashChunk) {
          const int64_t at = h * s.row_stride + first;
          sum += flash_sink_gradient(sink, s.lse + at, s.delta + at, std::min(kFlashChunk, s.q_len - first));
        }
      }
      t.grads->d_sinks[h] = static_cast<float>(sum);
    }
  });
}

// Rows of one head in groups that a table takes at once: f(head, first row, rows).
template <class F>
void for_row_groups(const Context& ctx, int64_t rows, int32_t heads, const F& f) {
  constexpr int32_t kRows = 16, kGroupsPerTask = 16;
  const int64_t groups = (rows + kRows - 1) / kRows;
  ctx.pool.parallel_for(groups * heads, kGroupsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const auto head = static_cast<int32_t>(i / groups), first = static_cast<int32_t>(i % groups * kRows);
      f(head, first, std::min(kRows, static_cast<int32_t>(rows - first)));
    }
  });
}

// Starts of sequences: from 0, none longer than `longest`.
void check_starts(const int32_t* starts, int32_t batch, int32_t longest, const char* name) {
  if (starts[0] != 0) throw_error(ErrorCode::kBadInput, "{}[0] is {}, expected 0", name, starts[0]);
  for (int32_t b = 0; b < batch; ++b) {
    const int64_t length = int64_t{starts[b + 1]} - starts[b];
    if (length < 0 || length > longest) {
      throw_error(ErrorCode::kBadInput, "{}: sequence {} has {} rows, expected 0 to {}", name, b, length,
                  longest);
    }
  }
}

void check_pages(const mr_flash_problem& p) {
  for (int32_t b = 0; b < p.batch; ++b) {
    if (p.k_lengths[b] < 0 || p.k_lengths[b] > p.max_k) {
      throw_error(ErrorCode::kBadInput, "problem.k_lengths[{}] is {}, expected 0 to {}", b, p.k_lengths[b],
                  p.max_k);
    }
    for (int32_t i = 0; i < flash_ceil_div(p.k_lengths[b], p.page_tokens); ++i) {
      const int32_t page = p.pages[b * p.pages_stride + i];
      if (page < 0) {
        throw_error(ErrorCode::kBadInput, "problem.pages: entry {} of sequence {} is {}, expected 0 or more",
                    i, b, page);
      }
    }
  }
}

void check_block_lists(const mr_flash_problem& p) {
  const mr_flash_blocks& blocks = *p.blocks;
  const int64_t rows = int64_t{p.batch} * p.heads * blocks.q_blocks;
  const int32_t k_blocks = flash_ceil_div(p.max_k, blocks.block_k);
  if (blocks.row_starts[0] < 0) {
    throw_error(ErrorCode::kBadInput, "blocks.row_starts[0] is {}, expected 0 or more", blocks.row_starts[0]);
  }
  for (int64_t n = 0; n < rows; ++n) {
    if (blocks.row_starts[n + 1] < blocks.row_starts[n]) {
      throw_error(ErrorCode::kBadInput, "blocks.row_starts[{}] is {}, expected at least {}", n + 1,
                  blocks.row_starts[n + 1], blocks.row_starts[n]);
    }
    int32_t least = 0;
    for (int32_t i = blocks.row_starts[n]; i < blocks.row_starts[n + 1]; ++i) {
      const int32_t column = blocks.columns[i];
      if (column < least || column >= k_blocks) {
        throw_error(ErrorCode::kBadInput, "blocks.columns[{}] is {}, expected {} to {}, ascending", i, column,
                    least, k_blocks - 1);
      }
      least = column + 1;
    }
  }
}

}  // namespace

void check_flash(const mr_flash_problem& p) {
  if (p.cu_q != nullptr) check_starts(p.cu_q, p.batch, p.max_q, "problem.cu_q");
  if (p.pages != nullptr) {
    check_pages(p);
  } else if (p.cu_k != nullptr) {
    check_starts(p.cu_k, p.batch, p.max_k, "problem.cu_k");
  }
  if (p.blocks != nullptr) check_block_lists(p);
}

FlashWorkspace take_flash_workspace(Arena& arena, const mr_flash_problem& problem, int threads,
                                    bool backward) {
  constexpr int64_t kLine = 16;  // floats of a cache line: threads share none
  FlashWorkspace w{};
  const int64_t floats = flash_scratch_floats(problem.head_dim, problem.value_dim,
                                              flash_nodes(std::max(problem.max_q, problem.max_k)));
  w.scratch_floats = (floats + kLine - 1) / kLine * kLine;
  w.scratch = arena.take<float>(threads * w.scratch_floats);
  if (backward) w.delta = arena.take<float>(int64_t{problem.batch} * problem.heads * problem.max_q);
  return w;
}

void flash_forward(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                   const FlashWorkspace& workspace) {
  for_query_tiles(ctx, problem, tensors, workspace, ctx.kernels.flash_forward);
}

void flash_backward(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                    const FlashWorkspace& workspace) {
  for_query_tiles(ctx, problem, tensors, workspace, ctx.kernels.flash_delta);
  for_query_tiles(ctx, problem, tensors, workspace, ctx.kernels.flash_backward_queries);
  for_key_tiles(ctx, problem, tensors, workspace, ctx.kernels.flash_backward_keys);
  if (tensors.grads->d_sinks != nullptr) sink_gradients(ctx, problem, tensors, workspace);
}

void flash_partial_backward(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                            const FlashWorkspace& workspace) {
  for_query_tiles(ctx, problem, tensors, workspace, ctx.kernels.flash_backward_queries);
  for_key_tiles(ctx, problem, tensors, workspace, ctx.kernels.flash_backward_keys);
}

void flash_delta(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                 const FlashWorkspace& workspace) {
  for_query_tiles(ctx, problem, tensors, workspace, ctx.kernels.flash_delta);
}

void flash_merge(const Context& ctx, const mr_flash_merge_args& args) {
  const int64_t row = int64_t{args.heads} * args.dim;
  for_row_groups(ctx, args.rows, args.heads, [&](int32_t head, int32_t first, int32_t count) {
    const int64_t at = first * row + int64_t{head} * args.dim, lse = head * args.rows + first;
    ctx.kernels.flash_merge_rows(
        {args.out + at, args.other_out + at, args.lse == nullptr ? nullptr : args.lse + lse,
         args.lse == nullptr ? nullptr : args.other_lse + lse, row, count, args.dim});
  });
}

void flash_finish(const Context& ctx, const mr_flash_finish_args& args) {
  const int64_t row = int64_t{args.heads} * args.dim;
  const FlashRows out = rows_of(args.out, flash_type(args.type), nullptr, 0);
  for_row_groups(ctx, args.rows, args.heads, [&](int32_t head, int32_t first, int32_t count) {
    const int64_t lse = head * args.rows + first;
    ctx.kernels.flash_finish_rows({args.partial + first * row + int64_t{head} * args.dim,
                                   args.partial_lse == nullptr ? nullptr : args.partial_lse + lse, row, out,
                                   args.lse == nullptr ? nullptr : args.lse + lse,
                                   args.sinks == nullptr ? 0.0f : args.sinks[head], args.sinks != nullptr,
                                   head, first, count, args.dim});
  });
}

double flash_sink_gradient(double sink, const float* lse, const float* delta, int64_t rows) {
  double sum = 0;
  for (int64_t i = 0; i < rows; ++i) sum -= std::exp(sink - lse[i]) * delta[i];
  return sum;
}

}  // namespace millrace::cpu
