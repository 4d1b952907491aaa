// Sparse attention of a step (base/sparse_pages.h): rows beyond their budget choose pages, a context of its
// own for each of them and each KV head, which the kernels of full attention read.
#include <algorithm>

#include "backend/cuda/step_launcher.h"
#include "base/check.h"

namespace millrace::cuda {

bool StepLauncher::has_summaries(int layer) const {
  const int32_t group = spec_.layers[static_cast<size_t>(layer)].group;
  return group >= 0 && w_.summaries[static_cast<size_t>(group)].bytes() > 0;
}

bool StepLauncher::chooses_pages(const Attend& op) const {
  return plan_.sparse && op.window == 0 && op.chunk == 0 && !op.bidirectional && has_summaries(op.layer);
}

PageSummaries StepLauncher::summaries_of(int layer) const {
  const auto [group, index] = spec_.layers[static_cast<size_t>(layer)];
  const int32_t padded = (spec_.head_dim + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
  const int64_t of_layer =
      int64_t{spec_.kv_groups[static_cast<size_t>(group)].num_blocks} * spec_.kv_heads * 2 * padded;
  return {w_.summaries[static_cast<size_t>(group)].as<uint16_t>() + index * of_layer, padded};
}

void StepLauncher::summarize_block(int group, int32_t block) {
  if (w_.summaries[static_cast<size_t>(group)].bytes() == 0) return;
  std::vector<bool> done(static_cast<size_t>(spec_.kv_groups[static_cast<size_t>(group)].num_layers));
  for (int layer = 0; layer < static_cast<int>(spec_.layers.size()); ++layer) {
    const ExecutorSpec::LayerPlace place = spec_.layers[static_cast<size_t>(layer)];
    if (place.group != group || done[static_cast<size_t>(place.index)]) continue;
    done[static_cast<size_t>(place.index)] = true;
    launch_summarize_block(pool_of(layer), summaries_of(layer), block, at_);
  }
}

SparseRows StepLauncher::sparse_rows_at(int layer, int64_t first, int64_t count) const {
  const AttendedRows rows = rows_at(layer, first, count);
  SparseRows sparse;
  sparse.cache = rows.cache;
  sparse.summaries = summaries_of(layer);
  sparse.budgets = in_batch(batch_->budgets()) + first;
  sparse.rows = static_cast<int32_t>(count);
  return sparse;
}

// Behind the append, of the pages that the step's rows have filled: later rows of the step choose by them. In
// a step of single tokens nobody does, and the choice itself summarizes.
void StepLauncher::summarize_rows(int layer) {
  if (!plan_.sparse || plan_.single_tokens || !has_summaries(layer)) return;
  launch_summarize_rows(sparse_rows_at(layer, 0, plan_.rows), at_);
}

void StepLauncher::attend_to_pages(const Attend& op, int64_t first, int64_t count) {
  SparseRows sparse = sparse_rows_at(op.layer, first, count);
  MILLRACE_CHECK(sparse.cache.kv_heads == spec_.kv_heads && sparse.cache.head_dim == spec_.head_dim);
  sparse.query = w_.query.as<const float>() + first * spec_.heads * spec_.head_dim;
  sparse.scale = op.scale;
  sparse.pages = sparse_pages_of(spec_);
  // The same for all positions of a graph.
  sparse.most_before =
      std::min(sparse.pages, max_splits_for(plan_.last_position, 0) * (kSplitKeys / kBlockTokens));
  sparse.summarizes = plan_.single_tokens;
  sparse.weights = w_.sparse_weights.as<float>();
  sparse.tiles = w_.sparse_tiles.as<float2>();
  sparse.chosen = w_.sparse_chosen.as<int32_t>();
  sparse.tables = w_.sparse_tables.as<const int32_t*>();
  sparse.positions = w_.sparse_positions.as<int32_t>();
  launch_choose_pages(sparse, at_);
  AttendedRows rows = rows_at(op.layer, first, count);
  rows.single = true;
  rows.last_position = plan_.last_read;
  rows.cache.positions = sparse.positions;
  rows.cache.head_tables = sparse.tables;
  attend(op, rows);
}

// Single tokens in one launch, those within their budget with tables of their own: a graph serves steps in
// which others choose. Of prompts the rows within their budget attend as ever.
void StepLauncher::sparse_attention(const Attend& op) {
  const int64_t at_once = sparse_rows_of(spec_);
  const auto choose = [&](int64_t first, int64_t count) {
    for (int64_t at = 0; at < count; at += at_once)
      attend_to_pages(op, first + at, std::min(at_once, count - at));
  };
  if (plan_.single_tokens) return choose(0, plan_.rows);
  const std::vector<BatchArrays::RowRange>& dense = batch_->dense_rows();
  if (!dense.empty() && uses_paged_attention(op) && attends_in_chunks()) {
    AttendedRows rows = rows_at(op.layer, 0, plan_.rows);
    const bool some = !batch_->sparse_rows().empty();
    rows.chunks = in_batch(some ? batch_->dense_chunks() : batch_->chunks());
    rows.num_chunks = some ? batch_->num_dense_chunks() : batch_->num_chunks();
    attend(op, rows);
  } else {
    for (const BatchArrays::RowRange& range : dense) attend(op, rows_at(op.layer, range.first, range.count));
  }
  for (const BatchArrays::RowRange& range : batch_->sparse_rows()) choose(range.first, range.count);
}

}  // namespace millrace::cuda
