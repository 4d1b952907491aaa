#include "engine/pipeline_executor.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/error.h"

namespace millrace {
namespace {

using Kind = RankMessage::Kind;

// Rows that a micro-batch of a prompt has at least: fewer would read the weights too often.
constexpr int64_t kPromptRows = 64;

constexpr int32_t kNewStep = 1;  // RankMessage::from of a step's first micro-batch

void send_message(dist::Communicator& group, const RankMessage& message, std::span<const std::byte> bytes) {
  MILLRACE_CHECK(message.bytes == bytes.size());
  const int next = group.rank() + 1;
  if (next == group.size()) return;
  group.send(next, std::as_bytes(std::span(&message, 1)));
  if (!bytes.empty()) group.send(next, bytes);
}

std::unique_ptr<Executor> make_everywhere(dist::Communicator& group, const dist::Shares& shares,
                                          const ExecutorSpec& spec, Backend& backend) {
  const std::vector<std::byte> bytes = packed(spec);
  send_message(group, {.kind = Kind::kMakeExecutor, .bytes = bytes.size()}, bytes);
  std::unique_ptr<Executor> own = backend.make_executor(stage_spec(spec, shares));
  group.barrier();  // everybody has the memory
  return own;
}

void copy_from_part(const ExecutorSpec& spec, const BlockPart& part, std::span<const std::byte> from,
                    std::span<std::byte> whole) {
  for_each_piece(spec, part, [&](size_t whole_at, size_t part_at, size_t bytes) {
    std::memcpy(whole.data() + whole_at, from.data() + part_at, bytes);
  });
}

void copy_to_part(const ExecutorSpec& spec, const BlockPart& part, std::span<const std::byte> whole,
                  std::vector<std::byte>& to) {
  to.resize(part_bytes(spec, part));
  for_each_piece(spec, part, [&](size_t whole_at, size_t part_at, size_t bytes) {
    std::memcpy(to.data() + part_at, whole.data() + whole_at, bytes);
  });
}

}  // namespace

// ---------------------------------------------------------------- rank 0

PipelineLeader::PipelineLeader(dist::Communicator& group, const dist::Shares& shares,
                               const ExecutorSpec& spec, Backend& backend)
    : ForwardingExecutor(make_everywhere(group, shares, spec, backend)),
      group_(group),
      shares_(shares),
      spec_(spec),
      logits_(static_cast<size_t>(spec.max_logit_rows) * static_cast<size_t>(spec.vocab)) {}

PipelineLeader::~PipelineLeader() {
  try {
    tell({.kind = Kind::kStop});
  } catch (const Error&) {  // a rank has gone: there is nobody to tell
  }
}

void PipelineLeader::tell(const RankMessage& message, std::span<const std::byte> bytes) {
  send_message(group_, message, bytes);
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
// second part of a prompt would begin at one that is not.
int64_t PipelineLeader::cut(const Batch& batch, int64_t row) const {
  const bool whole = std::any_of(spec_.kv_groups.begin(), spec_.kv_groups.end(),
                                 [](const KvGroupSpec& group) { return group.state; });
  if (!whole) return row;
  for (const SequenceSlice& slice : batch.sequences) {
    const int64_t end = int64_t{slice.first_row} + slice.num_tokens;
    if (slice.first_row < row && row < end) return end;
  }
  return row;
}

void PipelineLeader::begin(const Batch& batch) {
  MILLRACE_CHECK(batch.sampled_rows.empty());  // this device does not sample
  pack(batch, spec_.kv_groups.size(), message_);
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
  for (int r = 0; r < group_.size(); ++r) {
    const BlockPart part = block_part(spec_, shares_, r, group);
    if (part.empty()) continue;
    part_.resize(part_bytes(spec_, part));
    if (r == 0) {
      inner().read_block(group, block, part_);
      inner().finish_reads();  // it is taken apart now
    } else {
      group_.recv(r, part_);
    }
    copy_from_part(spec_, part, part_, to);
  }
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
  StageFollower(dist::Communicator& group, Backend& backend, Model& model)
      : group_(group), backend_(backend), model_(model) {}

  void run() {
    const int before = group_.rank() - 1;
    for (;;) {
      RankMessage message;
      group_.recv(before, std::as_writable_bytes(std::span(&message, 1)));
      bytes_.resize(message.bytes);
      if (!bytes_.empty()) group_.recv(before, bytes_);
      // A step is passed on with what this stage makes of it.
      if (message.kind != Kind::kStep) send_message(group_, message, bytes_);
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
        executor_ = backend_.make_executor(stage_spec(spec_, *backend_.shares()));
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
        copy_to_part(spec_, block_part(spec_, *backend_.shares(), group_.rank(), message.group), bytes_,
                     part_);
        if (!part_.empty()) executor_->write_block(message.group, message.to, part_);
        return;
      case Kind::kCopyBlock:
        executor_->copy_block(message.group, message.from, message.to);
        return;
    }
  }

  std::span<std::byte> own_part(int group) {
    part_.resize(part_bytes(spec_, block_part(spec_, *backend_.shares(), group_.rank(), group)));
    return part_;
  }

  void step(const RankMessage& message) {
    if (message.from == kNewStep) logits_.clear();  // of a step whose logits nobody wanted
    batch_.unpack(bytes_, spec_.kv_groups.size());
    residual_.resize(batch_.tokens.size() * static_cast<size_t>(spec_.hidden));
    group_.recv(group_.rank() - 1, std::as_writable_bytes(std::span(residual_)));
    model_.forward(*executor_, batch_.view(), [&] { executor_->write_slot(Slot::kResidual, residual_); });
    if (!last()) {
      send_message(group_, message, bytes_);
      return send_residual(group_.rank() + 1);
    }
    const std::span<const float> logits = executor_->logits();
    logits_.insert(logits_.end(), logits.begin(), logits.end());
  }

  void send_residual(int to) {
    const std::vector<float> residual = executor_->read_slot(Slot::kResidual);
    group_.send(to, std::as_bytes(std::span(residual)));
  }

  dist::Communicator& group_;
  Backend& backend_;
  Model& model_;
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  ReceivedBatch batch_;
  std::vector<float> residual_, logits_;  // logits_: those that rank 0 did not ask for yet
  std::vector<std::byte> bytes_, part_;
};

}  // namespace

void follow_stage(dist::Communicator& group, Backend& backend, Model& model) {
  StageFollower(group, backend, model).run();
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
}

Batch MicroBatch::view() const {
  return {.tokens = tokens_, .sequences = sequences_, .logit_rows = logit_rows_, .only_logits = only_logits_};
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
