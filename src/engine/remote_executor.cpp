#include "engine/remote_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "engine/rank_sampler.h"
#include "engine/ranks_lost.h"

namespace millrace {
namespace {

using Kind = RankMessage::Kind;

}  // namespace

RemoteExecutor::RemoteExecutor(RankFront& front, const ExecutorSpec& spec, bool samples)
    : front_(front),
      spec_(spec),
      samples_(samples),
      logits_(static_cast<size_t>(spec.max_logit_rows) * static_cast<size_t>(spec.vocab)),
      greedy_(static_cast<size_t>(spec.max_logit_rows)) {
  attach();
}

void RemoteExecutor::attach() {
  const std::vector<std::byte> bytes = packed(spec_);
  front_.send({.kind = Kind::kMakeExecutor, .bytes = bytes.size()}, bytes);
  rows_ = logit_rows_ = 0;
}

bool RemoteExecutor::attached() {
  if (!front_.answered()) return false;
  std::byte made{};
  front_.recv({&made, 1});
  front_.computes();
  return true;
}

void RemoteExecutor::begin(const Batch& batch) {
  MILLRACE_CHECK(batch.sampled_rows.empty());  // this device does not sample
  rows_ = batch.tokens.size();
  logit_rows_ = batch.logit_rows.size();
  hidden_wanted_ = !batch.only_logits;
  collected_ = false;
  pack(batch, spec_, message_);
  front_.send({.kind = Kind::kStep, .bytes = message_.size()}, message_);
}

std::span<const float> RemoteExecutor::logits() {
  const std::span<float> all(logits_.data(), logit_rows_ * static_cast<size_t>(spec_.vocab));
  if (collected_) return all;
  if (!all.empty()) {
    front_.send({.kind = Kind::kLogits});
    front_.recv(std::as_writable_bytes(all));
  }
  if (hidden_wanted_) {
    hidden_.resize(rows_ * static_cast<size_t>(spec_.hidden));
    front_.send({.kind = Kind::kHidden});
    front_.recv(std::as_writable_bytes(std::span(hidden_)));
  }
  collected_ = true;
  return all;
}

std::span<const int32_t> RemoteExecutor::greedy_tokens() {
  int32_t count = 0;
  front_.send({.kind = Kind::kGreedy});
  front_.recv(std::as_writable_bytes(std::span(&count, 1)));
  MILLRACE_CHECK(count >= 0 && static_cast<size_t>(count) <= logit_rows_);
  const std::span<int32_t> found(greedy_.data(), static_cast<size_t>(count));
  front_.recv(std::as_writable_bytes(found));
  return found;
}

// A step whose hidden states will be read is read whole.
bool RemoteExecutor::sample(std::span<const SampleRow> rows) {
  if (!samples_ || hidden_wanted_ || !RankSampler::of_use(rows, spec_.vocab)) return false;
  MILLRACE_CHECK(rows.size() == logit_rows_);
  pack(rows, {0, spec_.vocab}, message_);
  front_.send({.kind = Kind::kSample, .bytes = message_.size()}, message_);
  return true;
}

std::span<const SampledRow> RemoteExecutor::sampled() {
  int32_t count = 0;
  front_.recv(std::as_writable_bytes(std::span(&count, 1)));
  MILLRACE_CHECK(count >= 0 && static_cast<size_t>(count) == logit_rows_);
  const std::span<int32_t> tokens(greedy_.data(), static_cast<size_t>(count));
  front_.recv(std::as_writable_bytes(tokens));
  sampled_.assign(tokens.size(), {});
  for (size_t i = 0; i < tokens.size(); ++i) sampled_[i].token = tokens[i];
  return sampled_;
}

// Behind the last norm already: rank 0 has its weights.
void RemoteExecutor::read_hidden(const Norm& /*norm*/, int32_t row, std::span<float> to) {
  MILLRACE_CHECK(collected_ && hidden_wanted_ && row >= 0 && static_cast<size_t>(row) < rows_);
  std::copy_n(hidden_.begin() + static_cast<std::ptrdiff_t>(row) * spec_.hidden, to.size(), to.begin());
}

void RemoteExecutor::read_block(int group, int32_t block, std::span<std::byte> to) {
  front_.send({.kind = Kind::kReadBlock, .group = group, .from = block});
  front_.recv(to);
}

void RemoteExecutor::write_block(int group, int32_t block, std::span<const std::byte> from) {
  try {
    front_.send({.kind = Kind::kWriteBlock, .group = group, .to = block, .bytes = from.size()}, from);
  } catch (const RanksLost&) {  // the next step says so
  }
}

void RemoteExecutor::copy_block(int group, int32_t from, int32_t to) {
  try {
    front_.send({.kind = Kind::kCopyBlock, .group = group, .from = from, .to = to});
  } catch (const RanksLost&) {  // the next step says so
  }
}

std::vector<float> RemoteExecutor::read_slot(Slot /*slot*/) {
  throw Error(ErrorCode::kUnsupported, "slots are the ranks' own");
}
void RemoteExecutor::write_slot(Slot /*slot*/, std::span<const float> /*values*/) {
  throw Error(ErrorCode::kUnsupported, "slots are the ranks' own");
}

namespace {

class RemoteBackend final : public Backend {
 public:
  RemoteBackend(std::unique_ptr<Backend> local, RankFront& front, int ranks, bool samples)
      : local_(std::move(local)), front_(front), ranks_(ranks), samples_(samples) {}

  std::string_view name() const override { return local_->name(); }
  std::string description() const override {
    return fmt::format("{} ranks, each {} {}", ranks_, local_->name(), local_->isa());
  }
  std::string_view isa() const override { return local_->isa(); }
  int threads() const override { return local_->threads(); }
  DType default_kv_type() const override { return local_->default_kv_type(); }
  int32_t default_step_tokens() const override { return local_->default_step_tokens(); }
  bool supports_kv_type(DType type) const override { return local_->supports_kv_type(type); }
  bool gives_hidden_states() const override { return local_->gives_hidden_states(); }
  const dist::Shares* shares() const override { return local_->shares(); }
  OpFeatures lacks() const override { return local_->lacks(); }
  std::optional<size_t> own_memory() const override { return local_->own_memory(); }
  size_t weight_bytes(const TensorView& view, WeightUse use, size_t before) const override {
    return local_->weight_bytes(view, use, before);
  }
  size_t dequantized_bytes(const TensorView& view) const override { return local_->dequantized_bytes(view); }

  // Its shape alone: the ranks have the numbers.
  WeightPtr load_weight(const TensorView& view, WeightUse /*use*/) override {
    auto weight = std::make_unique<Weight>();
    weight->experts = view.rank == 3 ? view.shape[0] : 1;
    weight->cols = view.cols();
    weight->rows = view.rows() / std::max<int64_t>(1, weight->experts);
    weight->copied = true;
    return weight;
  }

  size_t workspace_bytes(const ExecutorSpec& spec) const override { return local_->workspace_bytes(spec); }
  std::unique_ptr<Executor> make_executor(const ExecutorSpec& spec) override {
    return std::make_unique<RemoteExecutor>(front_, spec, samples_);
  }
  void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) override {
    local_->parallel(count, body);
  }

 private:
  const std::unique_ptr<Backend> local_;
  RankFront& front_;
  const int ranks_;
  const bool samples_;
};

}  // namespace

std::unique_ptr<Backend> make_remote_backend(std::unique_ptr<Backend> local, RankFront& front, int ranks,
                                             bool samples) {
  return std::make_unique<RemoteBackend>(std::move(local), front, ranks, samples);
}

}  // namespace millrace
