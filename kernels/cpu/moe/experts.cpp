#include "kernels/cpu/moe/experts.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

constexpr int64_t kCombinedColumns = 512;  // of a token whose experts are added up at once, of a small batch

ActivationFormats inner_formats(const Context& ctx, const MoeExperts& op) {
  ActivationFormats formats = formats_for(ctx.kernels, {op.down}, op.rows, true);
  formats.float32 |= op.keep_inner || op.updates != nullptr;
  return formats;
}

// One call of moe_experts.
class ExpertsRun {
 public:
  ExpertsRun(const Context& ctx, const MoeExperts& op, MoeWorkspace& work)
      : ctx_(ctx),
        op_(op),
        work_(work),
        order_(work.order),
        gate_(*op.gate_up.gate.matrix),
        down_(*op.down.matrix),
        rows_(op.rows),
        hidden_(gate_.cols),
        out_cols_(down_.rows),
        inner_cols_(down_.cols),
        formats_(formats_for(ctx.kernels, {op.gate_up.gate, op.gate_up.up}, rows_, true)),
        inner_formats_(inner_formats(ctx, op)) {}

  void run();

 private:
  void quantize_missing();
  void gather_tiles();
  InnerActivations inner_at(int64_t sorted_row) const;
  InnerActivations own_inner_at(int64_t sorted_row) const;
  void exchange_inner();
  void find_runs(const ExpertUpdates::Product& product) const;
  std::span<const LowRankRun> runs_of(const ExpertUpdates::Product& product, int32_t expert) const;
  void gate_up_part(int32_t expert, int64_t first, int64_t count, const PrefetchHint& prefetch, int thread);
  void down_part(int32_t expert, int64_t first, int64_t count, const PrefetchHint& prefetch, int thread);
  template <class Part>
  void parallel_experts(const WeightMatrix& w, int64_t unit, int64_t per_task, Part part);
  template <class Part>
  void small_batch_experts(const WeightMatrix& w, int64_t unit, Part part);
  FirstReads first_reads_of_down(int64_t rows) const;
  void down_and_combine(const ShrinkingParts& parts);
  void combine(int64_t token, int64_t first, int64_t width) const;
  void combine_all();

  const Context& ctx_;
  const MoeExperts& op_;
  MoeWorkspace& work_;
  ExpertOrder& order_;
  const WeightMatrix &gate_, &down_;
  const int64_t rows_, hidden_, out_cols_, inner_cols_;  // inner_cols_: gate's rows, and those of others
  const ActivationFormats formats_, inner_formats_;
};

void ExpertsRun::quantize_missing() {
  ActivationFormats missing;
  missing.int8_blocks = formats_.int8_blocks && !op_.made.int8_blocks;
  missing.pow2_blocks = formats_.pow2_blocks && !op_.made.pow2_blocks;
  quantize_rows(ctx_, missing, op_.x, rows_, hidden_, work_.input);
}

// The rows of every expert, one after the other, as bf16 tiles of their own: a task is a group of an
// expert's. The first expert has the most.
void ExpertsRun::gather_tiles() {
  const int64_t groups = tasks_for(order_.rows_of(order_.active[0]), kTileHeight);
  ctx_.pool.parallel_for(order_.num_active * groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int32_t expert = order_.active[task % order_.num_active];
      const int64_t num_m = order_.rows_of(expert), at = order_.start[expert];
      const int64_t first = task / order_.num_active * bf16_tile_height(num_m);
      if (first >= num_m) continue;
      const Bf16TileRow to = bf16_tile_row(work_.input.bf16_tiles + at * hidden_, num_m, hidden_, first);
      const float* rows[kTileHeight];
      for (int64_t m = 0; m < to.height; ++m) {
        rows[m] = op_.x + order_.token_of[at + first + m] * hidden_;
      }
      ctx_.kernels.quantize_bf16_tile_group(rows, to.height, hidden_, to.at);
    }
  });
}

// The inner activations from a sorted row on.
InnerActivations ExpertsRun::inner_at(int64_t sorted_row) const {
  const int64_t at = sorted_row * inner_cols_;
  const QuantizedActivations& all = work_.inner_quantized;
  QuantizedActivations from{all.blocks + at / kQuantBlock, nullptr, nullptr};
  if (all.bf16_tiles != nullptr) {
    if (rows_ <= kMaxRowsAsBlocks) from.pow2_blocks = all.pow2_blocks + at / kQuantBlock;
    from.bf16_tiles = all.bf16_tiles + at;
  }
  return {work_.inner + at, from, inner_formats_};
}

// What this rank makes of them, as values that are exchanged before anybody quantizes them.
InnerActivations ExpertsRun::own_inner_at(int64_t sorted_row) const {
  return {op_.exchange->mine + sorted_row * gate_.rows, {}, {.float32 = true}};
}

void ExpertsRun::exchange_inner() {
  op_.exchange->to_whole(rows_ * op_.k);
  if (!inner_formats_.quantized()) return;
  for (int64_t i = 0; i < order_.num_active; ++i) {
    const int32_t expert = order_.active[i];
    const InnerActivations inner = inner_at(order_.start[expert]);
    quantize_rows(ctx_, inner.formats, inner.values, order_.rows_of(expert), inner_cols_, inner.quantized);
  }
}

// Sorted rows side by side of the same expert and adapter.
void ExpertsRun::find_runs(const ExpertUpdates::Product& product) const {
  product.runs->clear();
  float* inner = product.inner;
  for (int64_t expert = 0; expert < gate_.experts; ++expert) {
    for (int64_t row = order_.start[expert], end; row < order_.start[expert + 1]; row = end) {
      const int32_t adapter = op_.updates->adapters[order_.token_of[row]];
      end = row + 1;
      while (end < order_.start[expert + 1] && op_.updates->adapters[order_.token_of[end]] == adapter) ++end;
      if (adapter < 0 || product.pairs[adapter].a == nullptr) continue;
      const ExpertUpdates::Pair& pair = product.pairs[adapter];
      product.runs->push_back({row, end - row, pair.a, pair.b, inner, expert});
      inner += (end - row) * pair.a->rows;
    }
  }
}

std::span<const LowRankRun> ExpertsRun::runs_of(const ExpertUpdates::Product& product, int32_t expert) const {
  const auto before = [](const LowRankRun& run, int64_t row) { return run.first < row; };
  const auto begin =
      std::lower_bound(product.runs->begin(), product.runs->end(), order_.start[expert], before);
  return {begin, std::lower_bound(begin, product.runs->end(), order_.start[expert + 1], before)};
}

void ExpertsRun::gate_up_part(int32_t expert, int64_t first, int64_t count, const PrefetchHint& prefetch,
                              int thread) {
  const int64_t at = order_.start[expert], num_m = order_.rows_of(expert);
  ActivationRows x = work_.input.rows(op_.x, num_m, hidden_, formats_, order_.token_of + at);
  if (x.bf16_tiles != nullptr) x.bf16_tiles += at * hidden_;
  const InnerActivations inner = op_.exchange == nullptr ? inner_at(at) : own_inner_at(at);
  GateUp products = op_.gate_up;
  if (op_.updates != nullptr) {
    products.gate_updates = runs_of(op_.updates->gate, expert);
    products.up_updates = runs_of(op_.updates->up, expert);
    products.updates_at = at;
  }
  // A small batch's outputs of more rows than kMaxRowsPerTask fit into a thread's buffers.
  const int64_t max_rows = rows_ <= kSmallBatchRows ? kMaxSmallBatchOutputs : kMaxRowsPerTask;
  for (int64_t r = 0; r < count; r += max_rows) {
    gate_up_chunk(ctx_, products, expert, first + r, std::min(max_rows, count - r), x, num_m, inner, thread,
                  count <= max_rows ? prefetch : PrefetchHint{},
                  op_.weigh_input ? work_.row_scale + at : nullptr);
  }
}

void ExpertsRun::down_part(int32_t expert, int64_t first, int64_t count, const PrefetchHint& prefetch,
                           int thread) {
  const int64_t at = order_.start[expert], num_m = order_.rows_of(expert);
  const InnerActivations inner = inner_at(at);
  const ActivationRows x = inner.quantized.rows(inner.values, num_m, inner_cols_, inner_formats_);
  gemm_chunk(ctx_.kernels, {down_, expert, first, count}, x, num_m, work_.expert_out + at * out_cols_ + first,
             out_cols_, ctx_.scratch[thread].dequantized, prefetch);
  if (op_.updates == nullptr) return;
  low_rank_add_part(ctx_.kernels, runs_of(op_.updates->down, expert), at, num_m, first, count,
                    work_.expert_out + at * out_cols_ + first, out_cols_);
}

// A small batch's rows of all active experts, in parts that become smaller, of units of `unit`.
template <class Part>
void ExpertsRun::small_batch_experts(const WeightMatrix& w, int64_t unit, Part part) {
  const int64_t rows = w.rows;
  const ShrinkingParts parts(order_.num_active * rows, unit, ctx_.pool.size());
  parallel_rows(ctx_.pool, parts, [&](const RowPart& shared, int thread) {
    const int64_t last = shared.first + shared.count;
    for (int64_t first = shared.first, some; first < last; first += some) {
      const int64_t row = first % rows;
      some = std::min({last - first, rows - row, kMaxSmallBatchOutputs});
      const int64_t next = first + some < last ? first + some : shared.next;
      const bool prefetched = shared.prefetched || first > shared.first;
      const PrefetchHint prefetch = next < 0
                                        ? PrefetchHint{nullptr, 0, prefetched}
                                        : prefetch_of(w, order_.active[next / rows], next % rows, prefetched);
      part(order_.active[first / rows], row, some, prefetch, thread);
    }
  });
}

// part(expert, first, count, prefetch, thread) for the rows of every active expert's matrix, `per_task` at a
// time. The expert with the most tokens comes first; on several memory nodes every expert's first rows do,
// because a node has the first part of a loop and of the rows. Where tokens lie in tiles, three quarters of
// the experts are handed out in larger parts: a thread then loads an expert's tokens (370 KB for 64 of
// gpt-oss) into its cache less often.
template <class Part>
void ExpertsRun::parallel_experts(const WeightMatrix& w, int64_t unit, int64_t per_task, Part part) {
  const int64_t rows = w.rows, num_active = order_.num_active;
  if (ctx_.small_batch(rows_)) {
    small_batch_experts(w, unit, part);
    return;
  }
  const int64_t tasks = tasks_for(rows, per_task);
  if (ctx_.pool.nodes() > 1) {
    ctx_.pool.parallel_for(num_active * tasks, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task / num_active * per_task;
        part(order_.active[task % num_active], first, std::min(per_task, rows - first), {}, thread);
      }
    });
    return;
  }
  const bool tiles = ctx_.kernels.quantize_bf16_tile != nullptr && rows_ > kMaxRowsAsBlocks;
  const int64_t share = num_active * rows / (int64_t{16} * ctx_.pool.size()) / 32 * 32;
  const int64_t large = tiles ? std::clamp<int64_t>(share, per_task, 4 * per_task) : per_task;
  const int64_t experts_in_large = num_active * 3 / 4, large_tasks = tasks_for(rows, large);
  const int64_t in_large = experts_in_large * large_tasks;
  const int64_t in_small = (num_active - experts_in_large) * tasks;
  ctx_.pool.parallel_for(in_large + in_small, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const bool is_large = task < in_large;
      const int64_t size = is_large ? large : per_task, each = is_large ? large_tasks : tasks;
      const int64_t at = is_large ? task : task - in_large;
      const int64_t i = at / each + (is_large ? 0 : experts_in_large), first = at % each * size;
      part(order_.active[i], first, std::min(size, rows - first), {}, thread);
    }
  });
}

FirstReads ExpertsRun::first_reads_of_down(int64_t rows) const {
  FirstReads reads;
  for (int64_t i = 0; i < order_.num_active; ++i) {
    reads.data[reads.count++] = reinterpret_cast<const std::byte*>(
        down_.matrix.data + order_.active[i] * down_.expert_rows * down_.matrix.row_bytes);
  }
  reads.stride = reads.bytes = rows * down_.matrix.row_bytes;
  return reads;
}

// A thread takes the same rows of all experts and adds them up at once.
void ExpertsRun::down_and_combine(const ShrinkingParts& parts) {
  const int64_t num_active = order_.num_active;
  parallel_rows(ctx_.pool, parts, [&](const RowPart& part, int thread) {
    for (int64_t i = 0; i < num_active; ++i) {
      const bool last = i + 1 == num_active, prefetched = part.prefetched || i > 0;
      const int64_t row = last ? part.next : part.first;
      const PrefetchHint prefetch =
          row < 0 ? PrefetchHint{nullptr, 0, prefetched}
                  : prefetch_of(down_, order_.active[last ? 0 : i + 1], row, prefetched);
      down_part(order_.active[i], part.first, part.count, prefetch, thread);
    }
    for (int64_t t = 0; t < rows_; ++t) combine(t, part.first, part.count);
  });
}

// Columns [first, first + width) of y += sum over slots of weight * (down + bias)
void ExpertsRun::combine(int64_t token, int64_t first, int64_t width) const {
  const int64_t k = op_.k;
  float* y = op_.y + token * (op_.y_stride == 0 ? out_cols_ : op_.y_stride);
  constexpr int64_t kStrip = 64;  // columns summed at a time
  for (int64_t c = first; c < first + width; c += kStrip) {
    const int64_t count = std::min(kStrip, first + width - c);
    float sum[kStrip] = {};
    for (int64_t slot = 0; slot < k; ++slot) {
      if (order_.sorted_row[token * k + slot] < 0) continue;
      const float* out = work_.expert_out + order_.sorted_row[token * k + slot] * out_cols_ + c;
      const float weight = op_.weigh_input ? 1.0f : op_.weights[token * k + slot];
      if (op_.down.bias == nullptr) {
        for (int64_t i = 0; i < count; ++i) sum[i] += weight * out[i];
      } else {
        const float* bias = op_.down.bias + op_.chosen[token * k + slot] * out_cols_ + c;
        for (int64_t i = 0; i < count; ++i) sum[i] += weight * (out[i] + bias[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i) y[c + i] += sum[i];
  }
}

// Of a small batch a task is a piece of a token: its experts' outputs lie in other threads' caches.
void ExpertsRun::combine_all() {
  const bool small_batch = rows_ <= kSmallBatchRows;
  const int64_t width = small_batch ? kCombinedColumns : out_cols_, pieces = tasks_for(out_cols_, width);
  ctx_.pool.parallel_for(rows_ * pieces, small_batch ? 1 : 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % pieces * width;
      combine(task / pieces, first, std::min(width, out_cols_ - first));
    }
  });
}

void ExpertsRun::run() {
  quantize_missing();
  sort_by_expert(op_.chosen, rows_, op_.k, gate_.experts, order_);
  if (order_.num_active == 0) return;
  if (op_.weigh_input) {
    for (int64_t i = 0; i < rows_ * op_.k; ++i) {
      if (order_.sorted_row[i] >= 0) work_.row_scale[order_.sorted_row[i]] = op_.weights[i];
    }
  }
  if (formats_.bf16_tiles) gather_tiles();
  if (op_.updates != nullptr) {
    for (const ExpertUpdates::Product* product : {&op_.updates->gate, &op_.updates->up}) {
      find_runs(*product);
      low_rank_inner(ctx_, *product->runs, op_.x, hidden_, order_.token_of);
    }
  }
  const bool small_batch = ctx_.small_batch(rows_);
  // Few experts are combined by the threads that multiply.
  const bool combine_at_once =
      small_batch && order_.num_active <= FirstReads::kMaxRanges && !op_.leave_outputs;
  const ShrinkingParts parts(down_.rows, kRowsAtOnce, ctx_.pool.size());
  if (small_batch) {
    const FirstReads down = combine_at_once ? first_reads_of_down(parts.first_rows()) : FirstReads{};
    ctx_.begin_product({}, &down);
  }
  const auto gate_up = [&](int32_t expert, int64_t first, int64_t count, const PrefetchHint& prefetch,
                           int thread) { gate_up_part(expert, first, count, prefetch, thread); };
  const auto down = [&](int32_t expert, int64_t first, int64_t count, const PrefetchHint& prefetch,
                        int thread) { down_part(expert, first, count, prefetch, thread); };
  const int threads = ctx_.pool.size();
  if (gate_.rows > 0) {
    parallel_experts(gate_, kQuantBlock, rows_per_task(2 * gate_.rows * order_.num_active, threads), gate_up);
  }
  if (op_.exchange != nullptr) exchange_inner();
  if (out_cols_ == 0) return;
  if (op_.updates != nullptr) {
    find_runs(op_.updates->down);
    low_rank_inner(ctx_, *op_.updates->down.runs, work_.inner, inner_cols_);
  }
  if (small_batch) ctx_.begin_product({});
  if (combine_at_once) {
    down_and_combine(parts);
    return;
  }
  parallel_experts(down_, kRowsAtOnce, rows_per_task(down_.rows * order_.num_active, threads), down);
  if (!op_.leave_outputs) combine_all();
}

}  // namespace

MoeWorkspace take_moe_workspace(Arena& arena, const MoeShape& shape, bool with_bf16_tiles) {
  MoeWorkspace work;
  const int64_t sorted = shape.rows * shape.k, small = std::min(shape.rows, kMaxRowsAsBlocks);
  work.order = take_expert_order(arena, shape.experts, shape.rows, shape.k);
  work.input.blocks = arena.take<ActivationBlock>(shape.rows * shape.hidden / kQuantBlock);
  work.inner = arena.take<float>(sorted * shape.inner);
  work.inner_quantized.blocks = arena.take<ActivationBlock>(sorted * shape.inner / kQuantBlock);
  work.expert_out = arena.take<float>(sorted * shape.hidden);
  work.row_scale = arena.take<float>(sorted);
  if (!with_bf16_tiles) return work;
  work.input.pow2_blocks = arena.take<ActivationBlock>(small * shape.hidden / kQuantBlock);
  work.input.bf16_tiles = arena.take<uint16_t>(sorted * shape.hidden + kTileSlackBytes);
  work.inner_quantized.pow2_blocks = arena.take<ActivationBlock>(small * shape.k * shape.inner / kQuantBlock);
  work.inner_quantized.bf16_tiles = arena.take<uint16_t>(sorted * shape.inner + kTileSlackBytes);
  return work;
}

void moe_experts(const Context& ctx, const MoeExperts& op, MoeWorkspace& workspace) {
  if (op.rows > 0) ExpertsRun(ctx, op, workspace).run();
}

}  // namespace millrace::cpu
