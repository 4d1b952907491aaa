#include "backend/cuda/step_launcher.h"

#include <algorithm>

#include "backend/cuda/step_norms.h"
#include "base/check.h"
#include "kernels/cuda/attention/latent.h"
#include "kernels/cuda/attention/tile_attention.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/generic.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/linear/state_rows.h"
#include "kernels/cuda/moe/gelu.h"
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/moe/sigmoid_routing.h"
#include "kernels/cuda/norm/norm.h"
#include "kernels/cuda/norm/row_norm.h"
#include "kernels/cuda/sample/argmax.h"
#include "kernels/cuda/sample/sample.h"

namespace millrace::cuda {
namespace {

template <class Array>
size_t count_of(const Array& array) {
  return static_cast<size_t>(std::end(array) - std::begin(array));
}

}  // namespace

StepLauncher::StepLauncher(const ExecutorSpec& spec, const Workspace& workspace, const Launch& at,
                           RankPart* part)
    : spec_(spec),
      w_(workspace),
      at_(at),
      part_(part),
      // With an indexer the generic kernel attends: copies of chosen tokens in the tensor cores' order have
      // not run on a GPU yet.
      latent_wgmma_(spec.latent.rank > 0 && spec.latent.index_top == 0 &&
                    supports_latent_wgmma(spec.kv_type, spec.latent.rope, spec.latent.rank, at.device)),
      whole_grid_(at.device.claim_grid()) {
  // By the whole model's heads: a rank's kernels are those of one GPU.
  const ExecutorSpec& whole = part == nullptr ? spec : part->whole();
  for (int g = 0; g < static_cast<int>(whole.kv_groups.size()); ++g) {
    const int32_t kv_heads = whole.kv_heads_of(g), dim = whole.head_dim_of(g);
    attention_kinds_.push_back(
        {whole.latent.rank == 0 &&
             supports_paged_attention(whole.kv_type, whole.heads, kv_heads, dim, at.device),
         supports_tile_attention(whole.kv_type, whole.heads, kv_heads, dim, at.device)});
  }
}

void StepLauncher::launch(const std::vector<StepOp>& ops, const StepPlan& plan, const BatchArrays& batch,
                          int32_t* batch_device, const std::function<void(size_t)>& before) {
  plan_ = plan;
  batch_ = &batch;
  batch_device_ = batch_device;
  fused_rope_ = nullptr;
  pairs_ = plan.rows * spec_.experts_per_token;
  if (plan.takes_sampled && std::holds_alternative<Embed>(ops.front())) {
    launch_take_sampled(w_.best.as<const int32_t>(), in_batch(batch.sampled_rows()), plan.rows,
                        batch_device + batch.tokens(), at_);
  }
  prepare_angles(ops);
  for (size_t i = 0; i < ops.size(); ++i) {
    if (fuses_rope(ops, i)) {
      fused_rope_ = &std::get<RopeOp>(ops[i]);
      continue;
    }
    if (before) before(i);
    if (launch_persistent(ops, i)) {
      ++i;
      continue;
    }
    std::visit([this](const auto& op) { visit(op); }, ops[i]);
  }
}

const float* StepLauncher::hidden(const Norm& norm, int64_t rows) {
  if (is_plain(norm)) {
    launch_rmsnorm(w_.residual.as<float>(), nullptr, vector_of(norm.weight), norm.eps, rows, spec_.hidden,
                   w_.normed.as<float>(), at_);
  } else {
    launch_row_norm(row_norm_of(norm, w_.residual.as<float>(), rows, spec_.hidden, w_.normed.as<float>()),
                    at_);
  }
  return w_.normed.as<const float>();
}

// ---------------------------------------------------------------- positions

size_t StepLauncher::angle_table(std::span<const float> inv_freq, float magnitude,
                                 std::span<const uint8_t> axes) {
  for (size_t i = 0; i < angle_tables_.size(); ++i) {
    const AngleTable& table = angle_tables_[i];
    if (table.magnitude == magnitude &&
        std::equal(table.values.begin(), table.values.end(), inv_freq.begin(), inv_freq.end()) &&
        std::equal(table.axes.begin(), table.axes.end(), axes.begin(), axes.end())) {
      return i;
    }
  }
  AngleTable& table = angle_tables_.emplace_back();
  table.values.assign(inv_freq.begin(), inv_freq.end());
  table.axes.assign(axes.begin(), axes.end());
  table.magnitude = magnitude;
  table.inv_freq = DeviceBuffer(inv_freq.size_bytes(), "the rotary angles");
  table.angles = DeviceBuffer(static_cast<size_t>(spec_.max_tokens) * inv_freq.size() * sizeof(float2),
                              "the rotary angles");
  MILLRACE_CHECK(axes.empty() || axes.size() == inv_freq.size());
  if (!axes.empty()) {
    table.device_axes = DeviceBuffer(axes.size_bytes(), "the rotary axes");
    MILLRACE_CUDA_TRY(cudaMemcpyAsync(table.device_axes.as<void>(), table.axes.data(), axes.size_bytes(),
                                      cudaMemcpyHostToDevice, at_.stream));
  }
  if (!inv_freq.empty()) {
    MILLRACE_CUDA_TRY(cudaMemcpyAsync(table.inv_freq.as<void>(), table.values.data(), inv_freq.size_bytes(),
                                      cudaMemcpyHostToDevice, at_.stream));
    MILLRACE_CUDA_TRY(cudaStreamSynchronize(at_.stream));
  }
  return angle_tables_.size() - 1;
}

// Rotation and append go into the attention kernel when nobody attends to another row of the same step.
bool StepLauncher::fuses_rope(const std::vector<StepOp>& ops, size_t at) const {
  const auto* rope = std::get_if<RopeOp>(&ops[at]);
  if (rope == nullptr || at + 1 == ops.size()) return false;
  const auto* attend = std::get_if<Attend>(&ops[at + 1]);
  return attend != nullptr && attend->layer == rope->layer && rope->appends &&
         uses_paged_attention(*attend) && plan_.single_tokens && !chooses_pages(*attend) &&
         2 * rope->params.half == head_dim_of(rope->layer) && rope->growth.scale == 0.0f;
}

void StepLauncher::prepare_angles(const std::vector<StepOp>& ops) {
  std::vector<bool> done(angle_tables_.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    const auto* rope = std::get_if<RopeOp>(&ops[i]);
    if (rope == nullptr || done[rope->table]) continue;
    done[rope->table] = true;
    const AngleTable& table = angle_tables_[rope->table];
    if (plan_.rope_positions != nullptr) {
      launch_angles_on_axes(plan_.rope_positions,
                            table.axes.empty() ? nullptr : table.device_axes.as<const uint8_t>(), plan_.rows,
                            rope->params, table.angles.as<float2>(), at_);
    } else {
      launch_angles(in_batch(batch_->positions()), plan_.rows, rope->params, table.angles.as<float2>(), at_);
    }
  }
}

LayerCache StepLauncher::pool_of(int layer) const {
  const auto [group, index] = spec_.layers[static_cast<size_t>(layer)];
  LayerCache cache;
  cache.pool = w_.pools[static_cast<size_t>(group)].as<void>();
  cache.type = spec_.kv_type;
  const int32_t kv_heads = spec_.kv_heads_of(group), dim = spec_.head_dim_of(group);
  const int32_t scale = spec_.kv_type == DType::kF8E4M3 ? 1 : 0;  // behind a head's elements
  const int32_t index_elements = spec_.latent.index_dim > 0 ? spec_.latent.index_dim + scale : 0;
  const int64_t layer_elements =
      int64_t{kBlockTokens} * (int64_t{spec_.kv_parts()} * kv_heads * (dim + scale) + index_elements);
  cache.layer_offset = index * layer_elements;
  cache.block_elements = spec_.kv_groups[static_cast<size_t>(group)].num_layers * layer_elements;
  cache.heads = spec_.heads;
  cache.kv_heads = kv_heads;
  cache.head_dim = dim;
  const bool swizzled = kinds_of(layer).paged || (latent_wgmma_ && spec_.kv_type == DType::kBF16);
  cache.order = swizzled ? CacheOrder::kSwizzled : CacheOrder::kRows;
  return cache;
}

LayerCache StepLauncher::cache_of(int layer) const {
  LayerCache cache = pool_of(layer);
  cache.positions = in_batch(batch_->positions());
  cache.sequence_of = in_batch(batch_->sequence_of());
  cache.table_starts = in_batch(batch_->table_starts(spec_.layers[static_cast<size_t>(layer)].group));
  cache.tables = in_batch(0);
  return cache;
}

// ---------------------------------------------------------------- operations

void StepLauncher::look_up(const Weight& table, const int32_t* indices, float scale,
                           const DeviceBuffer& out) {
  const PackedMatrix& packed = own(table).packed;
  if (packed.format != PackedFormat::kNone) {
    return launch_embed_packed(packed, indices, plan_.rows, scale, out.as<float>(), at_);
  }
  launch_embed(own(table).matrix, indices, plan_.rows, scale, out.as<float>(), at_);
}

void StepLauncher::operator()(const Embed& op) {
  look_up(*op.table, in_batch(batch_->tokens()), op.scale, w_.residual);
  const auto add_rows = [&](const Weight* table, const int32_t* indices) {
    if (table == nullptr) return;
    look_up(*table, indices, 1.0f, w_.normed);
    RowNorm add = row_norm_of({}, w_.normed.as<float>(), plan_.rows, spec_.hidden, w_.residual.as<float>());
    add.add = true;
    launch_row_norm(add, at_);
  };
  add_rows(op.positions, in_batch(batch_->positions()));
  add_rows(op.types, w_.token_types.as<const int32_t>());
  norm_rows(op.norm, plan_.rows, spec_.hidden, w_.residual);
  (*this)(GivenOp{});
}

void StepLauncher::operator()(const NormQkv& op) {
  if (!has_heads()) return;
  const int64_t dim = op.head_dim > 0 ? op.head_dim : spec_.head_dim;
  const bool keys = op.k.weight != nullptr;  // else another layer's are read
  const int64_t kv_cols = keys ? op.k.weight->rows : 0;
  MILLRACE_CHECK(kv_cols % dim == 0 && (op.head_dim > 0 || !keys || kv_cols == spec_.kv_heads * dim));
  // Of a gated layer query and gate alternate, head by head.
  const Target targets[] = {
      {op.q, (op.gated ? w_.projected : w_.query).as<float>(), (op.gated ? 2 : 1) * spec_.heads * dim},
      {op.k, w_.key.as<float>(), kv_cols},
      {op.v, w_.value.as<float>(), kv_cols}};
  linears({w_.residual.as<float>(), plan_.rows, spec_.hidden, &op.norm, nullptr, &w_.normed},
          std::span(targets).first(keys ? 3 : 1), false);
  if (op.gated) {
    launch_split_gates(w_.projected.as<const float>(), plan_.rows * spec_.heads, spec_.head_dim,
                       w_.query.as<float>(), w_.attention_gate.as<float>(), at_);
  }
  norm_heads(op.q_norm, spec_.heads, dim, op.norm_whole, w_.query);
  if (!keys) return;
  norm_heads(op.k_norm, kv_cols / dim, dim, op.norm_whole, w_.key);
  norm_heads(op.v_norm, kv_cols / dim, dim, false, w_.value);
}

void StepLauncher::operator()(const RopeOp& op) {
  if (!has_heads()) return;
  const auto* angles = angle_tables_[op.table].angles.as<const float2>();
  if (is_latent()) {
    launch_latent_append(cache_of(op.layer), op.params, angles, plan_.rows, w_.query.as<float>(),
                         w_.key.as<float>(), at_);
    if (spec_.latent.index_dim > 0) append_index_keys(op);
  } else {
    LayerCache cache = cache_of(op.layer);
    if (!op.appends) cache.kv_heads = 0;  // queries alone: what they read is another layer's
    launch_rope_append_kv(cache, op.params, angles, plan_.rows, w_.query.as<float>(), w_.key.as<float>(),
                          w_.value.as<float>(), at_);
    if (op.appends) summarize_rows(op.layer);
  }
  if (op.growth.scale == 0.0f) return;
  launch_grow_queries(op.growth, in_batch(batch_->positions()), plan_.rows,
                      int64_t{spec_.heads} * head_dim_of(op.layer), w_.query.as<float>(), at_);
}

void StepLauncher::operator()(const Attend& op) {
  if (!has_heads()) {
    fused_rope_ = nullptr;
    return;
  }
  attend(op);
  if (!batch_->both_ways().empty()) attend_both_ways(op);
  if (op.gated) {
    launch_gate_attention(w_.attention_gate.as<const float>(), plan_.rows * spec_.heads * spec_.head_dim,
                          w_.attention.as<float>(), at_);
  }
}

StepLauncher::AttendedRows StepLauncher::rows_at(int layer, int64_t first, int64_t count) const {
  AttendedRows rows{cache_of(layer), first, count, plan_.single_tokens, plan_.last_position};
  rows.cache.positions += first;
  rows.cache.sequence_of += first;
  return rows;
}

void StepLauncher::attend(const Attend& op) {
  if (is_latent()) return latent_attention(op);
  if (chooses_pages(op)) return sparse_attention(op);
  AttendedRows rows = rows_at(op.layer, 0, plan_.rows);
  if (attends_in_chunks()) {
    rows.chunks = in_batch(batch_->chunks());
    rows.num_chunks = batch_->num_chunks();
  }
  attend(op, rows);
}

void StepLauncher::attend(const Attend& op, const AttendedRows& rows) {
  if (uses_paged_attention(op)) return paged_attention(op, rows);
  // A sequence of one token ends with it: nobody is behind it.
  const bool sees_behind = op.bidirectional && !plan_.single_tokens;
  const AttentionLimits limits{op.softcap, op.chunk, sees_behind ? in_batch(batch_->lengths()) : nullptr,
                               false};
  if (kinds_of(op.layer).tiled) return tile_attention(op, rows, limits);
  const AttentionParams params{op.window, op.scale, vector_of(op.sinks)};
  const int64_t at = rows.first * spec_.heads * rows.cache.head_dim;
  launch_attention(rows.cache, params, rows.count, w_.query.as<float>() + at, w_.attention.as<float>() + at,
                   at_, limits);
}

// Once more for rows of images, which see one another: what they get depends on no other row of the step.
void StepLauncher::attend_both_ways(const Attend& op) {
  MILLRACE_CHECK(!is_latent() && !op.bidirectional);
  const AttentionLimits limits{op.softcap, op.chunk, in_batch(batch_->lengths()), true};
  for (const BatchArrays::RowRange& rows : batch_->both_ways()) {
    TileAttention attention;
    attention.cache = cache_of(op.layer);
    attention.cache.positions += rows.first;
    attention.cache.sequence_of += rows.first;
    attention.op = {op.window, op.scale, vector_of(op.sinks)};
    attention.limits = limits;
    attention.rows = rows.count;
    const int64_t at = int64_t{rows.first} * spec_.heads * attention.cache.head_dim;
    attention.query = w_.query.as<const float>() + at;
    attention.out = w_.attention.as<float>() + at;
    if (kinds_of(op.layer).tiled) {
      launch_tile_attention(attention, at_);
    } else {
      launch_attention(attention.cache, attention.op, rows.count, attention.query, attention.out, at_,
                       limits);
    }
  }
}

void StepLauncher::tile_attention(const Attend& op, const AttendedRows& rows, const AttentionLimits& limits) {
  TileAttention attention;
  attention.cache = rows.cache;
  attention.op = {op.window, op.scale, vector_of(op.sinks)};
  attention.limits = limits;
  attention.rows = static_cast<int32_t>(rows.count);
  attention.single_tokens = rows.single;
  // A chunk is no longer than a window of its size.
  const int32_t window = op.bidirectional ? 0 : op.window > 0 ? op.window : op.chunk;
  attention.max_splits = max_splits_for(rows.last_position, window);
  const int64_t at = rows.first * spec_.heads * rows.cache.head_dim;
  attention.query = w_.query.as<const float>() + at;
  attention.out = w_.attention.as<float>() + at;
  if (rows.single && attention.max_splits > 1 &&
      tile_attention_partial_bytes(rows.count, spec_.heads, attention.max_splits, attention.cache.head_dim) <=
          w_.partial.bytes()) {
    attention.partial = w_.partial.as<float>();
  }
  launch_tile_attention(attention, at_);
}

void StepLauncher::paged_attention(const Attend& op, const AttendedRows& rows) {
  PagedAttention attention;
  attention.cache = rows.cache;
  attention.op = {op.window, op.scale, vector_of(op.sinks)};
  attention.rows = static_cast<int32_t>(rows.count);
  attention.max_splits = max_splits_for(rows.last_position, op.window);
  if (fused_rope_ != nullptr) {
    attention.angles = angle_tables_[fused_rope_->table].angles.as<const float2>();
    attention.interleaved = fused_rope_->params.interleaved;
    fused_rope_ = nullptr;
  }
  const int32_t kv_heads = attention.cache.kv_heads, dim = attention.cache.head_dim;
  const int64_t at = rows.first * spec_.heads * dim, kv_at = rows.first * kv_heads * dim;
  attention.query = w_.query.as<const float>() + at;
  attention.key = w_.key.as<const float>() + kv_at;
  attention.value = w_.value.as<const float>() + kv_at;
  attention.out = w_.attention.as<float>() + at;
  if (splits_in_parallel(rows.count, kv_heads, dim, attention.max_splits, op.window, w_.partial.bytes(),
                         at_.device)) {
    attention.partial = w_.partial.as<float>();
  }
  attention.arrived = w_.arrived.as<int32_t>();
  attention.chunks = rows.chunks;
  attention.num_chunks = rows.num_chunks;
  launch_paged_attention(attention, at_);
}

void StepLauncher::linear_add(const Linear& op, const Rows& x, const Norm& norm_after, float scale) {
  const bool as_it_is = !norm_after.present() && scale == 1.0f;
  float* const all = (as_it_is ? w_.residual : w_.normed).as<float>();
  float* to = all;
  if (part_ != nullptr) {
    to = as_it_is ? part_->take_columns(all, plan_.rows, at_) : part_->columns();
  }
  const Target target{op, to, own_hidden()};
  if (own_hidden() > 0) linears(x, {&target, 1}, as_it_is);
  if (part_ != nullptr) part_->gather_rows(to, spec_.hidden, all, plan_.rows, at_);
  if (!as_it_is) add_normed(norm_after, scale);
}

void StepLauncher::add_normed(const Norm& norm_after, float scale) {
  RowNorm add =
      row_norm_of(norm_after, w_.normed.as<float>(), plan_.rows, spec_.hidden, w_.residual.as<float>());
  add.add = true;
  add.scale = scale;
  launch_row_norm(add, at_);
}

void StepLauncher::operator()(const Projection& op) {
  if (op.head_values.weight != nullptr) {
    head_values(op.head_values);
    const int64_t cols = int64_t{spec_.heads} * spec_.latent.value;
    return linear_add(op.linear, {w_.query.as<float>(), plan_.rows, cols, nullptr, nullptr, nullptr},
                      op.norm_after, op.scale);
  }
  const float* attended = w_.attention.as<float>();
  if (part_ != nullptr && !part_->whole_attention()) {
    attended = part_->gather_heads(attended, plan_.rows, at_);
  }
  linear_add(op.linear, {attended, plan_.rows, op.linear.weight->cols, nullptr, nullptr, nullptr},
             op.norm_after, op.scale);
}

void StepLauncher::activate(millrace::Activation kind, int64_t size, float* gate, const float* up) {
  if (up != nullptr && in_epilogues(kind)) return launch_activate({}, size, gate, up, at_);
  launch_gelu(kind_of(kind), size, gate, up, at_);
}

void StepLauncher::gate_up(const Rows& rows, const Linear& gate, const Linear& up,
                           millrace::Activation activation) {
  MILLRACE_CHECK(activation != millrace::Activation::kClampedSwiglu);  // experts alone have it
  const int64_t inner = up.weight->rows;
  MILLRACE_CHECK(inner <= spec_.ffn);
  if (inner == 0) return;  // of a rank
  const bool gated = gate.weight != nullptr;
  const Target targets[] = {{gated ? gate : up, w_.gate.as<float>(), inner}, {up, w_.up.as<float>(), inner}};
  linears(rows, std::span(targets).first(gated ? 2 : 1), false);
  activate(activation, rows.count * inner, w_.gate.as<float>(), gated ? w_.up.as<float>() : nullptr);
}

const DeviceBuffer& StepLauncher::whole_inner(const Linear& down, int64_t rows) {
  if (part_ == nullptr) return w_.gate;
  part_->gather_rows(w_.gate.as<const float>(), down.weight->cols, w_.up.as<float>(), rows, at_);
  return w_.up;
}

// Gate, up and their activation in one kernel, for few rows. False: they are not, and nothing was launched.
bool StepLauncher::gemv_ffn(const Ffn& op) {
  const bool plain = op.gate.weight != nullptr && op.activation == millrace::Activation::kSilu &&
                     op.norm.kind == Norm::Kind::kRms && op.norm.weight != nullptr &&
                     !op.norm_after.present() && op.scale == 1.0f;
  if (!plain || plan_.rows > kMaxGemvRows || plan_.adapters != nullptr || part_ != nullptr) return false;
  const PackedMatrix &gate = own(*op.gate.weight).packed, &up = own(*op.up.weight).packed,
                     &down = own(*op.down.weight).packed;
  const auto tokens = static_cast<int32_t>(plan_.rows);
  if (gate.format != up.format || !supports_gemv(gate, at_.device, tokens) ||
      !supports_gemv(down, at_.device, tokens))
    return false;
  MILLRACE_CHECK(gate.rows == up.rows && up.rows <= spec_.ffn && gate.cols == spec_.hidden);
  MILLRACE_CHECK(down.rows == spec_.hidden && down.cols == up.rows);
  Gemv gemv;
  gemv.num_parts = 2;
  gemv.parts[0] = {gate, vector_of(op.gate.bias), nullptr};
  gemv.parts[1] = {up, vector_of(op.up.bias), nullptr};
  gemv.x = w_.residual.as<const float>();
  gemv.norm_weight = vector_of(op.norm.weight);
  gemv.eps = op.norm.eps;
  gemv.tokens = tokens;
  gemv.act = w_.gate.as<uint16_t>();
  launch_gemv(gemv, at_);
  Gemv second;
  second.num_parts = 1;
  second.parts[0] = {down, vector_of(op.down.bias), w_.residual.as<float>()};
  second.x_bf16 = w_.gate.as<const uint16_t>();
  second.tokens = gemv.tokens;
  second.add = true;
  launch_gemv(second, at_);
  return true;
}

void StepLauncher::operator()(const Ffn& op) {
  if (fp8_ffn(op) || gemv_ffn(op)) return;
  const Rows rows{w_.residual.as<float>(), plan_.rows, spec_.hidden, &op.norm, nullptr, &w_.normed};
  Rows inner{w_.gate.as<float>(), plan_.rows, op.down.weight->cols, nullptr, nullptr, nullptr};
  if (gated_products(op, rows)) {
    inner.up = w_.up.as<float>();
    inner.activation = kind_of(op.activation);
  } else {
    gate_up(rows, op.gate, op.up, op.activation);
    inner.x = whole_inner(op.down, plan_.rows).as<float>();
  }
  linear_add(op.down, inner, op.norm_after, op.scale);
}

bool StepLauncher::gated_products(const Ffn& op, const Rows& rows) {
  const bool rounds = op.gate.weight != nullptr && op.activation != millrace::Activation::kClampedSwiglu &&
                      own(*op.down.weight).packed.format != PackedFormat::kNone;
  if (!rounds || rows.count <= kMaxGemvRows || plan_.adapters != nullptr || part_ != nullptr ||
      !plan_.runs.empty())
    return false;
  const int64_t inner = op.up.weight->rows;
  MILLRACE_CHECK(inner <= spec_.ffn);
  const Target targets[] = {{op.gate, w_.gate.as<float>(), inner}, {op.up, w_.up.as<float>(), inner}};
  linears(rows, targets, false);
  return true;
}

void StepLauncher::operator()(const Logits& op) {
  if (spec_.vocab == 0) return;  // of a rank
  const Target target{op.output, w_.logits.as<float>(), spec_.vocab};
  linears({w_.residual.as<float>(), plan_.logit_rows, spec_.hidden, &op.norm, in_batch(batch_->logit_rows()),
           &w_.normed_logit_rows, true},
          {&target, 1}, false);
  if (op.scale == 1.0f && op.softcap == 0.0f) return;
  launch_scale_softcap(op.scale, op.softcap, plan_.logit_rows * spec_.vocab, w_.logits.as<float>(), at_);
}

void StepLauncher::operator()(const ArgmaxOp&) {
  launch_argmax(w_.logits.as<float>(), plan_.logit_rows, spec_.vocab, w_.candidates.as<void>(),
                w_.best.as<int32_t>(), at_);
}

void StepLauncher::operator()(const SampleOp&) {
  launch_sample(w_.logits.as<float>(), plan_.logit_rows, spec_.vocab,
                static_cast<const SampleParams*>(plan_.sampling), w_.best.as<int32_t>(),
                w_.sample_details.as<SampleDetails>(), at_);
}

void StepLauncher::operator()(const AddRowsOp&) {
  RowNorm add;
  add.kind = NormKind::kNone;
  add.x = plan_.rows_in;
  add.rows = plan_.rows;
  add.size = spec_.hidden;
  add.y = w_.residual.as<float>();
  add.add = true;
  launch_row_norm(add, at_);
}

// ---------------------------------------------------------------- linear layers

void StepLauncher::norm_rows(const Norm& op, int64_t rows, int64_t size, const DeviceBuffer& values) {
  if (!op.present()) return;
  if (!is_plain(op)) {
    return launch_row_norm(row_norm_of(op, values.as<float>(), rows, size, values.as<float>()), at_);
  }
  launch_rmsnorm(values.as<float>(), nullptr, vector_of(op.weight), op.eps, rows, size, values.as<float>(),
                 at_);
}

void StepLauncher::norm_heads(const Norm& op, int64_t heads, int64_t dim, bool whole,
                              const DeviceBuffer& values) {
  const int64_t cols = whole ? heads * dim : dim;
  norm_rows(op, whole ? plan_.rows : plan_.rows * heads, cols, values);
}

void StepLauncher::linears(const Rows& rows, std::span<const Target> targets, bool add) {
  if (rows.norm != nullptr && !is_plain(*rows.norm)) {  // no product has it: normed once for all
    RowNorm norm = row_norm_of(*rows.norm, rows.x, rows.count, rows.cols, rows.normed->as<float>());
    norm.source_rows = rows.source;
    launch_row_norm(norm, at_);
    return linears({norm.y, rows.count, rows.cols, nullptr, nullptr, nullptr, rows.logits}, targets, add);
  }
  products(rows, targets, add);
  if (any_update(targets)) add_updates(rows, targets);
}

// The products themselves, of rows with RMSNorm or without norm.
void StepLauncher::products(const Rows& rows, std::span<const Target> targets, bool add) {
  if (!plan_.runs.empty() && !rows.logits) return products_in_runs(rows, targets, add);
  full_products(rows, targets, add);
}

void StepLauncher::full_products(const Rows& rows, std::span<const Target> targets, bool add) {
  std::vector<Target> by_format[kPackedFormats];
  for (const Target& target : targets) {
    const Weight& weight = *target.linear.weight;
    MILLRACE_CHECK(weight.rows == target.expected_rows && weight.cols == rows.cols);
    by_format[static_cast<int>(own(weight).packed.format)].push_back(target);
  }
  for (int f = static_cast<int>(PackedFormat::kNone) + 1; f < kPackedFormats; ++f) {
    if (!by_format[f].empty()) packed_linears(rows, by_format[f], static_cast<PackedFormat>(f), add);
  }
  const std::vector<Target>& rest = by_format[static_cast<int>(PackedFormat::kNone)];
  if (rest.empty()) return;
  const float* x = rows.x;
  if (rows.norm != nullptr) {
    launch_rmsnorm(rows.x, rows.source, vector_of(rows.norm->weight), rows.norm->eps, rows.count, rows.cols,
                   rows.normed->as<float>(), at_);
    x = rows.normed->as<float>();
  }
  for (const Target& target : rest) {
    launch_linear(own(*target.linear.weight).matrix, vector_of(target.linear.bias), x, rows.count, add,
                  target.out, at_);
  }
}

void StepLauncher::packed_linears(const Rows& rows, std::span<const Target> targets, PackedFormat format,
                                  bool add) {
  const float* norm_weight = rows.norm != nullptr ? vector_of(rows.norm->weight) : nullptr;
  const float eps = rows.norm != nullptr ? rows.norm->eps : 0.0f;
  MILLRACE_CHECK(targets.size() <= count_of(Gemv{}.parts));
  if (rows.count <= kMaxGemvRows &&
      supports_gemv(own(*targets[0].linear.weight).packed, at_.device, static_cast<int32_t>(rows.count))) {
    Gemv op;
    for (const Target& target : targets) {
      op.parts[op.num_parts++] = {own(*target.linear.weight).packed, vector_of(target.linear.bias),
                                  target.out};
    }
    op.x = rows.x;
    op.source_rows = rows.source;
    op.norm_weight = norm_weight;
    op.eps = eps;
    op.tokens = static_cast<int32_t>(rows.count);
    op.add = add;
    return launch_gemv(op, at_);
  }
  const Bf16Rows rounded{w_.bf16_rows.as<uint8_t>()};
  if (rows.up != nullptr) {
    RoundGated round;
    round.kind = rows.activation;
    round.gate = rows.x;
    round.up = rows.up;
    round.rows = rows.count;
    round.cols = rows.cols;
    round.weights = format;
    round.to = rounded;
    launch_round_gated(round, at_);
  } else {
    RoundRows round;
    round.x = rows.x;
    round.source_rows = rows.source;
    round.norm_weight = norm_weight;
    round.eps = eps;
    round.rows = rows.count;
    round.cols = rows.cols;
    round.weights = format;
    round.to = rounded;
    launch_round_rows(round, at_);
  }
  Gemm op;
  for (const Target& target : targets) {
    op.parts[op.num_parts++] = {own(*target.linear.weight).packed, vector_of(target.linear.bias), target.out};
  }
  op.x = rounded;
  op.rows = rows.count;
  op.add = add;
  if (whole_grid_.held()) op.split = split_workspace(w_.split.as<void>(), at_.device);
  launch_gemm(op, at_);
}

}  // namespace millrace::cuda
