#include "model/feature_recorder.h"

namespace millrace {

void FeatureRecorder::norm_kind(const Norm& op) {
  features_.add(OpFeature::kLayerNorm, op.kind == Norm::Kind::kLayer);
  features_.add(OpFeature::kUnweightedNorm, op.kind == Norm::Kind::kRmsUnweighted);
}

void FeatureRecorder::norm_before(const Norm& op) {
  features_.add(OpFeature::kNoNorm, !op.present());
  norm_kind(op);
}

void FeatureRecorder::block(const Norm& norm_after, float scale) {
  features_.add(OpFeature::kNormAfter, norm_after.present());
  features_.add(OpFeature::kScaledResidual, scale != 1.0f);
}

void FeatureRecorder::activation(Activation activation, const Linear& gate) {
  features_.add(OpFeature::kGelu, activation == Activation::kGelu || activation == Activation::kGeluTanh);
  features_.add(OpFeature::kReluSquared, activation == Activation::kReluSquared);
  features_.add(OpFeature::kUngated, gate.weight == nullptr);
}

void FeatureRecorder::products(std::initializer_list<const Linear*> linears) {
  for (const Linear* linear : linears) {
    if (linear->weight != nullptr) products_.insert(linear->weight);
  }
}

void FeatureRecorder::embed(const Embed& op) {
  features_.add(OpFeature::kLearnedPositions,
                op.positions != nullptr || op.types != nullptr || op.norm.present());
  features_.add(OpFeature::kScaledResidual, op.scale != 1.0f);
}

void FeatureRecorder::layer_inputs(const LayerInputs&) { features_.add(OpFeature::kLayerInputs); }
void FeatureRecorder::end_layer(const EndLayer&) { features_.add(OpFeature::kLayerInputs); }

void FeatureRecorder::norm_qkv(const NormQkv& op) {
  norm_before(op.norm);
  features_.add(OpFeature::kHeadSizes, op.head_dim != 0);
  features_.add(OpFeature::kSharedKeys, op.k.weight == nullptr);
  features_.add(OpFeature::kValueNorm, op.v_norm.present());
  norm_kind(op.q_norm);
  norm_kind(op.k_norm);
  features_.add(OpFeature::kNormWhole, op.norm_whole);
  if (!op.gated) products({&op.q});  // of a gated one the rows are queries and gates in turn
  products({&op.k, &op.v});
}

void FeatureRecorder::norm_latent_qkv(const NormLatentQkv& op) {
  norm_before(op.norm);
  features_.add(OpFeature::kLatent);
  features_.add(OpFeature::kIndexer, op.index_q.weight != nullptr);
}

void FeatureRecorder::rope_append_kv(const Rope& op) {
  features_.add(OpFeature::kQueryGrowth, op.growth.scale != 0.0f);
}

void FeatureRecorder::attend(const Attend& op) {
  features_.add(OpFeature::kScoreSoftcap, op.softcap != 0.0f);
  features_.add(OpFeature::kChunkedAttention, op.chunk != 0);
  features_.add(OpFeature::kBidirectional, op.bidirectional);
  features_.add(OpFeature::kGatedAttention, op.gated);
  attended_ = op.layer;
}

void FeatureRecorder::norm_mix(const NormMix& op) {
  norm_before(op.norm);
  for (const HeadColumns* part : {&op.query, &op.key, &op.value, &op.gate, &op.step, &op.beta})
    features_.add(OpFeature::kScaledInputs, part->scale != 1.0f);
  features_.add(OpFeature::kChannelDecay, op.behind[0].by.weight != nullptr || op.step.dim > 1);
}

void FeatureRecorder::mix(const StateMix& op) {
  features_.add(OpFeature::kState);
  features_.add(OpFeature::kStateBeside, op.layer == attended_);
}

void FeatureRecorder::time_mix(const TimeMix& op) {
  norm_before(op.norm);
  features_.add(OpFeature::kState);
  features_.add(OpFeature::kTokenShift);
}

void FeatureRecorder::channel_mix_add(const ChannelMix& op) {
  norm_before(op.norm);
  features_.add(OpFeature::kTokenShift);
}

void FeatureRecorder::project_add(const Projection& op) {
  block(op.norm_after, op.scale);
  if (op.head_values.weight == nullptr) products({&op.linear});
}

void FeatureRecorder::ffn_add(const Ffn& op) {
  norm_before(op.norm);
  activation(op.activation, op.gate);
  block(op.norm_after, op.scale);
  products({&op.gate, &op.up, &op.down});
}

void FeatureRecorder::route(const Route& op) {
  norm_before(op.norm);
  features_.add(OpFeature::kSigmoidRouting, op.weighting == Route::Weighting::kSigmoid ||
                                                op.weighting == Route::Weighting::kSigmoidRenormalized ||
                                                op.scale != 1.0f || op.groups_chosen < op.groups);
  features_.add(OpFeature::kExpertNorms, op.score_scale != 1.0f || op.expert_scales != nullptr);
}

void FeatureRecorder::experts_add(const Experts& op) {
  const bool shared = op.shared.up.weight != nullptr;
  features_.add(OpFeature::kSharedExpert, shared);
  features_.add(OpFeature::kScaledShared, op.shared.scale != 1.0f);
  features_.add(OpFeature::kUngatedExperts,
                op.gate.weight == nullptr || (shared && op.shared.gate.weight == nullptr));
  features_.add(OpFeature::kWeighedInput, op.weigh_input);
  features_.add(OpFeature::kExpertNorms, op.norm.present());
  products({&op.shared.gate, &op.shared.up, &op.shared.down, &op.gate, &op.up, &op.down});
  activation(op.activation, op.gate);
}

void FeatureRecorder::norm_residual(const Norm&) { features_.add(OpFeature::kLayerNorm); }

void FeatureRecorder::norm_logits(const Logits& op) {
  norm_before(op.norm);
  features_.add(OpFeature::kLogitBias, op.output.bias != nullptr);
  features_.add(OpFeature::kScaledResidual, op.scale != 1.0f);
  features_.add(OpFeature::kLogitSoftcap, op.softcap != 0.0f);
  products({&op.output});
}

}  // namespace millrace
