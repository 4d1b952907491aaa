// ForwardingExecutor: an Executor that hands every call to another. What watches or times a model derives
// from it and overrides the calls it is about.
#pragma once

#include <utility>

#include "backend/backend.h"

namespace millrace {

class ForwardingExecutor : public Executor {
 public:
  explicit ForwardingExecutor(std::unique_ptr<Executor> inner) : inner_(std::move(inner)) {}

  void begin(const Batch& batch) override { inner_->begin(batch); }
  void embed(const Embed& op) override { inner_->embed(op); }
  void layer_inputs(const LayerInputs& op) override { inner_->layer_inputs(op); }
  void end_layer(const EndLayer& op) override { inner_->end_layer(op); }
  void add_given(int layer) override { inner_->add_given(layer); }
  void norm_qkv(const NormQkv& op) override { inner_->norm_qkv(op); }
  void norm_latent_qkv(const NormLatentQkv& op) override { inner_->norm_latent_qkv(op); }
  void rope_append_kv(const Rope& op) override { inner_->rope_append_kv(op); }
  void attend(const Attend& op) override { inner_->attend(op); }
  void norm_mix(const NormMix& op) override { inner_->norm_mix(op); }
  void mix(const StateMix& op) override { inner_->mix(op); }
  void time_mix(const TimeMix& op) override { inner_->time_mix(op); }
  void channel_mix_add(const ChannelMix& op) override { inner_->channel_mix_add(op); }
  void project_add(const Projection& op) override { inner_->project_add(op); }
  void ffn_add(const Ffn& op) override { inner_->ffn_add(op); }
  void route(const Route& op) override { inner_->route(op); }
  void experts_add(const Experts& op) override { inner_->experts_add(op); }
  void norm_residual(const Norm& op) override { inner_->norm_residual(op); }
  void norm_logits(const Logits& op) override { inner_->norm_logits(op); }
  std::span<const float> logits() override { return inner_->logits(); }
  std::span<const float> own_logits() override { return inner_->own_logits(); }
  std::span<const int32_t> greedy_tokens() override { return inner_->greedy_tokens(); }
  bool samples() const override { return inner_->samples(); }
  // One that samples for another has its launches.
  bool works_ahead() const override { return samples() && inner_->works_ahead() == inner_->samples(); }
  void start() override { inner_->start(); }
  bool sample(std::span<const SampleRow> rows) override { return inner_->sample(rows); }
  std::span<const SampledRow> sampled() override { return inner_->sampled(); }
  std::span<const float> logits_of(std::span<const int32_t> rows) override { return inner_->logits_of(rows); }
  void read_hidden(const Norm& norm, int32_t row, std::span<float> to) override {
    inner_->read_hidden(norm, row, to);
  }
  void read_block(int group, int32_t block, std::span<std::byte> to) override {
    inner_->read_block(group, block, to);
  }
  void write_block(int group, int32_t block, std::span<const std::byte> from) override {
    inner_->write_block(group, block, from);
  }
  void copy_block(int group, int32_t from, int32_t to) override { inner_->copy_block(group, from, to); }
  void finish_reads() override { inner_->finish_reads(); }
  bool time_operations() override { return inner_->time_operations(); }
  std::vector<TimedOperation> operation_times() override { return inner_->operation_times(); }
  std::vector<float> read_slot(Slot slot) override { return inner_->read_slot(slot); }
  void write_slot(Slot slot, std::span<const float> values) override { inner_->write_slot(slot, values); }

 protected:
  Executor& inner() { return *inner_; }

 private:
  std::unique_ptr<Executor> inner_;
};

}  // namespace millrace
