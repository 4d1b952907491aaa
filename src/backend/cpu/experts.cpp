// Routing and experts. Tokens are sorted by expert (stably), each expert's gate, up and down run over its
// tokens together, cut into chunks of rows so that a popular expert is shared by all threads; the chosen
// experts of a token are then added in slot order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/cpu_executor.h"
#include "base/check.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kCombined = 512;  // columns of a token whose experts are added up at once, of few tokens

}  // namespace

void CpuExecutor::route(const Route& op) {
  MILLRACE_CHECK(op.router.weight->rows == spec_.experts && op.experts_per_token == spec_.experts_per_token);
  if (rows_ == 0) return;
  const Forms forms = forms_for({&op.router}, rows_);
  const Product product{&op.router, work_->router_logits};
  if (rows_ < kTileHeight * pool_.size()) {
    norm_rows(op.norm, {}, forms);
    multiply_all({&product, 1}, normed(rows_), rows_);
    pool_.parallel_for(rows_, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) choose(op, t);
    });
    return;
  }
  // With many tokens one loop does it all, a group of them at a time: threads wait for each other once.
  normed_forms_ = forms;
  const int64_t height = forms.tiles ? bf16_tile_height(rows_) : kTileHeight;
  pool_.parallel_for(tasks_for(rows_, height), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * height, count = std::min(height, rows_ - first);
      for (int64_t t = first; t < first + count; ++t) norm_row(op.norm, t, t, rows_, forms);
      multiply_part(product, 0, op.router.weight->rows, normed(rows_), first, count, thread);
      for (int64_t t = first; t < first + count; ++t) choose(op, t);
    }
  });
}

// The k largest logits, ties and NaN to the lower index, and their weights.
void CpuExecutor::choose(const Route& op, int64_t token) {
  const int64_t experts = spec_.experts, k = spec_.experts_per_token;
  float* logits = work_->router_logits + token * experts;
  int32_t* chosen = work_->chosen + token * k;
  float* weights = work_->chosen_weight + token * k;
  const auto key = [&](int64_t e) {
    return std::isnan(logits[e]) ? -std::numeric_limits<float>::infinity() : logits[e];
  };
  for (int64_t slot = 0; slot < k; ++slot) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e) {
      const bool taken = std::find(chosen, chosen + slot, e) != chosen + slot;
      if (!taken && (best < 0 || key(e) > key(best))) best = e;
    }
    chosen[slot] = best;
  }
  const float top = logits[chosen[0]];
  for (int64_t slot = 0; slot < k; ++slot) weights[slot] = logits[chosen[slot]] - top;
  kernels_.exp(weights, k, weights);
  float sum = 0.0f;
  if (op.weighting == Route::Weighting::kSoftmaxAll) {
    for (int64_t e = 0; e < experts; ++e) logits[e] -= top;
    kernels_.exp(logits, experts, logits);
    for (int64_t e = 0; e < experts; ++e) sum += logits[e];
  } else {  // softmax over all, renormalized over the chosen, is softmax over the chosen
    for (int64_t slot = 0; slot < k; ++slot) sum += weights[slot];
  }
  for (int64_t slot = 0; slot < k; ++slot) weights[slot] /= sum;
}

// Counting sort of (token, slot) by expert.
void CpuExecutor::sort_by_expert(int64_t chosen) {
  int32_t* start = work_->expert_start;
  std::fill_n(start, spec_.experts + 1, 0);
  const int64_t count = rows_ * chosen;
  for (int64_t i = 0; i < count; ++i) ++start[work_->chosen[i] + 1];
  num_active_ = 0;
  for (int32_t e = 0; e < spec_.experts; ++e) {
    if (start[e + 1] > 0) work_->active[num_active_++] = e;
    start[e + 1] += start[e];
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t at = start[work_->chosen[i]]++;
    work_->sorted_token[at] = static_cast<int32_t>(i / chosen);
    work_->sorted_at[i] = at;
  }
  // Every start has moved to its end: the next one's start.
  for (int32_t e = spec_.experts; e > 0; --e) start[e] = start[e - 1];
  start[0] = 0;
  // The experts with the most tokens first: what is handed out last is short, and nobody waits for it.
  std::sort(work_->active, work_->active + num_active_, [&](int32_t a, int32_t b) {
    const int32_t of_a = start[a + 1] - start[a], of_b = start[b + 1] - start[b];
    return of_a != of_b ? of_a > of_b : a < b;
  });
}

// The rows of every expert, one after the other, as tiles of their own: a task is a group of an expert's. The
// first expert has the most.
void CpuExecutor::gather_tiles() {
  const int32_t* start = work_->expert_start;
  const auto rows_of = [&](int64_t i) { return start[work_->active[i] + 1] - start[work_->active[i]]; };
  const int64_t groups = tasks_for(rows_of(0), kTileHeight), hidden = spec_.hidden;
  pool_.parallel_for(num_active_ * groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task % num_active_, num_m = rows_of(i), at = start[work_->active[i]];
      const int64_t first = task / num_active_ * bf16_tile_height(num_m);
      if (first >= num_m) continue;
      const Bf16TileRow to = bf16_tile_row(work_->input_tiles + at * hidden, num_m, hidden, first);
      const float* rows[kTileHeight];
      for (int64_t m = 0; m < to.height; ++m) {
        rows[m] = work_->normed + work_->sorted_token[at + first + m] * hidden;
      }
      kernels_.quantize_bf16_tile_group(rows, to.height, hidden, to.at);
    }
  });
}

CpuExecutor::Formed CpuExecutor::inner_at(int64_t at) const {
  Formed from{work_->inner_blocks + at / kQuantBlock, nullptr, nullptr};
  if (work_->inner_tiles == nullptr) return from;
  if (rows_ <= kMaxRowsAsBlocks) from.binary = work_->inner_binary + at / kQuantBlock;
  from.tiles = work_->inner_tiles + at;
  return from;
}

// part(expert, first, count, chain, thread) for the rows of every active expert's matrix, `per_task` at a
// time; with few tokens in parts that become smaller, of units of `unit`. The
// fattest expert comes first; on several memory nodes every expert's first rows do, because a node has the
// first part of a loop and of the rows. Where tokens lie in tiles, three quarters of the experts are handed
// out in larger parts: a thread then brings an expert's tokens (370 KB for 64 of gpt-oss) into its cache less
// often.
template <class Part>
void CpuExecutor::share_experts(const Linear& op, int64_t unit, int64_t per_task, Part part) {
  const CpuWeight& w = own(*op.weight);
  const int64_t rows = w.rows;
  if (rows_ <= kFewTokens && pool_.nodes() == 1) {
    share_rows({num_active_ * rows, unit, pool_.size()}, [&](const RowPart& shared, int thread) {
      const int64_t last = shared.first + shared.count;
      for (int64_t first = shared.first, some; first < last; first += some) {
        const int64_t row = first % rows;
        some = std::min({last - first, rows - row, kMostFewRows});
        const int64_t next = first + some < last ? first + some : shared.next;
        const bool asked = shared.asked || first > shared.first;
        const PrefetchHint chain = next < 0 ? PrefetchHint{nullptr, 0, asked}
                                            : chain_to(w, work_->active[next / rows], next % rows, asked);
        part(work_->active[first / rows], row, some, chain, thread);
      }
    });
    return;
  }
  const int64_t tasks = tasks_for(rows, per_task);
  if (pool_.nodes() > 1) {
    pool_.parallel_for(num_active_ * tasks, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task / num_active_ * per_task;
        part(work_->active[task % num_active_], first, std::min(per_task, rows - first), {}, thread);
      }
    });
    return;
  }
  const bool tiles = kernels_.quantize_bf16_tile != nullptr && rows_ > kMaxRowsAsBlocks;
  const int64_t share = num_active_ * rows / (int64_t{16} * pool_.size()) / 32 * 32;
  const int64_t large = tiles ? std::clamp<int64_t>(share, per_task, 4 * per_task) : per_task;
  const int64_t large_tasks = tasks_for(rows, large), in_large = num_active_ * 3 / 4 * large_tasks;
  const int64_t in_small = (num_active_ - num_active_ * 3 / 4) * tasks;
  pool_.parallel_for(in_large + in_small, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const bool early = task < in_large;
      const int64_t size = early ? large : per_task, each = early ? large_tasks : tasks;
      const int64_t at = early ? task : task - in_large, i = at / each + (early ? 0 : num_active_ * 3 / 4);
      const int64_t first = at % each * size;
      part(work_->active[i], first, std::min(size, rows - first), {}, thread);
    }
  });
}

void CpuExecutor::experts_add(const Experts& op) {
  if (rows_ == 0) return;
  const CpuWeight &gate = own(*op.gate.weight), &down = own(*op.down.weight);
  const Forms forms = forms_for({&op.gate, &op.up}, rows_, true),
              inner_forms = forms_for({&op.down}, rows_, true);
  const Forms missing{forms.blocks && !normed_forms_.blocks, forms.binary && !normed_forms_.binary};
  formed(work_->normed, rows_, spec_.hidden, missing);
  normed_forms_ = {};  // the tiles below are other rows
  sort_by_expert(spec_.experts_per_token);
  if (forms.tiles) gather_tiles();
  const int64_t inner_cols = gate.rows;
  const int32_t* start = work_->expert_start;

  const auto gate_up_part = [&](int32_t expert, int64_t first, int64_t count, const PrefetchHint& chain,
                                int thread) {
    const int64_t at = start[expert], num_m = start[expert + 1] - at;
    Rows x = input().rows(work_->normed, num_m, spec_.hidden, forms, work_->sorted_token + at);
    if (x.tiles != nullptr) x.tiles += at * spec_.hidden;
    const Inner inner{work_->inner + at * inner_cols, inner_at(at * inner_cols), inner_forms};
    // Few tokens have room for more rows in a thread's buffers than kMaxRowsPerTask.
    const int64_t most = rows_ <= kFewTokens ? kMostFewRows : kMaxRowsPerTask;
    for (int64_t r = 0; r < count; r += most) {
      gate_up({&op.gate, &op.up, &op}, expert, first + r, std::min(most, count - r), x, num_m, inner, thread,
              count <= most ? chain : PrefetchHint{});
    }
  };
  const auto down_part = [&](int32_t expert, int64_t first, int64_t count, const PrefetchHint& chain,
                             int thread) {
    const int64_t at = start[expert], num_m = start[expert + 1] - at;
    const Rows x =
        inner_at(at * inner_cols).rows(work_->inner + at * inner_cols, num_m, inner_cols, inner_forms);
    multiply(kernels_, down, expert, first, count, x, num_m, work_->expert_out + at * down.rows + first,
             down.rows, work_->threads[thread].decoded, chain);
  };
  // With few experts a thread takes the same rows of all of them and adds them up at once.
  const bool together = rows_ <= kFewTokens && pool_.nodes() == 1 && num_active_ <= Soon::kMost;
  const ShrinkingParts parts = plain_parts(down.rows);
  if (rows_ <= kFewTokens && pool_.nodes() == 1) {
    Soon soon;
    for (int64_t i = 0; together && i < num_active_; ++i) {
      soon.data[soon.count++] = reinterpret_cast<const std::byte*>(
          down.matrix.data + work_->active[i] * down.rows * down.matrix.row_bytes);
    }
    soon.stride = soon.bytes = parts.first_rows() * down.matrix.row_bytes;
    announce({}, &soon);
  }
  share_experts(op.gate, kQuantBlock, rows_per_task(2 * inner_cols * num_active_, pool_.size()),
                gate_up_part);
  if (rows_ <= kFewTokens && pool_.nodes() == 1) announce({});
  if (together) {
    share_rows(parts, [&](const RowPart& part, int thread) {
      for (int64_t i = 0; i < num_active_; ++i) {
        const bool last = i + 1 == num_active_, asked = part.asked || i > 0;
        const int64_t row = last ? part.next : part.first;
        const PrefetchHint chain = row < 0 ? PrefetchHint{nullptr, 0, asked}
                                           : chain_to(down, work_->active[last ? 0 : i + 1], row, asked);
        down_part(work_->active[i], part.first, part.count, chain, thread);
      }
      for (int64_t t = 0; t < rows_; ++t) combine(op, t, part.first, part.count);
    });
    return;
  }
  share_experts(op.down, kRowsAtOnce, rows_per_task(down.rows * num_active_, pool_.size()), down_part);
  // With few tokens a task is a piece of one: its experts' outputs lie in other threads' caches.
  const bool few = rows_ <= kFewTokens;
  const int64_t width = few ? kCombined : spec_.hidden, pieces = tasks_for(spec_.hidden, width);
  pool_.parallel_for(rows_ * pieces, few ? 1 : 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % pieces * width;
      combine(op, task / pieces, first, std::min(width, spec_.hidden - first));
    }
  });
}

// Columns [first, first + width) of residual += sum over slots of weight * (down + bias)
void CpuExecutor::combine(const Experts& op, int64_t token, int64_t first, int64_t width) {
  const int64_t k = spec_.experts_per_token, hidden = spec_.hidden;
  float* x = work_->residual + token * hidden;
  constexpr int64_t kStrip = 64;  // columns summed at a time
  for (int64_t c = first; c < first + width; c += kStrip) {
    const int64_t count = std::min(kStrip, first + width - c);
    float sum[kStrip] = {};
    for (int64_t slot = 0; slot < k; ++slot) {
      const float* out = work_->expert_out + work_->sorted_at[token * k + slot] * hidden + c;
      const float weight = work_->chosen_weight[token * k + slot];
      if (op.down.bias == nullptr) {
        for (int64_t i = 0; i < count; ++i) sum[i] += weight * out[i];
      } else {
        const float* bias = own(*op.down.bias).values.data() + work_->chosen[token * k + slot] * hidden + c;
        for (int64_t i = 0; i < count; ++i) sum[i] += weight * (out[i] + bias[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i) x[c + i] += sum[i];
  }
}

}  // namespace millrace::cpu
