// FeatureRecorder: an executor that computes nothing and notes what a model's operations ask for beyond what
// every device does; and the matrices of those products that adapters may update (Batch::adapters).
#pragma once

#include <initializer_list>
#include <unordered_set>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "model/config.h"

namespace millrace {

class FeatureRecorder final : public Executor {
 public:
  const OpFeatures& features() const { return features_; }
  bool adaptable(const Weight* weight) const { return products_.contains(weight); }

  void begin(const Batch&) override {}
  void embed(const Embed& op) override;
  void layer_inputs(const LayerInputs& op) override;
  void end_layer(const EndLayer& op) override;
  void norm_qkv(const NormQkv& op) override;
  void norm_latent_qkv(const NormLatentQkv& op) override;
  void rope_append_kv(const Rope& op) override;
  void attend(const Attend& op) override;
  void norm_mix(const NormMix& op) override;
  void mix(const StateMix& op) override;
  void time_mix(const TimeMix& op) override;
  void channel_mix_add(const ChannelMix& op) override;
  void project_add(const Projection& op) override;
  void ffn_add(const Ffn& op) override;
  void route(const Route& op) override;
  void experts_add(const Experts& op) override;
  void norm_residual(const Norm& op) override;
  void norm_logits(const Logits& op) override;
  std::span<const float> logits() override { return {}; }
  void read_block(int, int32_t, std::span<std::byte>) override {}
  void write_block(int, int32_t, std::span<const std::byte>) override {}
  void copy_block(int, int32_t, int32_t) override {}
  std::vector<float> read_slot(Slot) override { return {}; }
  void write_slot(Slot, std::span<const float>) override {}

 private:
  void norm_before(const Norm& op);
  void norm_kind(const Norm& op);
  void block(const Norm& norm_after, float scale);
  void activation(Activation activation, const Linear& gate);

  void products(std::initializer_list<const Linear*> linears);

  OpFeatures features_;
  int attended_ = -1;  // the layer that attended last
  std::unordered_set<const Weight*> products_;
};

// What a model's operations ask for.
OpFeatures needed_features(const io::Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace millrace
