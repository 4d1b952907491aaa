// What a front process has in place of a device: a backend that takes weights without holding them, and an
// executor whose steps are computed by the ranks of a RankFront. A model's operations do nothing here; a
// step's batch goes to rank 0 as it is, and logits, hidden states and KV blocks come back whole.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/rank_front.h"
#include "engine/rank_messages.h"

namespace millrace {

class RemoteExecutor final : public Executor {
 public:
  // samples: the ranks have parts of the vocabulary, and pick tokens by them.
  // Attaches: nothing is to be asked of it until it is attached.
  RemoteExecutor(RankFront& front, const ExecutorSpec& spec, bool samples);

  // Has the ranks of a new group make their executors; blocks hold nothing then. Throws RanksLost.
  void attach();
  // Have all of them loaded their parts, and the memory? Does not wait. Throws RanksLost.
  bool attached();

  void begin(const Batch& batch) override;  // throws RanksLost, as all that asks for something
  void embed(const Embed&) override {}
  void norm_qkv(const NormQkv&) override {}
  void norm_latent_qkv(const NormLatentQkv&) override {}
  void rope_append_kv(const Rope&) override {}
  void attend(const Attend&) override {}
  void norm_mix(const NormMix&) override {}
  void mix(const StateMix&) override {}
  void time_mix(const TimeMix&) override {}
  void channel_mix_add(const ChannelMix&) override {}
  void project_add(const Projection&) override {}
  void ffn_add(const Ffn&) override {}
  void route(const Route&) override {}
  void experts_add(const Experts&) override {}
  void norm_residual(const Norm&) override {}
  void norm_logits(const Logits&) override {}
  // Brings the step's hidden states along, where they will be read.
  std::span<const float> logits() override;
  std::span<const int32_t> greedy_tokens() override;
  bool samples() const override { return samples_; }
  bool works_ahead() const override { return false; }
  bool sample(std::span<const SampleRow> rows) override;
  std::span<const SampledRow> sampled() override;
  void read_hidden(const Norm& norm, int32_t row, std::span<float> to) override;
  void read_block(int group, int32_t block, std::span<std::byte> to) override;
  // Into ranks that are lost nothing is written, and nobody is told: what they held is lost as well.
  void write_block(int group, int32_t block, std::span<const std::byte> from) override;
  void copy_block(int group, int32_t from, int32_t to) override;
  std::vector<float> read_slot(Slot slot) override;
  void write_slot(Slot slot, std::span<const float> values) override;

 private:
  RankFront& front_;
  const ExecutorSpec spec_;
  const bool samples_;
  std::vector<SampledRow> sampled_;
  size_t rows_ = 0, logit_rows_ = 0;  // of the last step
  bool hidden_wanted_ = false, collected_ = false;
  std::vector<float> logits_, hidden_;  // [logit rows][vocab], [rows][hidden]
  std::vector<int32_t> greedy_;
  std::vector<std::byte> message_;
};

// `local` is a device of this machine, of the ranks' kind, that is asked for what it can do and how much
// memory things take. samples: ranks have parts of the vocabulary.
std::unique_ptr<Backend> make_remote_backend(std::unique_ptr<Backend> local, RankFront& front, int ranks,
                                             bool samples);

}  // namespace millrace
