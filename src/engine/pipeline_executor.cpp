#include "engine/pipeline_executor.h"

#include <algorithm>

#include "base/check.h"
#include "base/error.h"
#include "engine/leader_executor.h"

namespace millrace {
namespace {

using Kind = RankMessage::Kind;

// Rows that a micro-batch of a prompt has at least: fewer would read the weights too often.
constexpr int64_t kPromptRows = 64;

constexpr int32_t kNewStep = 1;  // RankMessage::from of a step's first micro-batch

// To the next stage, if there is one.
void pass_on(dist::Communicator& group, const RankMessage& message, std::span<const std::byte> bytes) {
  if (group.rank() + 1 < group.size()) send_order(group, group.rank() + 1, message, bytes);
}

std::unique_ptr<Executor> make_everywhere(const RankGroups& groups, const dist::Shares& shares,
                                          const ExecutorSpec& spec, Backend& backend) {
  dist::Communicator& group = *groups.of_pipeline();
  const std::vector<std::byte> bytes = packed(spec);
  pass_on(group, {.kind = Kind::kMakeExecutor, .bytes = bytes.size()}, bytes);
  std::unique_ptr<Executor> own = make_stage_executor(groups, shares, stage_spec(spec, shares), backend);
  group.barrier();  // everybody has the memory
  return own;
}

}  // namespace

// ---------------------------------------------------------------- rank 0

PipelineLeader::PipelineLeader(const RankGroups& groups, const dist::Shares& shares, const ExecutorSpec& spec,
                               Backend& backend)
    : ForwardingExecutor(make_everywhere(groups, shares, spec, backend)),
      group_(*groups.of_pipeline()),
      shares_(shares.between_stages()),
      spec_(spec),
      logits_(static_cast<size_t>(spec.max_logit_rows) * static_cast<size_t>(spec.vocab)) {}

PipelineLeader::~PipelineLeader() {
  try {
    tell({.kind = Kind::kStop});
  } catch (const Error&) {  // a rank has gone: there is nobody to tell
  }
}

void PipelineLeader::tell(const RankMessage& message, std::span<const std::byte> bytes) {
  pass_on(group_, message, bytes);
}

void PipelineLeader::begin_step() {
  logit_rows_ = 0;
  collected_ = false;
  new_step_ = true;
}

// Of decoding sequences one for each stage; of prompts more, since the first and the last leave stages idle.
int64_t PipelineLeader::micro_batches(int64_t rows) const {
  const int64_t stages = group_.size();
  return std::max<int64_t>(
      1, std::max(std::min(stages, std::min(rows, kPromptRows)), std::min(4 * stages, rows / kPromptRows)));
}

// Within a sequence only where no layer has a state: of what a step goes through few states are kept, and the
// second part of a prompt would begin at one that is not. Nor within an image whose tokens see one another.
int64_t PipelineLeader::cut(const Batch& batch, int64_t row) const {
  const bool whole = std::any_of(spec_.kv_groups.begin(), spec_.kv_groups.end(),
                                 [](const KvGroupSpec& group) { return group.state; });
  for (const SequenceSlice& slice : batch.sequences) {
    if (!whole && !slice.both_ways) continue;
    const int64_t end = int64_t{slice.first_row} + slice.num_tokens;
    if (slice.first_row < row && row < end) return end;
  }
  return row;
}

void PipelineLeader::begin(const Batch& batch) {
  MILLRACE_CHECK(batch.sampled_rows.empty());  // this device does not sample
  // What is looked up is the first stage's; what is added behind the first layers may be another's.
  Batch further = batch;
  if (std::none_of(batch.given.begin(), batch.given.end(), [](const GivenRow& g) { return g.further > 0; })) {
    further.given = {};
  }
  pack(further, spec_, message_);
  logit_rows_ += batch.logit_rows.size();
  rows_ = batch.tokens.size();
  sent_ = has_hidden_ = false;
  inner().begin(batch);
}

void PipelineLeader::start() {
  if (sent_) return;
  sent_ = true;
  tell({.kind = Kind::kStep, .from = new_step_ ? kNewStep : 0, .bytes = message_.size()}, message_);
  new_step_ = false;
  const std::vector<float> residual = inner().read_slot(Slot::kResidual);
  group_.send(1, std::as_bytes(std::span(residual)));
}

std::span<const float> PipelineLeader::logits() {
  const std::span<float> all(logits_.data(), logit_rows_ * static_cast<size_t>(spec_.vocab));
  if (!collected_ && !all.empty()) {
    tell({.kind = Kind::kLogits});
    group_.recv(last(), std::as_writable_bytes(all));
  }
  collected_ = true;
  return all;
}

std::span<const float> PipelineLeader::logits_of(std::span<const int32_t> /*rows*/) { return logits(); }

void PipelineLeader::read_hidden(const Norm& norm, int32_t row, std::span<float> to) {
  {
    const std::lock_guard lock(hidden_mutex_);
    if (!has_hidden_) {
      tell({.kind = Kind::kHidden});
      std::vector<float> residual(rows_ * static_cast<size_t>(spec_.hidden));
      group_.recv(last(), std::as_writable_bytes(std::span(residual)));
      inner().write_slot(Slot::kResidual, residual);
      has_hidden_ = true;
    }
  }
  inner().read_hidden(norm, row, to);
}

void PipelineLeader::read_block(int group, int32_t block, std::span<std::byte> to) {
  tell({.kind = Kind::kReadBlock, .group = group, .from = block});
  gather_block(group_, inner(), spec_, shares_, /*key_head=*/0, group, block, part_, to);
}

void PipelineLeader::write_block(int group, int32_t block, std::span<const std::byte> from) {
  tell({.kind = Kind::kWriteBlock, .group = group, .to = block, .bytes = from.size()}, from);
  copy_to_part(spec_, block_part(spec_, shares_, 0, group), from, part_);
  if (!part_.empty()) inner().write_block(group, block, part_);
}

void PipelineLeader::copy_block(int group, int32_t from, int32_t to) {
  tell({.kind = Kind::kCopyBlock, .group = group, .from = from, .to = to});
  inner().copy_block(group, from, to);
}

// ---------------------------------------------------------------- the other stages

namespace {

class StageFollower {
 public:
  StageFollower(const RankGroups& groups, Backend& backend, Model& model)
      : groups_(groups),
        group_(*groups.of_pipeline()),
        shares_(backend.shares()->between_stages()),
        backend_(backend),
        model_(model) {}

  void run() {
    const int before = group_.rank() - 1;
    for (;;) {
      const RankMessage message = receive_order(group_, before, bytes_);
      // A step is passed on with what this stage makes of it.
      if (message.kind != Kind::kStep) pass_on(group_, message, bytes_);
      if (message.kind == Kind::kStop) return;
      act(message);
    }
  }

 private:
  bool last() const { return group_.rank() + 1 == group_.size(); }

  void act(const RankMessage& message) {
    switch (message.kind) {
      case Kind::kStop:
      case Kind::kGreedy:
      case Kind::kSample:
        return;
      case Kind::kMakeExecutor:
        spec_ = unpacked_spec(bytes_);
        model_.settle_context(spec_.max_context);
        executor_ = make_stage_executor(groups_, *backend_.shares(), stage_spec(spec_, shares_), backend_);
        group_.barrier();
        return;
      case Kind::kStep:
        return step(message);
      case Kind::kLogits:
        if (last()) group_.send(0, std::as_bytes(std::span(logits_)));
        logits_.clear();
        return;
      case Kind::kHidden:
        if (last()) send_residual(0);
        return;
      case Kind::kReadBlock: {
        const std::span<std::byte> part = own_part(message.group);
        if (part.empty()) return;
        executor_->read_block(message.group, message.from, part);
        executor_->finish_reads();
        group_.send(0, part);
        return;
      }
      case Kind::kWriteBlock:
        copy_to_part(spec_, block_part(spec_, shares_, group_.rank(), message.group), bytes_, part_);
        if (!part_.empty()) executor_->write_block(message.group, message.to, part_);
        return;
      case Kind::kCopyBlock:
        executor_->copy_block(message.group, message.from, message.to);
        return;
    }
  }

  std::span<std::byte> own_part(int group) {
    part_.resize(part_bytes(spec_, block_part(spec_, shares_, group_.rank(), group)));
    return part_;
  }

  void step(const RankMessage& message) {
    if (message.from == kNewStep) logits_.clear();  // of a step whose logits nobody wanted
    batch_.unpack(bytes_, spec_);
    residual_.resize(batch_.tokens.size() * static_cast<size_t>(spec_.hidden));
    group_.recv(group_.rank() - 1, std::as_writable_bytes(std::span(residual_)));
    model_.forward(*executor_, batch_.view(), [&] { executor_->write_slot(Slot::kResidual, residual_); });
    if (!last()) {
      pass_on(group_, message, bytes_);
      return send_residual(group_.rank() + 1);
    }
    const std::span<const float> logits = executor_->logits();
    logits_.insert(logits_.end(), logits.begin(), logits.end());
  }

  void send_residual(int to) {
    const std::vector<float> residual = executor_->read_slot(Slot::kResidual);
    group_.send(to, std::as_bytes(std::span(residual)));
  }

  const RankGroups& groups_;
  dist::Communicator& group_;
  const dist::Shares shares_;  // between stages
  Backend& backend_;
  Model& model_;
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  ReceivedBatch batch_;
  std::vector<float> residual_, logits_;  // logits_: those that rank 0 did not ask for yet
  std::vector<std::byte> bytes_, part_;
};

}  // namespace

void follow_stage(const RankGroups& groups, Backend& backend, Model& model) {
  StageFollower(groups, backend, model).run();
}

// ---------------------------------------------------------------- micro-batches

MicroBatch::MicroBatch(const Batch& whole, int32_t begin, int32_t end)
    : tokens_(whole.tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin))),
      only_logits_(whole.only_logits) {
  for (const SequenceSlice& slice : whole.sequences) {
    const int32_t first = std::max(slice.first_row, begin),
                  last = std::min(slice.first_row + slice.num_tokens, end);
    if (first >= last) continue;
    SequenceSlice part = slice;
    part.first_row = first - begin;
    part.num_tokens = last - first;
    part.context_len = slice.context_len + first - slice.first_row;
    sequences_.push_back(part);
  }
  for (const int32_t row : whole.logit_rows) {
    if (row >= begin && row < end) logit_rows_.push_back(row - begin);
  }
  for (GivenRow given : whole.given) {
    if (given.row < begin || given.row >= end) continue;
    given.row -= begin;
    given_.push_back(given);
  }
  if (whole.rope_positions.empty()) return;
  rope_positions_ =
      whole.rope_positions.subspan(3 * static_cast<size_t>(begin), 3 * static_cast<size_t>(end - begin));
}

Batch MicroBatch::view() const {
  return {.tokens = tokens_,
          .sequences = sequences_,
          .logit_rows = logit_rows_,
          .only_logits = only_logits_,
          .given = given_,
          .rope_positions = rope_positions_};
}

void forward_in_parts(const Model& model, Executor& executor, PipelineLeader* pipeline, const Batch& batch) {
  if (pipeline != nullptr) pipeline->begin_step();
  const auto rows = std::ssize(batch.tokens);
  const int64_t parts = pipeline == nullptr || !batch.only_logits ? 1 : pipeline->micro_batches(rows);
  if (parts == 1) return model.forward(executor, batch);
  for (int64_t i = 0, begin = 0; i < parts; ++i) {
    const int64_t end = pipeline->cut(batch, rows * (i + 1) / parts);
    if (end == begin) continue;
    const MicroBatch part(batch, static_cast<int32_t>(begin), static_cast<int32_t>(end));
    model.forward(executor, part.view());
    begin = end;
  }
}

}  // namespace millrace
