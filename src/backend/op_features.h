// OpFeatures: what operations can ask for beyond what every device does. A model's operations are looked at
// once, before its weights are loaded, so that a device which lacks something says so at once and by name.
#pragma once

#include <cstdint>
#include <string>

namespace millrace {

enum class OpFeature : int {
  kLayerNorm,  // Norm::Kind::kLayer, and norms of the residual stream itself
  kNoNorm,     // a block that reads the residual stream as it is
  kNormAfter,  // a norm between a block and the residual stream
  kNormWhole,  // queries and keys normed over all heads
  kUnweightedNorm,
  kLearnedPositions,  // or types of tokens, or a norm of the embedding
  kScaledResidual,    // multipliers of the embedding, of a block or of the logits
  kScoreSoftcap,
  kLogitSoftcap,
  kLogitBias,
  kChunkedAttention,
  kBidirectional,
  kQueryGrowth,
  kGelu,
  kUngated,
  kSigmoidRouting,  // or groups of experts, a bias of their choice, a scale of their weights
  kSharedExpert,
  kWeighedInput,
  kLatent,  // latent attention
  kGatedAttention,
  kState,           // linear attention, state-space models, short convolutions
  kAdapters,        // Batch::adapters
  kPairs,           // SequenceSlice::second_text
  kImages,          // Batch::given, SequenceSlice::both_ways
  kReluSquared,     // Activation::kReluSquared
  kUngatedExperts,  // experts, or a shared one, without a gate
  kScaledShared,    // Experts::Shared::scale
  kScaledInputs,    // HeadColumns::scale
  kStateBeside,     // a layer with keys and values and a state
  kChannelDecay,    // StateShape::channel_decay: NormMix::behind comes with it
  kTokenShift,      // TimeMix, ChannelMix
  kHeadSizes,       // NormQkv::head_dim: layers whose heads differ in size
  kSharedKeys,      // layers that read another one's keys and values
  kValueNorm,       // NormQkv::v_norm
  kLayerInputs,     // LayerInputs, EndLayer
  kExpertNorms,     // Experts::norm, Route::score_scale, Route::expert_scales
  kSparse,          // SequenceSlice::sparse_pages
  kIndexer,         // NormLatentQkv::index_q
  kExpertAdapters,  // Batch::adapters with updates of experts
  kCount,
};

class OpFeatures {
 public:
  void add(OpFeature feature, bool used = true) {
    if (used) bits_ |= uint64_t{1} << static_cast<int>(feature);
  }
  OpFeatures operator&(const OpFeatures& other) const {
    OpFeatures both;
    both.bits_ = bits_ & other.bits_;
    return both;
  }
  OpFeatures operator|(const OpFeatures& other) const {
    OpFeatures either;
    either.bits_ = bits_ | other.bits_;
    return either;
  }
  bool has(OpFeature feature) const { return (bits_ >> static_cast<int>(feature) & 1) != 0; }
  bool any() const { return bits_ != 0; }
  std::string names() const;  // "GELU, a norm behind a block"

 private:
  uint64_t bits_ = 0;
};

}  // namespace millrace
