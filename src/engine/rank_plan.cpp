#include "engine/rank_plan.h"

#include "base/error.h"
#include "kernels/quant/kv_types.h"
#include "model/feature_recorder.h"
#include "model/weight_slice.h"
#include "model/weight_source.h"

namespace millrace {
namespace {

// What a layer exchanges, by the matrices that end its parts.
dist::PlanShape shape_of(const io::Checkpoint& checkpoint, const ModelConfig& c, const dist::Shares& shares) {
  dist::PlanShape shape{c.hidden, c.heads, c.kv_heads, c.head_dim, c.vocab, {}, shares.whole_attention()};
  WeightSource source(checkpoint, c, /*gather=*/false);
  for (int l = 0; l < c.layers; ++l) {
    dist::PlanShape::Layer& layer = shape.layers.emplace_back();
    layer.attends = c.keeps(l) && !c.has_state(l);
    layer.residuals = 0;
    for (const WeightSpec& spec : source.specs(l)) {
      const std::string_view role = spec.role;
      const bool projects =
          role == "attn_output.weight" || role == "ssm_out.weight" || role == "shortconv.out_proj.weight";
      const bool routed = role == "ffn_down_exps.weight", shared = role == "ffn_down_shexp.weight";
      if (routed && shares.whole_experts()) layer.inner.push_back({c.hidden, c.experts_per_token, c.experts});
      if (routed && !shares.whole_experts()) layer.inner.push_back({c.expert_ffn, c.experts_per_token});
      if (role == "ffn_down.weight" || shared) layer.inner.push_back({spec.shape.back(), 1});
      // A shared expert's outputs go along with the chosen ones'.
      layer.residuals += projects || routed || role == "ffn_down.weight" ? 1 : 0;
    }
  }
  return shape;
}

// Which rows `part` is of `whole`: their data says.
dist::Plan::Part part_of(const std::string& name, const TensorView& whole, const TensorView& part) {
  const bool vector = whole.rank < 2 || whole.shape[static_cast<size_t>(whole.rank - 1)] != part.cols();
  const auto at = static_cast<size_t>(vector ? whole.rank - 1 : whole.rank - 2);
  const int64_t stride = vector ? static_cast<int64_t>(info(whole.type).block_bytes) : whole.row_stride_bytes;
  const int64_t begin = part.data == whole.data || stride == 0 ? 0 : (part.data - whole.data) / stride;
  return {name, begin, begin + part.shape[at], whole.shape[at], part.bytes()};
}

}  // namespace

dist::Plan plan_ranks(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type,
                      const std::vector<double>& speeds, bool whole_experts) {
  dist::Plan plan;
  plan.speeds = speeds;
  const bool whole_attention = whole_experts && !can_share_rows(checkpoint, config);
  const auto shares_of = [&](int rank) {
    dist::Shares shares(rank, speeds);
    if (whole_experts) shares = shares.with_whole_experts();
    return whole_attention ? shares.with_whole_attention() : shares;
  };
  plan.shape = shape_of(checkpoint, config, shares_of(0));
  const bool tied = has_tied_output(checkpoint) && !config.encoder;
  for (int r = 0; r < static_cast<int>(speeds.size()); ++r) {
    const dist::Shares shares = shares_of(r);
    dist::Plan::Rank& rank = plan.ranks.emplace_back();
    if (whole_experts) rank.experts = shares.experts(config.experts);
    const auto add = [&](const std::string& name, const TensorView& whole, const TensorView& part) {
      rank.parts.push_back(part_of(name, whole, part));
      rank.weight_bytes += rank.parts.back().bytes;
    };
    WeightSource source(checkpoint, config, /*gather=*/false);
    visit_weights(
        source, config, [&](const std::string& name, const WeightSpec& spec, const TensorView& view) {
          if (name ==
              "token_embd.weight") {  // looked up row by row: nothing of it is held but what is multiplied
            if (tied) add(name, view, slice_weight(view, "output.weight", config, shares));
            return;
          }
          const TensorView part = slice_weight(view, spec.role, config, shares);
          if (!whole_experts || !is_of_experts(spec.role)) return add(name, view, part);
          rank.parts.push_back({name, rank.experts.begin, rank.experts.end, config.experts, part.bytes()});
          rank.weight_bytes += part.bytes();
        });
    const auto heads = shares.heads(config.heads, config.kv_heads);
    rank.query_heads = heads.query;
    rank.kv_heads = heads.kv;
    const int64_t parts = config.latent.rank > 0 ? 1 : 2;
    for (int l = 0; l < config.layers; ++l) {
      if (!config.keeps(l) || (config.has_state(l) && !config.state_beside)) continue;
      rank.kv_bytes_per_token +=
          static_cast<size_t>(parts * heads.kv.size()) * kv_head_bytes(kv_type, config.head_dim);
      if (config.latent.index_dim > 0)
        rank.kv_bytes_per_token += kv_head_bytes(kv_type, config.latent.index_dim);
    }
  }
  return plan;
}

ContextPlan plan_context(const ModelConfig& config, int32_t context, DType kv_type, int32_t ranks) {
  const ExecutorSpec spec = make_executor_spec(
      config, {.max_context = context, .sequences = 1, .kv_type = kv_type, .context_ranks = ranks});
  ContextPlan plan;
  plan.ranks = ranks;
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    const KvGroupSpec& group = spec.kv_groups[g];
    plan.kv_bytes += spec.kv_block_bytes(static_cast<int>(g)) * static_cast<size_t>(group.blocks_here());
    if (group.shelves == 1) continue;
    // A partial softmax of every head and 512 positions that are others': its maximum, its sum and the
    // values. The last rank has the fewest of its own.
    constexpr int64_t kSplit = int64_t{kShelfBlocks} * kBlockTokens, kLanes = 16;
    const int64_t splits = (context + kSplit - 1) / kSplit, own = splits / ranks;
    const int64_t values = (spec.head_dim + kLanes - 1) / kLanes * kLanes;
    plan.received_per_token +=
        static_cast<uint64_t>((splits - own) * group.num_layers * spec.heads * (values + 2)) * sizeof(float);
  }
  return plan;
}

bool can_share_rows(const io::Checkpoint& checkpoint, const ModelConfig& config) {
  OpFeatures over_heads;  // of which a rank has some
  over_heads.add(OpFeature::kNormWhole);
  if ((needed_features(checkpoint, config) & over_heads).any()) return false;
  try {
    plan_ranks(checkpoint, config, DType::kBF16, {1.0, 1.0});
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return false;
  }
}

}  // namespace millrace
