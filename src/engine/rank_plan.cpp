#include "engine/rank_plan.h"

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "base/error.h"
#include "kernels/quant/kv_types.h"
#include "model/feature_recorder.h"
#include "model/weight_slice.h"
#include "model/weight_source.h"

namespace millrace {
namespace {

// What a layer exchanges, by the matrices that end its parts; of a stage's layers.
dist::PlanShape shape_of(const io::Checkpoint& checkpoint, const ModelConfig& c, const dist::Shares& shares) {
  dist::PlanShape shape{c.hidden, c.heads, c.kv_heads, c.head_dim, c.vocab, {}, shares.whole_attention()};
  WeightSource source(checkpoint, c, /*gather=*/false);
  const dist::Range layers = shares.layers(c.layers);
  for (auto l = static_cast<int>(layers.begin); l < layers.end; ++l) {
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
  return {name, begin, begin + part.shape[at], whole.shape[at], part.bytes(), part.bytes()};
}

// Of so many bytes of a weight those that a token's product reads: its experts are some of them.
size_t read_of(size_t bytes, const WeightSpec& spec, const ModelConfig& config) {
  if (!is_of_experts(spec.role)) return bytes;
  return bytes * static_cast<size_t>(config.experts_per_token) / static_cast<size_t>(config.experts);
}

size_t kv_bytes_of_layer(const ModelConfig& config, int layer, DType kv_type, int64_t kv_heads) {
  if (!config.keeps(layer) || (config.has_state(layer) && !config.state_beside)) return 0;
  const int64_t parts = config.latent.rank > 0 ? 1 : 2;
  size_t bytes = static_cast<size_t>(parts * kv_heads) * kv_head_bytes(kv_type, config.head_dim);
  if (config.latent.index_dim > 0) bytes += kv_head_bytes(kv_type, config.latent.index_dim);
  return bytes;
}

// Which layer a weight is of; -1: of none.
int layer_of(const std::string& name) {
  const std::string block = "blk.";
  return name.starts_with(block) ? std::atoi(name.c_str() + block.size()) : -1;
}

// Of the ranks of one stage, shares_of(0) to shares_of(ranks - 1).
dist::Plan plan_rows(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type, int ranks,
                     const std::function<dist::Shares(int)>& shares_of) {
  dist::Plan plan;
  plan.speeds = shares_of(0).speeds();
  plan.shape = shape_of(checkpoint, config, shares_of(0));
  const dist::Range layers = shares_of(0).layers(config.layers);
  const bool last = layers.end == config.layers, whole_experts = shares_of(0).whole_experts();
  const bool tied = has_tied_output(checkpoint) && !config.encoder;
  for (int r = 0; r < ranks; ++r) {
    const dist::Shares shares = shares_of(r);
    dist::Plan::Rank& rank = plan.ranks.emplace_back();
    if (whole_experts) rank.experts = shares.experts(config.experts);
    WeightSource source(checkpoint, config, /*gather=*/false);
    visit_weights(
        source, config, [&](const std::string& name, const WeightSpec& spec, const TensorView& view) {
          const bool table = name == "token_embd.weight";
          if (table && !tied) return;  // looked up row by row: nothing of it is held but what is multiplied
          const int layer = layer_of(name);
          if (layer < 0 ? !last : layer < layers.begin || layer >= layers.end) return;
          const TensorView part = slice_weight(view, table ? "output.weight" : spec.role, config, shares);
          dist::Plan::Part& added = rank.parts.emplace_back(part_of(name, view, part));
          if (whole_experts && is_of_experts(spec.role)) {
            added.begin = rank.experts.begin;
            added.end = rank.experts.end;
            added.of = config.experts;
          }
          added.read_bytes = read_of(added.bytes, spec, config);
          rank.weight_bytes += added.bytes;
          if (r == 0) plan.read_bytes += read_of(view.bytes(), spec, config);
        });
    const auto heads = shares.heads(config.heads, config.kv_heads);
    rank.query_heads = heads.query;
    rank.kv_heads = heads.kv;
    for (auto l = static_cast<int>(layers.begin); l < layers.end; ++l) {
      rank.kv_bytes_per_token += kv_bytes_of_layer(config, l, kv_type, heads.kv.size());
    }
  }
  return plan;
}

}  // namespace

dist::Plan plan_ranks(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type,
                      const std::vector<double>& speeds, bool whole_experts) {
  const auto ranks = static_cast<int>(speeds.size());
  return plan_grid(checkpoint, config, kv_type, ranks, speeds, whole_experts).stages.front().rows;
}

GridPlan plan_grid(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type, int tensor,
                   const std::vector<double>& speeds, bool whole_experts) {
  const bool whole_attention = whole_experts && !can_share_rows(checkpoint, config);
  GridPlan plan;
  for (int first = 0; first < static_cast<int>(speeds.size()); first += tensor) {
    const auto shares_of = [&](int rank) {
      dist::Shares shares = dist::Shares::grid(first + rank, tensor, speeds);
      if (whole_experts) shares = shares.with_whole_experts();
      return whole_attention ? shares.with_whole_attention() : shares;
    };
    plan.stages.push_back(
        {shares_of(0).layers(config.layers), plan_rows(checkpoint, config, kv_type, tensor, shares_of)});
  }
  return plan;
}

uint64_t GridPlan::received(int rank, int64_t rows, int64_t logit_rows) const {
  const auto stage = static_cast<size_t>(rank / tensor());
  const dist::Plan& own = stages[stage].rows;
  const auto residual = static_cast<uint64_t>(rows * own.shape.hidden) * sizeof(float);
  return own.received(rank % tensor(), rows, stage + 1 == stages.size() ? logit_rows : rows) +
         (stage > 0 ? residual : 0);
}

uint64_t GridPlan::logits_received(int rank, int64_t logit_rows) const {
  const dist::Plan& last = stages.back().rows;
  const auto first_of_last = static_cast<int>(stages.size() - 1) * tensor();
  uint64_t bytes = rank == first_of_last ? last.logits_received(logit_rows) : 0;
  if (rank == 0 && stages.size() > 1) {
    bytes += static_cast<uint64_t>(logit_rows * last.shape.vocab) * sizeof(float);
  }
  return bytes;
}

dist::TokenTime GridPlan::token_time(double alone_s, const dist::LinkSpeed& link) const {
  if (stages.size() == 1) return stages.front().rows.token_time(alone_s, link);
  size_t read = 0;
  for (const Stage& stage : stages) read += stage.rows.read_bytes;
  const auto others = static_cast<int64_t>(tensor()) - 1;
  dist::TokenTime time;
  int64_t latencies = std::ssize(stages);  // from stage to stage, and back with the logits
  uint64_t bytes = 0;
  for (size_t s = 0; s < stages.size(); ++s) {
    const dist::Plan& rows = stages[s].rows;
    const double part = static_cast<double>(rows.read_bytes) / static_cast<double>(read);
    time.computing_s += rows.token_time(alone_s * part, {}).computing_s;
    // The order to compute, exchanges, what comes from the stage before.
    latencies += (rows.exchanges_per_step() - 1) * others + (others > 0 ? 1 : 0);
    for (int reached = 1; s > 0 && reached <= others; reached *= 2) ++latencies;
    const int first = static_cast<int>(s) * tensor();
    uint64_t most = 0;
    for (int r = first; r < first + tensor(); ++r) most = std::max(most, received(r, 1, 1));
    bytes += most + logits_received(first, 1);
  }
  time.latency_s = link.latency_s * static_cast<double>(latencies + others);
  time.moving_s = link.bytes_per_s > 0 ? static_cast<double>(bytes) / link.bytes_per_s : 0;
  return time;
}

StagePlan plan_stages(const io::Checkpoint& checkpoint, const ModelConfig& config, DType kv_type,
                      const std::vector<double>& speeds) {
  const bool tied = has_tied_output(checkpoint);
  StagePlan plan;
  for (int r = 0; r < static_cast<int>(speeds.size()); ++r) {
    StagePlan::Stage& stage = plan.stages.emplace_back();
    stage.layers = dist::Shares::pipeline(r, speeds).layers(config.layers);
    const bool first = stage.layers.begin == 0, last = stage.layers.end == config.layers;
    WeightSource source(checkpoint, config, /*gather=*/false);
    visit_weights(source, config,
                  [&](const std::string& name, const WeightSpec& spec, const TensorView& view) {
                    const int layer = layer_of(name);
                    bool here = last;
                    if (name == "token_embd.weight") here = first || (last && tied);
                    if (layer >= 0) here = layer >= stage.layers.begin && layer < stage.layers.end;
                    if (here && !spec.on_host) stage.weight_bytes += view.bytes();
                  });
    for (auto l = static_cast<int>(stage.layers.begin); l < stage.layers.end; ++l) {
      stage.kv_bytes_per_token += kv_bytes_of_layer(config, l, kv_type, config.kv_heads);
    }
    const int64_t values = r == 0 ? config.vocab : config.hidden;  // logits come back
    stage.received_per_token = static_cast<uint64_t>(values) * sizeof(float);
  }
  return plan;
}

dist::TokenTime StagePlan::token_time(double alone_s, const dist::LinkSpeed& link) const {
  dist::TokenTime time{.computing_s = alone_s};
  if (stages.size() == 1) return time;
  uint64_t bytes = 0;
  for (const Stage& stage : stages) bytes += stage.received_per_token;
  time.latency_s = link.latency_s * static_cast<double>(stages.size());
  time.moving_s = link.bytes_per_s > 0 ? static_cast<double>(bytes) / link.bytes_per_s : 0;
  return time;
}

namespace {

// Of a token's partial softmax of 512 positions, of all heads: maximum, sum and values.
int64_t partial_bytes(const ExecutorSpec& spec) {
  constexpr int64_t kLanes = 16;
  const int64_t values = (spec.head_dim + kLanes - 1) / kLanes * kLanes;
  return spec.heads * (values + 2) * static_cast<int64_t>(sizeof(float));
}

}  // namespace

PromptStepPlan plan_prompt_step(const ExecutorSpec& spec, int32_t ranks, dist::ScheduleKind schedule,
                                int64_t context, int64_t rows, bool wants_logits) {
  const int64_t value_bytes = sizeof(float);
  const dist::PromptShape shape{
      .query_bytes = spec.heads * spec.head_dim * value_bytes,
      .block_bytes = int64_t{spec.kv_parts()} * spec.kv_heads * kBlockTokens *
                     static_cast<int64_t>(kv_head_bytes(spec.kv_type, spec.head_dim)),
      .partial_bytes = partial_bytes(spec)};
  PromptStepPlan plan;
  plan.received.resize(static_cast<size_t>(ranks));
  if (!dist::shares_rows(rows, ranks)) {
    // The ranks of splits that are not one's own, of everything that a row sees.
    for (const ExecutorSpec::LayerPlace& place : spec.layers) {
      if (spec.kv_groups[static_cast<size_t>(place.group)].shelves == 1) continue;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t split = 0; split <= (context + row) / dist::kPromptSplit; ++split) {
          for (int r = 0; r < ranks; ++r) {
            if (split % ranks != r)
              plan.received[static_cast<size_t>(r)] += static_cast<uint64_t>(shape.partial_bytes);
          }
        }
      }
    }
    return plan;
  }
  const std::vector<int64_t> last_row = {rows - 1};
  const dist::PromptLayout all = dist::prompt_layout(ranks, context, rows, 0),
                           last = dist::prompt_layout(ranks, context, rows, 0, &last_row);
  const dist::ContextSchedule chosen = dist::choose_schedule(schedule, all, shape);
  plan.schedule = chosen.name;
  const std::vector<dist::RankBytes> of_layer = dist::prompt_bytes(chosen, all, shape),
                                     of_last = dist::prompt_bytes(
                                         dist::choose_schedule(schedule, last, shape), last, shape);
  for (int r = 0; r < ranks; ++r) {
    const auto rank = static_cast<size_t>(r);
    int64_t received = 0;
    for (size_t l = 0; l < spec.layers.size(); ++l) {
      const bool spread = spec.kv_groups[static_cast<size_t>(spec.layers[l].group)].shelves > 1;
      received += dist::kept_rows_received(ranks, r, context, rows, spread) * spec.kv_parts() *
                  spec.kv_heads * spec.head_dim * value_bytes;
      if (!spread) continue;
      if (l + 1 < spec.layers.size()) {
        received += of_layer[rank].received;
      } else if (wants_logits) {
        received += of_last[rank].received;
      }
    }
    plan.received[rank] = static_cast<uint64_t>(received);
  }
  return plan;
}

ContextPlan plan_context(const ModelConfig& config, const ContextQuestion& question) {
  const int32_t context = question.context, ranks = question.ranks;
  const ExecutorSpec spec = make_executor_spec(
      config, {.max_context = context, .sequences = 1, .kv_type = question.kv_type, .context_ranks = ranks});
  ContextPlan plan;
  plan.ranks = ranks;
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    const KvGroupSpec& group = spec.kv_groups[g];
    plan.kv_bytes += spec.kv_block_bytes(static_cast<int>(g)) * static_cast<size_t>(group.blocks_here());
    if (group.shelves == 1) continue;
    // Of every 512 positions that are others'. The last rank has the fewest of its own.
    const int64_t splits = (context + dist::kPromptSplit - 1) / dist::kPromptSplit, own = splits / ranks;
    plan.received_per_token += static_cast<uint64_t>((splits - own) * group.num_layers * partial_bytes(spec));
  }
  plan.step_tokens = std::min(question.step_tokens, context);
  std::vector<uint64_t> received(static_cast<size_t>(ranks));
  for (int64_t at = 0; at < context; at += plan.step_tokens) {
    const int64_t rows = std::min<int64_t>(plan.step_tokens, context - at);
    const PromptStepPlan step =
        plan_prompt_step(spec, ranks, question.schedule, at, rows, at + rows == context);
    for (size_t r = 0; r < received.size(); ++r) received[r] += step.received[r];
    if (rows == plan.step_tokens) plan.schedule = step.schedule;
  }
  plan.received_per_prompt = *std::max_element(received.begin(), received.end());
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
