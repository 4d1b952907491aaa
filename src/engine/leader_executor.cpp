#include "engine/leader_executor.h"

#include <algorithm>

#include "base/check.h"
#include "base/error.h"
#include "engine/pipeline_executor.h"

namespace millrace {
namespace {

using Kind = RankMessage::Kind;

// Tells the others to make theirs before this rank makes its own.
std::unique_ptr<Executor> make_everywhere(dist::Communicator& group, const ExecutorSpec& spec,
                                          Backend& backend) {
  const std::vector<std::byte> bytes = packed(spec);
  for (int r = 1; r < group.size(); ++r)
    send_order(group, r, {.kind = Kind::kMakeExecutor, .bytes = bytes.size()}, bytes);
  std::unique_ptr<Executor> own = backend.make_executor(spec);
  group.barrier();  // everybody has the memory
  return own;
}

}  // namespace

LeaderExecutor::LeaderExecutor(dist::Communicator& group, const dist::Shares& shares,
                               const ExecutorSpec& spec, Backend& backend)
    : ForwardingExecutor(make_everywhere(group, spec, backend)),
      group_(group),
      shares_(shares.within_stage()),
      receives_(shares.stage() > 0),
      spec_(spec),
      backend_(backend) {}

LeaderExecutor::~LeaderExecutor() {
  try {
    tell({.kind = Kind::kStop});
  } catch (const Error&) {  // a rank has gone: there is nobody to tell
  }
}

void LeaderExecutor::tell(const RankMessage& message, std::span<const std::byte> bytes) {
  for (int r = 1; r < group_.size(); ++r) send_order(group_, r, message, bytes);
}

void LeaderExecutor::begin(const Batch& batch) {
  MILLRACE_CHECK(batch.sampled_rows.empty());  // this device does not sample
  collected_ = false;
  pack(batch, spec_, message_);
  tell({.kind = Kind::kStep, .bytes = message_.size()}, message_);
  inner().begin(batch);
}

std::span<const float> LeaderExecutor::logits() {
  if (!collected_) {
    tell({.kind = Kind::kLogits});
    logits_ = inner().logits();
    collected_ = true;
  }
  return logits_;
}

std::span<const float> LeaderExecutor::logits_of(std::span<const int32_t> /*rows*/) { return logits(); }

std::span<const int32_t> LeaderExecutor::greedy_tokens() {
  tell({.kind = Kind::kGreedy});
  return inner().greedy_tokens();
}

bool LeaderExecutor::sample(std::span<const SampleRow> rows) {
  if (shares_.context_ranks() > 1 || !RankSampler::of_use(rows, spec_.vocab)) return false;
  for (int r = 1; r < group_.size(); ++r) {
    pack(rows, shares_.rows_of(r, spec_.vocab), message_);
    send_order(group_, r, {.kind = Kind::kSample, .bytes = message_.size()}, message_);
  }
  sampled_ = sampler_.sample(group_, backend_, rows, inner().own_logits(), shares_.rows(spec_.vocab),
                             /*first_allowed=*/0, spec_.vocab);
  return true;
}

int LeaderExecutor::keeper(int group, int32_t block) const {
  return block % spec_.kv_groups[static_cast<size_t>(group)].shelves;
}

void LeaderExecutor::read_block(int group, int32_t block, std::span<std::byte> to) {
  if (shares_.context_ranks() > 1) {  // whole, on its keeper
    const int rank = keeper(group, block);
    if (rank == 0) return inner().read_block(group, block, to);
    send_order(group_, rank, {.kind = Kind::kReadBlock, .group = group, .from = block});
    return group_.recv(rank, to);
  }
  if (shares_.whole_attention()) return inner().read_block(group, block, to);  // everybody has all of it
  tell({.kind = Kind::kReadBlock, .group = group, .from = block});
  gather_block(group_, inner(), spec_, shares_, backend_.key_head_bytes(spec_), group, block, part_, to);
}

void LeaderExecutor::write_block(int group, int32_t block, std::span<const std::byte> from) {
  if (shares_.context_ranks() > 1) {  // to its keeper, or to everybody
    const bool spread = spec_.kv_groups[static_cast<size_t>(group)].shelves > 1;
    const RankMessage message{.kind = Kind::kWriteBlock, .group = group, .to = block, .bytes = from.size()};
    for (int r = 0; r < group_.size(); ++r) {
      if (spread && r != keeper(group, block)) continue;
      if (r == 0) {
        inner().write_block(group, block, from);
      } else {
        send_order(group_, r, message, from);
      }
    }
    return;
  }
  if (shares_.whole_attention()) {
    tell({.kind = Kind::kWriteBlock, .group = group, .to = block, .bytes = from.size()}, from);
    return inner().write_block(group, block, from);
  }
  for (int r = 0; r < group_.size(); ++r) {
    const BlockPart part = block_part(spec_, shares_, r, group, backend_.key_head_bytes(spec_));
    if (part.empty()) continue;
    copy_to_part(spec_, part, from, part_);
    if (r == 0) {
      inner().write_block(group, block, part_);
    } else {
      send_order(group_, r, {.kind = Kind::kWriteBlock, .group = group, .to = block, .bytes = part_.size()},
                 part_);
    }
  }
}

void LeaderExecutor::copy_block(int group, int32_t from, int32_t to) {
  if (shares_.context_ranks() > 1 && spec_.kv_groups[static_cast<size_t>(group)].shelves > 1) {
    const int rank = keeper(group, from);
    if (rank != keeper(group, to)) {
      part_.resize(spec_.kv_block_bytes(group));
      read_block(group, from, part_);
      return write_block(group, to, part_);
    }
    if (rank == 0) return inner().copy_block(group, from, to);
    return send_order(group_, rank, {.kind = Kind::kCopyBlock, .group = group, .from = from, .to = to});
  }
  tell({.kind = Kind::kCopyBlock, .group = group, .from = from, .to = to});
  inner().copy_block(group, from, to);
}

void LeaderExecutor::write_slot(Slot slot, std::span<const float> values) {
  if (receives_ && slot == Slot::kResidual) {
    part_.resize(values.size_bytes());
    std::copy_n(std::as_bytes(values).data(), part_.size(), part_.data());
    group_.broadcast(0, part_);
  }
  inner().write_slot(slot, values);
}

// ---------------------------------------------------------------- the others

namespace {

class Follower {
 public:
  Follower(dist::Communicator& group, Backend& backend, Model& model)
      : group_(group),
        shares_(backend.shares()->within_stage()),
        receives_(backend.shares()->stage() > 0),
        backend_(backend),
        model_(model) {}

  void run() {
    for (;;) {
      const RankMessage message = receive_order(group_, 0, bytes_);
      if (message.kind == Kind::kStop) return;
      act(message);
    }
  }

 private:
  void act(const RankMessage& message) {
    switch (message.kind) {
      case Kind::kStop:
      case Kind::kHidden:  // every rank has all of it
        return;
      case Kind::kMakeExecutor:
        spec_ = unpacked_spec(bytes_);
        model_.settle_context(spec_.max_context);
        executor_ = backend_.make_executor(spec_);
        group_.barrier();
        return;
      case Kind::kStep:
        batch_.unpack(bytes_, spec_);
        model_.forward(*executor_, batch_.view(), [&] { receive(); });
        return;
      case Kind::kLogits:
        executor_->logits();
        return;
      case Kind::kGreedy:
        executor_->greedy_tokens();
        return;
      case Kind::kSample: {
        const dist::Range part = shares_.rows(spec_.vocab);
        rows_.unpack(bytes_);
        sampler_.sample(group_, backend_, rows_.rows, executor_->own_logits(), part, first_allowed(part),
                        spec_.vocab);
        return;
      }
      case Kind::kReadBlock:
        bytes_.resize(shares_.context_ranks() > 1
                          ? spec_.kv_block_bytes(message.group)
                          : part_bytes(spec_, block_part(spec_, shares_, group_.rank(), message.group,
                                                         backend_.key_head_bytes(spec_))));
        if (bytes_.empty()) return;
        executor_->read_block(message.group, message.from, bytes_);
        executor_->finish_reads();
        group_.send(0, bytes_);
        return;
      case Kind::kWriteBlock:
        executor_->write_block(message.group, message.to, bytes_);
        return;
      case Kind::kCopyBlock:
        executor_->copy_block(message.group, message.from, message.to);
        return;
    }
  }

  // What the stage before has made of the step's rows.
  void receive() {
    if (!receives_) return;
    residual_.resize(batch_.tokens.size() * static_cast<size_t>(spec_.hidden));
    group_.broadcast(0, std::as_writable_bytes(std::span(residual_)));
    executor_->write_slot(Slot::kResidual, residual_);
  }

  dist::Communicator& group_;
  const dist::Shares shares_;
  const bool receives_;
  Backend& backend_;
  Model& model_;
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  ReceivedBatch batch_;
  std::vector<float> residual_;
  ReceivedRows rows_;
  RankSampler sampler_;
  std::vector<std::byte> bytes_;
};

}  // namespace

void follow(const RankGroups& groups, Backend& backend, Model& model) {
  if (groups.of_pipeline() != nullptr) return follow_stage(groups, backend, model);
  Follower(*groups.of_stage(), backend, model).run();
}

std::unique_ptr<Executor> make_stage_executor(const RankGroups& groups, const dist::Shares& shares,
                                              const ExecutorSpec& spec, Backend& backend) {
  if (groups.of_stage() == nullptr) return backend.make_executor(spec);
  return std::make_unique<LeaderExecutor>(*groups.of_stage(), shares, spec, backend);
}

std::unique_ptr<Executor> make_leader(const RankGroups& groups, const dist::Shares& shares,
                                      const ExecutorSpec& spec, Backend& backend) {
  if (shares.stages() > 1) return std::make_unique<PipelineLeader>(groups, shares, spec, backend);
  return make_stage_executor(groups, shares, spec, backend);
}

}  // namespace millrace
