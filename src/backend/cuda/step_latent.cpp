// Latent attention (DeepSeek V2) of a step: queries and keys out of what was compressed, the attention over
// one key a token, and the values behind it.
#include <algorithm>

#include "backend/cuda/step_launcher.h"
#include "base/check.h"
#include "kernels/cuda/attention/indexed.h"
#include "kernels/cuda/attention/latent.h"
#include "kernels/cuda/attention/split_plan.h"
#include "kernels/cuda/gemm/head_gemm.h"

namespace millrace::cuda {
namespace {

// One matrix per head, [heads, out, in].
HeadGemm head_gemm_of(const Linear& op, int32_t heads, int64_t out, int64_t in, int64_t rows) {
  const CudaWeight& weight = own(*op.weight);
  MILLRACE_CHECK(weight.experts == heads && weight.rows == out && weight.cols == in && op.bias == nullptr);
  HeadGemm gemm;
  gemm.packed = weight.packed;
  gemm.matrix = weight.matrix;
  gemm.heads = heads;
  gemm.rows = rows;
  return gemm;
}

}  // namespace

// The heads' queries wait in w_.attention, which nobody needs yet; what kv_a made is where other models have
// values.
void StepLauncher::operator()(const NormLatentQkv& op) {
  const LatentShape& s = spec_.latent;
  const int64_t heads = spec_.heads, q_dim = s.nope + s.rope, dim = spec_.head_dim;
  float* q = w_.attention.as<float>();
  const bool compresses = op.q_a.weight != nullptr;
  const Target targets[] = {{op.kv_a, w_.value.as<float>(), s.rank + s.rope},
                            {compresses ? op.q_a : op.q, compresses ? w_.compressed.as<float>() : q,
                             compresses ? int64_t{s.q_rank} : heads * q_dim}};
  linears({w_.residual.as<float>(), plan_.rows, spec_.hidden, &op.norm, nullptr, &w_.normed}, targets, false);
  const bool indexes = op.index_q.weight != nullptr;
  MILLRACE_CHECK(indexes == (s.index_dim > 0) && (compresses || !indexes));
  if (compresses) {
    const Target of_compressed[] = {
        {op.q, q, heads * q_dim},
        {op.index_q, w_.index_query.as<float>(), int64_t{s.index_heads} * s.index_dim}};
    linears({w_.compressed.as<float>(), plan_.rows, s.q_rank, &op.q_a_norm, nullptr, &w_.compressed},
            std::span(of_compressed).first(indexes ? 2 : 1), false);
  }
  if (indexes) {
    const Target of_index[] = {{op.index_k, w_.index_key.as<float>(), s.index_dim},
                               {op.index_weights, w_.index_weights.as<float>(), s.index_heads}};
    linears({w_.residual.as<float>(), plan_.rows, spec_.hidden, &op.norm, nullptr, &w_.normed}, of_index,
            false);
    norm_rows(op.index_k_norm, plan_.rows, s.index_dim, w_.index_key);
  }
  LatentKeys keys;
  keys.compressed = w_.value.as<const float>();
  keys.norm_weight = op.kv_a_norm.weight != nullptr ? own(*op.kv_a_norm.weight).vector() : nullptr;
  keys.eps = op.kv_a_norm.eps;
  keys.rows = plan_.rows;
  keys.rope = s.rope;
  keys.rank = s.rank;
  keys.key = w_.key.as<float>();
  MILLRACE_CHECK(op.kv_a_norm.kind == Norm::Kind::kRms);
  launch_latent_keys(keys, at_);
  launch_latent_rope_queries(q, plan_.rows, spec_.heads, s.nope, s.rope, s.rank, w_.query.as<float>(), at_);
  HeadGemm absorb = head_gemm_of(op.k_b, spec_.heads, s.rank, s.nope, plan_.rows);
  absorb.x = q;
  absorb.x_row = heads * q_dim;
  absorb.x_head = q_dim;
  absorb.y = w_.query.as<float>() + s.rope;
  absorb.y_row = heads * dim;
  absorb.y_head = dim;
  launch_head_gemm(absorb, at_);
}

void StepLauncher::latent_attention(const Attend& op) {
  MILLRACE_CHECK(op.window == 0 && op.chunk == 0 && op.softcap == 0.0f && op.sinks == nullptr &&
                 !op.bidirectional && !op.gated);
  if (spec_.latent.index_top > 0 && plan_.sparse) return indexed_attention(op);
  AttendedRows rows = rows_at(op.layer, 0, plan_.rows);
  if (!plan_.single_tokens) {
    rows.chunks = in_batch(batch_->chunks());
    rows.num_chunks = batch_->num_chunks();
  }
  latent_attention(op, rows);
}

void StepLauncher::latent_attention(const Attend& op, const AttendedRows& rows) {
  LatentAttention attention;
  attention.cache = rows.cache;
  attention.scale = op.scale;
  attention.rope = spec_.latent.rope;
  attention.rank = spec_.latent.rank;
  attention.rows = static_cast<int32_t>(rows.count);
  attention.max_splits = max_splits_for(rows.last_position, 0);
  const int64_t at = rows.first * spec_.heads * spec_.head_dim;
  attention.query = w_.query.as<const float>() + at;
  attention.out = w_.attention.as<float>() + at;
  if (!latent_wgmma_) return launch_latent_generic(attention, at_);
  attention.chunks = rows.chunks;
  attention.num_chunks = rows.num_chunks;
  // Splits on CTAs of their own where rows alone leave SMs idle, though one takes half as long again so: its
  // queries are loaded and its sums stored for it alone. The bits are the same.
  const int64_t pieces = int64_t{rows.chunks == nullptr ? attention.rows : attention.num_chunks} *
                         ((spec_.heads + kLatentRows - 1) / kLatentRows);
  const int64_t sms = at_.device.sm_count(), splits = attention.max_splits;
  const int64_t in_turn = (pieces + sms - 1) / sms * splits, apart = (pieces * splits + sms - 1) / sms;
  if (splits > 1 && 3 * apart < 2 * in_turn &&
      latent_partial_bytes(rows.count, spec_.heads, attention.max_splits, spec_.latent.rank) <=
          w_.partial.bytes()) {
    attention.partial = w_.partial.as<float>();
  }
  launch_latent_wgmma(attention, at_);
}

// ---------------------------------------------------------------- the indexer's tokens

// Behind the keys of the layer.
LayerCache StepLauncher::index_cache_of(int layer) const {
  LayerCache cache = cache_of(layer);
  cache.layer_offset += indexed_block_elements(cache.type, cache.head_dim);
  cache.heads = spec_.latent.index_heads;
  cache.head_dim = spec_.latent.index_dim;
  cache.order = CacheOrder::kRows;
  return cache;
}

// Rotated by the angles of the layer's own queries and keys, in halves whatever these are.
void StepLauncher::append_index_keys(const RopeOp& op) {
  RopeParams params = op.params;
  params.interleaved = false;
  launch_latent_append(index_cache_of(op.layer), params, angle_tables_[op.table].angles.as<const float2>(),
                       plan_.rows, w_.index_query.as<float>(), w_.index_key.as<float>(), at_);
}

void StepLauncher::attend_to_tokens(const Attend& op, int64_t first, int64_t count) {
  AttendedRows rows = rows_at(op.layer, first, count);
  IndexedRows indexed = indexed_shape_of(spec_);
  indexed.cache = rows.cache;
  indexed.index = index_cache_of(op.layer);
  indexed.index.positions += first;
  indexed.index.sequence_of += first;
  indexed.query =
      w_.index_query.as<const float>() + first * spec_.latent.index_heads * spec_.latent.index_dim;
  indexed.weights = w_.index_weights.as<const float>() + first * spec_.latent.index_heads;
  indexed.rows = static_cast<int32_t>(count);
  // The same for all positions of a graph.
  indexed.most_seen = std::min(indexed.context, max_splits_for(plan_.last_position, 0) * kSplitKeys);
  indexed.scores = w_.indexed_scores.as<float>();
  indexed.tokens = w_.indexed_tokens.as<int32_t>();
  indexed.chosen = w_.indexed_keys.as<void>();
  indexed.blocks = w_.indexed_blocks.as<int32_t>();
  indexed.tables = w_.indexed_tables.as<const int32_t*>();
  indexed.positions = w_.indexed_positions.as<int32_t>();
  launch_choose_tokens(indexed, at_);
  rows.single = true;
  rows.last_position = plan_.last_read;
  rows.cache.pool = indexed.chosen;
  rows.cache.layer_offset = 0;
  rows.cache.block_elements = indexed_block_elements(rows.cache.type, rows.cache.head_dim);
  rows.cache.positions = indexed.positions;
  rows.cache.head_tables = indexed.tables;
  latent_attention(op, rows);
}

// Single tokens all together, those that see no more than the indexer reads copied as they are: a graph
// serves steps in which others choose. Of prompts these attend as ever.
void StepLauncher::indexed_attention(const Attend& op) {
  const int64_t at_once = indexed_rows_of(spec_);
  const auto choose = [&](int64_t first, int64_t count) {
    for (int64_t at = 0; at < count; at += at_once)
      attend_to_tokens(op, first + at, std::min(at_once, count - at));
  };
  if (plan_.single_tokens) return choose(0, plan_.rows);
  if (latent_wgmma_ && batch_->num_dense_chunks() > 0) {
    AttendedRows rows = rows_at(op.layer, 0, plan_.rows);
    rows.chunks = in_batch(batch_->dense_chunks());
    rows.num_chunks = batch_->num_dense_chunks();
    latent_attention(op, rows);
  } else if (!latent_wgmma_) {
    for (const BatchArrays::RowRange& range : batch_->dense_rows())
      latent_attention(op, rows_at(op.layer, range.first, range.count));
  }
  for (const BatchArrays::RowRange& range : batch_->sparse_rows()) choose(range.first, range.count);
}

void StepLauncher::head_values(const Linear& op) {
  const LatentShape& s = spec_.latent;
  const int64_t heads = spec_.heads, dim = spec_.head_dim;
  HeadGemm values = head_gemm_of(op, spec_.heads, s.value, s.rank, plan_.rows);
  values.x = w_.attention.as<const float>() + s.rope;
  values.x_row = heads * dim;
  values.x_head = dim;
  values.y = w_.query.as<float>();
  values.y_row = heads * s.value;
  values.y_head = s.value;
  launch_head_gemm(values, at_);
}

}  // namespace millrace::cuda
