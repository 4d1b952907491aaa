#include "model/model.h"

#include <algorithm>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/weight_source.h"

namespace millrace {
namespace {

// Walks every weight of a model in file-independent order and hands (role, view, use, where it goes) to
// `visit`.
template <class Visit>
void for_each_weight(WeightSource& source, const ModelConfig& c, ModelWeights& w, const Visit& visit) {
  const int64_t q = static_cast<int64_t>(c.heads) * c.head_dim,
                kv = static_cast<int64_t>(c.kv_heads) * c.head_dim;
  const auto required = [&](int l, std::string_view role, std::vector<int64_t> shape, WeightUse use,
                            WeightPtr& to) { visit(source.require(l, role, std::move(shape)), use, to); };
  const auto optional = [&](int l, std::string_view role, std::vector<int64_t> shape, WeightUse use,
                            WeightPtr& to) {
    if (auto view = source.find(l, role, std::move(shape))) visit(*view, use, to);
  };
  using enum WeightUse;
  required(-1, "token_embd.weight", {c.vocab, c.hidden}, kEmbedding, w.token_embedding);
  required(-1, "output_norm.weight", {c.hidden}, kVector, w.output_norm);
  optional(-1, "output.weight", {c.vocab, c.hidden}, kMatrix, w.output);
  w.layers.resize(c.layers);
  for (int l = 0; l < c.layers; ++l) {
    LayerWeights& w_l = w.layers[l];
    required(l, "attn_norm.weight", {c.hidden}, kVector, w_l.attn_norm);
    required(l, "attn_q.weight", {q, c.hidden}, kMatrix, w_l.attn_q);
    required(l, "attn_k.weight", {kv, c.hidden}, kMatrix, w_l.attn_k);
    required(l, "attn_v.weight", {kv, c.hidden}, kMatrix, w_l.attn_v);
    required(l, "attn_output.weight", {c.hidden, q}, kMatrix, w_l.attn_output);
    optional(l, "attn_q.bias", {q}, kVector, w_l.attn_q_bias);
    optional(l, "attn_k.bias", {kv}, kVector, w_l.attn_k_bias);
    optional(l, "attn_v.bias", {kv}, kVector, w_l.attn_v_bias);
    optional(l, "attn_output.bias", {c.hidden}, kVector, w_l.attn_output_bias);
    if (c.qk_norm) {
      required(l, "attn_q_norm.weight", {c.head_dim}, kVector, w_l.attn_q_norm);
      required(l, "attn_k_norm.weight", {c.head_dim}, kVector, w_l.attn_k_norm);
    }
    if (c.architecture == "gpt-oss") required(l, "attn_sinks.weight", {c.heads}, kVector, w_l.attn_sinks);
    required(l, "ffn_norm.weight", {c.hidden}, kVector, w_l.ffn_norm);
    if (c.experts == 0) {
      required(l, "ffn_gate.weight", {c.ffn, c.hidden}, kMatrix, w_l.ffn_gate);
      required(l, "ffn_up.weight", {c.ffn, c.hidden}, kMatrix, w_l.ffn_up);
      required(l, "ffn_down.weight", {c.hidden, c.ffn}, kMatrix, w_l.ffn_down);
      optional(l, "ffn_gate.bias", {c.ffn}, kVector, w_l.ffn_gate_bias);
      optional(l, "ffn_up.bias", {c.ffn}, kVector, w_l.ffn_up_bias);
      optional(l, "ffn_down.bias", {c.hidden}, kVector, w_l.ffn_down_bias);
      continue;
    }
    required(l, "ffn_gate_inp.weight", {c.experts, c.hidden}, kMatrix, w_l.router);
    optional(l, "ffn_gate_inp.bias", {c.experts}, kVector, w_l.router_bias);
    required(l, "ffn_gate_exps.weight", {c.experts, c.expert_ffn, c.hidden}, kMatrix, w_l.gate_experts);
    required(l, "ffn_up_exps.weight", {c.experts, c.expert_ffn, c.hidden}, kMatrix, w_l.up_experts);
    required(l, "ffn_down_exps.weight", {c.experts, c.hidden, c.expert_ffn}, kMatrix, w_l.down_experts);
    optional(l, "ffn_gate_exps.bias", {c.experts, c.expert_ffn}, kVector, w_l.gate_experts_bias);
    optional(l, "ffn_up_exps.bias", {c.experts, c.expert_ffn}, kVector, w_l.up_experts_bias);
    optional(l, "ffn_down_exps.bias", {c.experts, c.hidden}, kVector, w_l.down_experts_bias);
  }
}

// Bytes of `view` that one token reads.
size_t bytes_read(const TensorView& view, WeightUse use, const ModelConfig& config, bool tied) {
  size_t bytes = view.bytes();
  if (view.type == DType::kMXFP4Split) bytes += static_cast<size_t>(view.elements() / 32);
  if (use == WeightUse::kEmbedding && !tied) return bytes / static_cast<size_t>(view.rows());
  if (view.rank == 3 && config.experts > 0) {
    return bytes / static_cast<size_t>(config.experts) * static_cast<size_t>(config.experts_per_token);
  }
  return bytes;
}

bool untied(const io::Checkpoint& checkpoint) {
  return checkpoint.find_tensor(checkpoint.gguf ? "output.weight" : "lm_head.weight") != nullptr;
}

// No output matrix means it is the embedding; a file that says otherwise is missing a tensor.
void check_output(const io::Checkpoint& checkpoint) {
  if (untied(checkpoint) || checkpoint.gguf) return;
  const auto tie = checkpoint.hf->config.find("tie_word_embeddings");
  if (tie != checkpoint.hf->config.end() && *tie == false) {
    throw_error(ErrorCode::kBadInput,
                "{}: tensor lm_head.weight: found nothing, expected it because config.json says "
                "tie_word_embeddings false",
                checkpoint.path());
  }
}

}  // namespace

std::unique_ptr<Model> Model::load(const io::Checkpoint& checkpoint, Backend& backend,
                                   const LoadProgress& progress) {
  std::unique_ptr<Model> model = find_architecture(checkpoint).make();
  model->config_ = read_config(checkpoint);
  check_output(checkpoint);
  WeightSource source(checkpoint, model->config_, /*gather=*/true);
  const size_t total = checkpoint.mapped_bytes();
  size_t done = 0;
  for_each_weight(source, model->config_, model->weights_,
                  [&](const TensorView& view, WeightUse use, WeightPtr& to) {
                    to = backend.load_weight(view, use);
                    model->bytes_per_token_ += bytes_read(view, use, model->config_, !untied(checkpoint));
                    done += view.bytes();
                    if (progress) progress(std::min(done, total), total);
                  });
  model->gathered_ = source.take_gathered();
  if (progress) progress(total, total);
  return model;
}

void Model::forward(Executor& executor, const Batch& batch) const {
  executor.begin(batch);
  executor.embed(*weights_.token_embedding);
  for (int l = 0; l < config_.layers; ++l) layer(executor, weights_.layers[l], l);
  const Weight* output = weights_.output ? weights_.output.get() : weights_.token_embedding.get();
  executor.norm_logits({.norm = {weights_.output_norm.get(), config_.norm_eps}, .output = {output, nullptr}});
}

WeightBytes plan_weights(const io::Checkpoint& checkpoint, const ModelConfig& config,
                         const Backend& backend) {
  WeightSource source(checkpoint, config, /*gather=*/false);
  ModelWeights none;
  WeightBytes plan;
  for_each_weight(source, config, none, [&](const TensorView& view, WeightUse use, WeightPtr&) {
    plan.mapped += view.bytes();
    plan.repacked += backend.weight_bytes(view, use);
  });
  plan.repacked += source.gathered_bytes();
  if (checkpoint.hf) plan.repacked += checkpoint.hf->weights.copied_bytes();
  return plan;
}

}  // namespace millrace
