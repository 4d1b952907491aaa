// Rope, the paged KV pools and attention.
//
// A block of a group lies as [layer][key, value][kv_head], each a run of 16 * head_dim: keys transposed
// [head_dim][16], values [16][head_dim] (kernel_table.h says why; int8 is another matter).
//
// A task is a tile of query tokens and one KV head. Its context is cut into spans of 512 positions, counted
// from the sequence's start; each span gives a partial softmax, and partials are merged in order. A step with
// too few tasks for its threads gives the spans to different threads and merges afterwards: the same numbers
// either way.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/cpu_executor.h"
#include "base/check.h"
#include "base/float_bits.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

// One token's head into an int8 cache: scales [count / 32][16], then codes, of keys [count / 4][16][4] and of
// values [4][count][4 tokens] (kernels_attention_int8.h).
void store_int8(const float* x, int64_t count, uint8_t* to, int32_t token, bool values) {
  constexpr int64_t kTogether = 4;
  auto* scales = reinterpret_cast<uint16_t*>(to);
  auto* out = reinterpret_cast<int8_t*>(scales + count / kKvScaleDims * kBlockTokens);
  out += values ? token / kTogether * count * kTogether + token % kTogether : token * kTogether;
  for (int64_t d = 0; d < count; d += kKvScaleDims) {
    int8_t codes[kKvScaleDims];
    scales[d / kKvScaleDims * kBlockTokens + token] = to_int8_codes(x + d, codes);
    for (int64_t i = 0; i < kKvScaleDims; i += kTogether) {
      for (int64_t j = 0; j < kTogether; ++j) {
        out[values ? (d + i + j) * kTogether : (d + i) * kBlockTokens + j] = codes[i + j];
      }
    }
  }
}

// One token's head of keys (at token, stride 16) or values (at token * count, stride 1) into the cache.
void store_head(DType type, const float* x, int64_t count, uint8_t* to, int32_t token, int64_t at,
                int64_t stride) {
  if (type == DType::kQ8_0) {
    store_int8(x, count, to, token, stride == 1);
    return;
  }
  if (type == DType::kF8E4M3) {  // scales [16] first
    to[token] = to_fp8_codes(x, count, to + kBlockTokens + at, stride);
    return;
  }
  if (type == DType::kF32) {
    auto* out = reinterpret_cast<float*>(to) + at;
    for (int64_t d = 0; d < count; ++d) out[d * stride] = x[d];
  } else if (type == DType::kBF16) {
    auto* out = reinterpret_cast<uint16_t*>(to) + at;
    for (int64_t d = 0; d < count; ++d) out[d * stride] = to_bfloat16(x[d]).bits;
  } else {
    auto* out = reinterpret_cast<uint16_t*>(to) + at;
    for (int64_t d = 0; d < count; ++d) out[d * stride] = to_half(x[d]).bits;
  }
}

void rotate(float* x, const float* cosines, const float* sines, int64_t half, bool interleaved) {
  for (int64_t i = 0; i < half; ++i) {
    float& a = x[interleaved ? 2 * i : i];
    float& b = x[interleaved ? 2 * i + 1 : i + half];
    const float a0 = a, b0 = b;
    a = a0 * cosines[i] - b0 * sines[i];
    b = b0 * cosines[i] + a0 * sines[i];
  }
}

// So many tokens of keys and values go through the caches and push out what was asked for before.
constexpr int32_t kDeepContext = 4096;

// Partials that are asked for ahead of their turn when they are merged, those whose weights are one
// exponential, and the numbers in a line of them.
constexpr int64_t kSpansAhead = 6, kSpansAtOnce = 8, kLineFloats = 16;

int kv_kernel(DType type) {
  switch (type) {
    case DType::kF32:
      return static_cast<int>(KvType::kF32);
    case DType::kF16:
      return static_cast<int>(KvType::kF16);
    case DType::kQ8_0:
      return static_cast<int>(KvType::kInt8);
    case DType::kF8E4M3:
      return static_cast<int>(KvType::kFp8);
    default:
      return static_cast<int>(KvType::kBF16);
  }
}

}  // namespace

CpuExecutor::KvPlace CpuExecutor::place_of(int layer) const {
  const auto [group, index] = spec_.layers[layer];
  KvPlace place;
  place.pool = kv_pools_[group].data();
  place.block_bytes = static_cast<int64_t>(spec_.kv_block_bytes(group));
  place.head_bytes = kBlockTokens * static_cast<int64_t>(kv_head_bytes(spec_.kv_type, spec_.head_dim));
  place.key_offset = static_cast<int64_t>(index) * 2 * spec_.kv_heads * place.head_bytes;
  place.value_offset = place.key_offset + spec_.kv_heads * place.head_bytes;
  return place;
}

void CpuExecutor::plan_attention() {
  num_tiles_ = 0;
  deep_ = false;
  int64_t covered = 0;
  for (size_t s = 0; s < batch_.sequences.size(); ++s) {
    const SequenceSlice& slice = batch_.sequences[s];
    MILLRACE_CHECK(slice.first_row == covered && slice.context_len + slice.num_tokens <= spec_.max_context);
    covered += slice.num_tokens;
    deep_ |= slice.context_len > kDeepContext;
    MILLRACE_CHECK(covered <= rows_);
    for (int32_t i = 0; i < slice.num_tokens; ++i) {
      work_->positions[slice.first_row + i] = slice.context_len + i;
      work_->sequence_of[slice.first_row + i] = static_cast<int32_t>(s);
    }
    for (int32_t i = 0; i < slice.num_tokens; i += work_->tokens_per_tile) {
      work_->tiles[num_tiles_++] = {static_cast<int32_t>(s), i,
                                    std::min(work_->tokens_per_tile, slice.num_tokens - i)};
    }
  }
  MILLRACE_CHECK(covered == rows_);
}

// Cosines and sines of this step's positions; layers that share inv_freq share them.
void CpuExecutor::prepare_rotation(const Rope& op) {
  const auto half = static_cast<int64_t>(op.inv_freq.size());
  MILLRACE_CHECK(2 * half <= spec_.head_dim);
  if (rotation_of_ == op.inv_freq.data() && rotation_magnitude_ == op.magnitude && rotation_size_ == half)
    return;
  pool_.parallel_for(rows_, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(work_->positions[row]) * op.inv_freq[i];
        work_->cosines[row * half + i] = static_cast<float>(std::cos(angle) * op.magnitude);
        work_->sines[row * half + i] = static_cast<float>(std::sin(angle) * op.magnitude);
      }
    }
  });
  rotation_of_ = op.inv_freq.data();
  rotation_magnitude_ = op.magnitude;
  rotation_size_ = half;
}

void CpuExecutor::append(const KvPlace& place, int group, int64_t row, int64_t first, int64_t last) {
  const SequenceSlice& s = batch_.sequences[work_->sequence_of[row]];
  const int32_t position = work_->positions[row], slot = position % kBlockTokens;
  const int32_t block = s.tables[group][position / kBlockTokens];
  MILLRACE_CHECK(block >= 0 && block < spec_.kv_groups[group].num_blocks);
  uint8_t* base = place.pool + block * place.block_bytes;
  const int64_t dim = spec_.head_dim;
  for (int64_t h = first; h < last; ++h) {
    const int64_t at = row * work_->kv_cols + h * dim;
    store_head(spec_.kv_type, work_->key + at, dim, base + place.key_offset + h * place.head_bytes, slot,
               slot, kBlockTokens);
    store_head(spec_.kv_type, work_->value + at, dim, base + place.value_offset + h * place.head_bytes, slot,
               slot * dim, 1);
  }
}

void CpuExecutor::rope_append_kv(const Rope& op) {
  prepare_rotation(op);
  const auto half = static_cast<int64_t>(op.inv_freq.size());
  const KvPlace place = place_of(op.layer);
  const int group = spec_.layers[op.layer].group;
  // In a step of few tokens a task is one KV head of a token, with the query heads that read it.
  const int64_t pieces = few_ ? spec_.kv_heads : 1, kv_heads = spec_.kv_heads / pieces, dim = spec_.head_dim;
  pool_.parallel_for(rows_ * pieces, few_ ? 1 : 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / pieces, first = task % pieces * kv_heads, last = first + kv_heads;
      const float *c = work_->cosines + row * half, *s = work_->sines + row * half;
      float* query = work_->query + row * work_->query_cols + first * work_->group_size * dim;
      const int64_t queries = kv_heads * work_->group_size * dim;
      for (int64_t at = 0; at < queries; at += dim) rotate(query + at, c, s, half, op.interleaved);
      for (int64_t h = first; h < last; ++h) {
        rotate(work_->key + row * work_->kv_cols + h * dim, c, s, half, op.interleaved);
      }
      if (spec_.kv_type == DType::kQ8_0) {
        kernels_.quantize_int8(query, queries, work_->blocks + (query - work_->query) / kQuantBlock);
      }
      append(place, group, row, first, last);
    }
  });
}

// Spans [first, last) of the context that some token of the tile sees.
std::pair<int64_t, int64_t> CpuExecutor::spans_of(const Attend& op, const QueryTile& tile) const {
  const int32_t from = batch_.sequences[tile.sequence].context_len + tile.first_token;
  const int32_t first = op.window > 0 ? std::max(0, from - op.window + 1) : 0;
  return {first / kSplitTokens, (from + tile.num_tokens - 1) / kSplitTokens + 1};
}

// Positions [first, last) of the span that each row of the tile sees; a row is (token, head of the group).
void CpuExecutor::visible(const Attend& op, const QueryTile& tile, int64_t span, int32_t* first,
                          int32_t* last) const {
  const auto begin = static_cast<int32_t>(span * kSplitTokens);
  for (int32_t i = 0; i < tile.num_tokens; ++i) {
    const int32_t position = batch_.sequences[tile.sequence].context_len + tile.first_token + i;
    const int32_t from = op.window > 0 ? std::max(0, position - op.window + 1) : 0;
    for (int32_t g = 0; g < work_->group_size; ++g) {
      first[i * work_->group_size + g] = std::max(from, begin);
      last[i * work_->group_size + g] = std::min(position + 1, begin + kSplitTokens);
    }
  }
}

// The blocks of the first two tiles of a span that `head` sees, as seen with the offsets of `from_head`.
void CpuExecutor::first_blocks(const Attend& op, const SpanTask& task, int from_head,
                               const uint8_t** blocks) const {
  const SequenceSlice& s = batch_.sequences[task.tile->sequence];
  const KvPlace place = place_of(op.layer);
  const int32_t position = s.context_len + task.tile->first_token;
  const int32_t begin =
      std::max(static_cast<int32_t>(task.span * kSplitTokens), op.window > 0 ? position - op.window + 1 : 0);
  const int32_t first = begin / kTileTokens * (kTileTokens / kBlockTokens);
  for (int32_t b = 0; b < 2 * kTileTokens / kBlockTokens; ++b) {
    if ((first + b) * kBlockTokens > position || (first + b + 1) * kBlockTokens <= begin) continue;
    blocks[b] = place.pool + s.tables[spec_.layers[op.layer].group][first + b] * place.block_bytes +
                (task.kv_head - from_head) * place.head_bytes;
  }
}

void CpuExecutor::attend_span(const Attend& op, const SpanTask& task, const SpanTask* after, bool asked,
                              const Partial& out, int64_t head_rows, int thread) {
  const auto& [tile_at, kv_head, span, heads] = task;
  const QueryTile& tile = *tile_at;
  const ThreadScratch& own_scratch = work_->threads[thread];
  const SequenceSlice& s = batch_.sequences[tile.sequence];
  const KvPlace place = place_of(op.layer);
  visible(op, tile, span, own_scratch.first, own_scratch.last);
  const float** query = own_scratch.query;
  const ActivationBlock** blocks = own_scratch.query_blocks;
  for (int h = kv_head; h < kv_head + heads; ++h) {
    for (int32_t i = 0; i < tile.num_tokens; ++i) {
      const int64_t row = (s.first_row + tile.first_token + i) * work_->query_cols;
      for (int32_t g = 0; g < work_->group_size; ++g) {
        const int64_t at = row + (static_cast<int64_t>(h) * work_->group_size + g) * spec_.head_dim;
        *query++ = work_->query + at;
        *blocks++ = work_->blocks + at / kQuantBlock;  // of an int8 cache alone
      }
    }
  }
  AttentionSplit args;
  args.pool = place.pool;
  args.block_bytes = place.block_bytes;
  args.table = s.tables[spec_.layers[op.layer].group];
  args.key_offset = place.key_offset + kv_head * place.head_bytes;
  args.value_offset = place.value_offset + kv_head * place.head_bytes;
  args.head_bytes = place.head_bytes;
  args.head_dim = spec_.head_dim;
  args.padded_dim = static_cast<int32_t>(work_->padded_dim);
  args.rows = tile.num_tokens * work_->group_size;
  args.query = own_scratch.query;
  args.query_blocks = own_scratch.query_blocks;
  args.first = own_scratch.first;
  args.last = own_scratch.last;
  args.scale = op.scale;
  args.row_max = out.largest;
  args.row_sum = out.sum;
  args.acc = out.values;
  args.scores = own_scratch.scores;
  args.prefetched = asked;
  args.heads = heads;
  args.head_rows = head_rows;
  if (after != nullptr) first_blocks(op, *after, kv_head, args.next_blocks);
  kernels_.attention[kv_kernel(spec_.kv_type)](args);
}

// total += part for the rows that saw something of the span; the first such span of a row starts its total.
void CpuExecutor::merge_span(TileRows rows, const Partial& part, const Partial& total, const int32_t* first,
                             const int32_t* last, bool fresh) {
  const int64_t dim = work_->padded_dim;
  for (int32_t r = rows.begin; r < rows.end; ++r) {
    if (fresh) total.sum[r] = 0.0f;
    if (first[r] >= last[r]) continue;
    if (total.sum[r] == 0.0f) {
      total.largest[r] = part.largest[r];
      total.sum[r] = part.sum[r];
      std::copy_n(part.values + r * dim, dim, total.values + r * dim);
      continue;
    }
    const float largest = std::max(total.largest[r], part.largest[r]);
    float weight[2] = {total.largest[r] - largest, part.largest[r] - largest};
    kernels_.exp(weight, 2, weight);
    total.sum[r] = total.sum[r] * weight[0] + part.sum[r] * weight[1];
    kernels_.scale_add(total.values + r * dim, weight[0], part.values + r * dim, weight[1], dim);
    total.largest[r] = largest;
  }
}

// What merge_span makes of one span after the other, for a row that sees something of all of them: `parts` is
// that of the first, the others lie behind it. Largest scores come first, so that the weights of many spans
// are one exponential.
void CpuExecutor::merge_row(int32_t row, const Partial& parts, int64_t spans, const Partial& total) {
  const int64_t dim = work_->padded_dim, apart = work_->tile_rows;
  const auto values_of = [&](int64_t span) { return parts.values + (span * apart + row) * dim; };
  float largest = parts.largest[row], sum = parts.sum[row];
  float* values = total.values + row * dim;
  std::copy_n(values_of(0), dim, values);
  for (int64_t first = 1; first < spans; first += kSpansAtOnce) {
    const int64_t count = std::min(kSpansAtOnce, spans - first);
    float weights[kSpansAtOnce][2];
    for (int64_t i = 0; i < count; ++i) {
      __builtin_prefetch(parts.sum + (first + i) * apart + row);
      const float other = parts.largest[(first + i) * apart + row], most = std::max(largest, other);
      weights[i][0] = largest - most;
      weights[i][1] = other - most;
      largest = most;
    }
    kernels_.exp(weights[0], 2 * count, weights[0]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t ahead = first + i + kSpansAhead;
      if (ahead < spans) {  // no lambda: g++ takes one that only asks for one that does nothing
        const float* later = values_of(ahead);
        for (int64_t d = 0; d < dim; d += kLineFloats) __builtin_prefetch(later + d);
      }
      sum = sum * weights[i][0] + parts.sum[(first + i) * apart + row] * weights[i][1];
      kernels_.scale_add(values, weights[i][0], values_of(first + i), weights[i][1], dim);
    }
  }
  total.largest[row] = largest;
  total.sum[row] = sum;
}

// Sinks join the denominator; the rows go to the attention slot.
void CpuExecutor::finish(const Attend& op, const QueryTile& tile, TileRows rows, int kv_head,
                         const Partial& total) {
  const int64_t first_head = static_cast<int64_t>(kv_head) * work_->group_size;
  for (int32_t r = rows.begin; r < rows.end; ++r) {
    const int32_t token = tile.first_token + r / work_->group_size, g = r % work_->group_size;
    const int64_t row = batch_.sequences[tile.sequence].first_row + token;
    float factor = 1.0f / total.sum[r];
    if (op.sinks != nullptr) {
      const float sink = own(*op.sinks).values[first_head + g], largest = std::max(total.largest[r], sink);
      float weight[2] = {total.largest[r] - largest, sink - largest};
      kernels_.exp(weight, 2, weight);
      factor = weight[0] / (total.sum[r] * weight[0] + weight[1]);
    }
    float* out = work_->attention + row * work_->query_cols + (first_head + g) * spec_.head_dim;
    const float* values = total.values + r * work_->padded_dim;
    for (int64_t d = 0; d < spec_.head_dim; ++d) out[d] = values[d] * factor;
  }
}

// Behind the keys and values of the last layer rows without logits are of no use, if nobody reads hidden
// states: 3% of a prompt of gpt-oss.
bool CpuExecutor::leaves_rows_out(int layer) const {
  return batch_.only_logits && layer + 1 == std::ssize(spec_.layers) && std::ssize(batch_.logit_rows) < rows_;
}

void CpuExecutor::plan_logit_rows() {
  num_tiles_ = 0;
  for (const int32_t row : batch_.logit_rows) {
    MILLRACE_CHECK(row >= 0 && row < rows_);
    const int32_t sequence = work_->sequence_of[row], token = row - batch_.sequences[sequence].first_row;
    if (num_tiles_ > 0) {
      QueryTile& last = work_->tiles[num_tiles_ - 1];
      if (last.sequence == sequence && last.first_token + last.num_tokens == token &&
          last.num_tokens < work_->tokens_per_tile) {
        ++last.num_tokens;
        continue;
      }
    }
    work_->tiles[num_tiles_++] = {sequence, token, 1};
  }
}

// They become the rows of the step. They ascend: none is overwritten before it is copied.
void CpuExecutor::keep_logit_rows() {
  const auto keep = [](float* values, int64_t cols, int64_t from, int64_t to) {
    if (from != to) std::copy_n(values + from * cols, cols, values + to * cols);
  };
  rows_ = std::ssize(batch_.logit_rows);
  for (int64_t i = 0; i < rows_; ++i) {
    keep(work_->residual, spec_.hidden, batch_.logit_rows[i], i);
    keep(work_->attention, work_->query_cols, batch_.logit_rows[i], i);
  }
  batch_.logit_rows = {kept_.data(), static_cast<size_t>(rows_)};
}

void CpuExecutor::attend(const Attend& op) {
  const bool leaves_out = leaves_rows_out(op.layer);
  if (leaves_out) plan_logit_rows();
  attend_planned(op);
  if (leaves_out) keep_logit_rows();
}

void CpuExecutor::attend_planned(const Attend& op) {
  const int64_t heads = spec_.kv_heads, tasks = num_tiles_ * heads;
  const auto rows_of = [&](const QueryTile& tile) { return tile.num_tokens * work_->group_size; };
  int64_t most_spans = 0;
  int32_t most_rows = 0;
  for (int64_t t = 0; t < num_tiles_; ++t) {
    const auto [first, last] = spans_of(op, work_->tiles[t]);
    most_spans = std::max(most_spans, last - first);
    most_rows = std::max(most_rows, rows_of(work_->tiles[t]));
  }
  if (deep_ && at_ < order_.size()) pool_.expect(order_[at_]);
  if (num_tiles_ > work_->max_split_tiles || most_spans < 2 || pool_.size() == 1) {
    pool_.parallel_for(tasks, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) {
        const QueryTile& tile = work_->tiles[task / heads];
        const auto kv_head = static_cast<int>(task % heads);
        const ThreadScratch& mine = work_->threads[thread];
        const auto [first, last] = spans_of(op, tile);
        for (int64_t span = first; span < last; ++span) {
          const SpanTask after{&tile, kv_head, span + 1};
          attend_span(op, {&tile, kv_head, span}, span + 1 < last ? &after : nullptr, span > first, mine.part,
                      0, thread);
          merge_span({0, rows_of(tile)}, mine.part, mine.total, mine.first, mine.last, span == first);
        }
        finish(op, tile, {0, rows_of(tile)}, kv_head, mine.total);
      }
    });
    return;
  }
  const int64_t rows = work_->tile_rows;
  const auto partial = [&](int64_t task, int64_t span) -> Partial {
    const int64_t at = (task * most_spans + span) * rows;
    return {work_->split.largest + at, work_->split.sum + at, work_->split.values + at * work_->padded_dim};
  };
  // Some heads of a span at a time.
  const int64_t together = std::min<int64_t>(heads, kernels_.heads_per_split[kv_kernel(spec_.kv_type)]);
  const int64_t head_groups = tasks_for(heads, together), parts = num_tiles_ * head_groups * most_spans;
  const auto span_task = [&](int64_t index) -> SpanTask {  // no tile: nothing to do
    const int64_t group = index / most_spans, head = group % head_groups * together;
    const QueryTile& tile = work_->tiles[group / head_groups];
    const auto [first, last] = spans_of(op, tile);
    const int64_t span = first + index % most_spans;
    return {span < last ? &tile : nullptr, static_cast<int>(head), span,
            static_cast<int>(std::min(together, heads - head))};
  };
  pool_.parallel_parts(parts, [&](const LoopPart& part, int thread) {
    const SpanTask task = span_task(part.index), after = span_task(std::max<int64_t>(0, part.next));
    if (task.tile == nullptr) return;
    const int64_t tile = part.index / most_spans / head_groups;
    attend_span(op, task, part.next < 0 || after.tile == nullptr ? nullptr : &after, part.asked,
                partial(tile * heads + task.kv_head, part.index % most_spans), most_spans * rows, thread);
  });
  // A row at a time: the partials lie in other threads' caches.
  pool_.parallel_for(tasks * most_rows, 2, [&](int64_t begin, int64_t end, int thread) {
    const ThreadScratch& mine = work_->threads[thread];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t task = i / most_rows;
      const QueryTile& tile = work_->tiles[task / heads];
      const auto row = static_cast<int32_t>(i % most_rows);
      if (row >= rows_of(tile)) continue;
      const auto [first, last] = spans_of(op, tile);
      const auto [from, to] = spans_of(op, {tile.sequence, tile.first_token + row / work_->group_size, 1});
      merge_row(row, partial(task, from - first), to - from, mine.total);
      finish(op, tile, {row, row + 1}, static_cast<int>(task % heads), mine.total);
    }
  });
}

}  // namespace millrace::cpu
