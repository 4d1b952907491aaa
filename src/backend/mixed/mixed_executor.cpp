#include "backend/mixed/mixed_executor.h"

#include <chrono>
#include <utility>
#include <vector>

#include "backend/mixed/mixed_weight.h"
#include "backend/mixed_part.h"
#include "base/check.h"
#include "base/error.h"

namespace millrace::mixed {
namespace {

MixedPart& rows_of(Executor& executor) {
  auto* part = dynamic_cast<MixedPart*>(&executor);
  if (part == nullptr) {
    throw_error(ErrorCode::kUnsupported,
                "mixed device: found an executor that shares no rows, expected two that do");
  }
  return *part;
}

class MixedExecutor final : public Executor {
 public:
  MixedExecutor(const ExecutorSpec& whole, const Placement& placement, std::unique_ptr<Executor> first,
                std::unique_ptr<Executor> second)
      : whole_(whole),
        placement_(placement),
        first_(std::move(first)),
        second_(std::move(second)),
        first_part_(rows_of(*first_)),
        second_part_(rows_of(*second_)),
        first_spec_(spec_of(whole, placement, Side::kFirst)),
        second_spec_(spec_of(whole, placement, Side::kSecond)) {
    for (size_t l = 0; l < placement_.layers.size(); ++l) number_experts(placement_.layers[l]);
  }

  void begin(const Batch& batch) override {
    MILLRACE_CHECK(batch.sampled_rows.empty() && batch.adapters == nullptr);
    Batch plain = batch;
    plain.only_logits = false;  // both have the same rows throughout
    first_->begin(plain);
    plain.logit_rows = {};
    second_->begin(plain);
    place_ = Side::kFirst;
  }

  void embed(const Embed& op) override {
    place_ = side_of(*op.table);
    run(place_, Operation::kEmbed, [&](Executor& x) { x.embed(on(op, place_)); });
  }
  void add_given(int layer) override { executor(place_).add_given(layer); }
  void norm_qkv(const NormQkv& op) override {
    forward(*op.q.weight, Operation::kNormQkv, op, &Executor::norm_qkv);
  }
  void norm_latent_qkv(const NormLatentQkv& op) override {
    forward(*op.q.weight, Operation::kNormQkv, op, &Executor::norm_latent_qkv);
  }
  void rope_append_kv(const Rope& op) override {
    run(side_of_layer(op.layer), Operation::kRopeAppend, [&](Executor& x) { x.rope_append_kv(op); });
  }
  void attend(const Attend& op) override {
    const Side side = side_of_layer(op.layer);
    run(side, Operation::kAttend, [&](Executor& x) { x.attend(on(op, side)); });
  }
  void norm_mix(const NormMix& op) override {
    forward(*op.in[0].weight, Operation::kNormQkv, op, &Executor::norm_mix);
  }
  void mix(const StateMix& op) override {
    const Side side = side_of_layer(op.layer);
    run(side, Operation::kAttend, [&](Executor& x) { x.mix(on(op, side)); });
  }
  void project_add(const Projection& op) override {
    forward(*op.linear.weight, Operation::kProject, op, &Executor::project_add);
  }
  void ffn_add(const Ffn& op) override { forward(*op.up.weight, Operation::kFfn, op, &Executor::ffn_add); }
  void route(const Route& op) override {
    routed_norm_ = op.norm;
    forward(*op.router.weight, Operation::kRoute, op, &Executor::route);
  }
  void experts_add(const Experts& op) override;
  void norm_residual(const Norm& op) override {
    if (op.weight != nullptr) move_to(side_of(*op.weight));
    executor(place_).norm_residual(on(op, place_));
  }
  void norm_logits(const Logits& op) override {
    forward(*op.output.weight, Operation::kLogits, op, &Executor::norm_logits);
  }

  std::span<const float> logits() override { return first_->logits(); }
  std::span<const float> logits_of(std::span<const int32_t> rows) override { return first_->logits_of(rows); }
  std::span<const int32_t> greedy_tokens() override { return first_->greedy_tokens(); }
  bool samples() const override { return first_->samples(); }
  // A step is launched when the second device has done its part: as good as at its end.
  bool works_ahead() const override { return false; }
  void start() override { first_->start(); }
  bool sample(std::span<const SampleRow> rows) override { return first_->sample(rows); }
  std::span<const SampledRow> sampled() override { return first_->sampled(); }
  void read_hidden(const Norm& norm, int32_t row, std::span<float> to) override {
    executor(place_).read_hidden(on(norm, place_), row, to);
  }

  // A block is the first device's part of it and behind that the second's.
  void read_block(int group, int32_t block, std::span<std::byte> to) override {
    const size_t first = first_spec_.kv_block_bytes(group);
    if (first > 0) first_->read_block(group, block, to.first(first));
    if (first < to.size()) second_->read_block(group, block, to.subspan(first));
  }
  void write_block(int group, int32_t block, std::span<const std::byte> from) override {
    const size_t first = first_spec_.kv_block_bytes(group);
    if (first > 0) first_->write_block(group, block, from.first(first));
    if (first < from.size()) second_->write_block(group, block, from.subspan(first));
  }
  void copy_block(int group, int32_t from, int32_t to) override {
    if (first_spec_.kv_block_bytes(group) > 0) first_->copy_block(group, from, to);
    if (second_spec_.kv_block_bytes(group) > 0) second_->copy_block(group, from, to);
  }
  void finish_reads() override {
    first_->finish_reads();
    second_->finish_reads();
  }

  bool time_operations() override { return times_ = first_->time_operations(); }
  std::vector<TimedOperation> operation_times() override {
    std::vector<TimedOperation> times = first_->operation_times();
    times.insert(times.end(), second_times_.begin(), second_times_.end());
    second_times_.clear();
    return times;
  }
  std::vector<float> read_slot(Slot slot) override {
    return slot == Slot::kResidual ? executor(place_).read_slot(slot) : first_->read_slot(slot);
  }
  void write_slot(Slot slot, std::span<const float> values) override {
    (slot == Slot::kResidual ? executor(place_) : *first_).write_slot(slot, values);
  }

 private:
  Executor& executor(Side side) { return side == Side::kFirst ? *first_ : *second_; }
  MixedPart& part(Side side) { return side == Side::kFirst ? first_part_ : second_part_; }
  Side side_of_layer(int layer) const {
    return placement_.layers[static_cast<size_t>(layer)].on_first ? Side::kFirst : Side::kSecond;
  }

  // Where the residual stream is worked on next.
  void move_to(Side side) {
    if (side == place_) return;
    part(place_).send_rows(false);
    part(side).set_residual(part(place_).rows_out().residual);
    place_ = side;
  }

  // What the second does is done when the call returns, and is timed here.
  template <class Call>
  void run(Side side, Operation operation, const Call& call) {
    if (!times_ || side == Side::kFirst) return call(executor(side));
    const auto begin = std::chrono::steady_clock::now();
    call(executor(side));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    second_times_.push_back({operation, seconds.count()});
  }

  // To the device that has `weight`, with its weights.
  template <class Op>
  void forward(const Weight& weight, Operation operation, const Op& op, void (Executor::*call)(const Op&)) {
    const Side side = side_of(weight);
    move_to(side);
    run(side, operation, [&](Executor& x) { (x.*call)(on(op, side)); });
  }

  void number_experts(const Placement::Layer& layer);

  const ExecutorSpec whole_;
  const Placement placement_;
  const std::unique_ptr<Executor> first_, second_;
  MixedPart &first_part_, &second_part_;
  const ExecutorSpec first_spec_, second_spec_;
  // Per layer: the number of an expert in each device's weights, or -1.
  std::vector<std::vector<int32_t>> first_local_, second_local_;
  Side place_ = Side::kFirst;  // of the residual stream
  Norm routed_norm_;           // of the last route()
  bool times_ = false;
  std::vector<TimedOperation> second_times_;
};

void MixedExecutor::number_experts(const Placement::Layer& layer) {
  std::vector<int32_t>& first = first_local_.emplace_back(static_cast<size_t>(layer.experts), -1);
  std::vector<int32_t>& second = second_local_.emplace_back(static_cast<size_t>(layer.experts), -1);
  int32_t number = 0;
  for (const int32_t e : layer.first_experts) first[static_cast<size_t>(e)] = number++;
  number = 0;
  for (size_t e = 0; e < second.size(); ++e) {
    if (first[e] < 0) second[e] = number++;
  }
}

void MixedExecutor::experts_add(const Experts& op) {
  const auto layer = static_cast<size_t>(own(*op.up.weight).layer);
  if (!placement_.shares_experts(static_cast<int32_t>(layer))) {
    const Side side = side_of_layer(static_cast<int>(layer));
    return run(side, Operation::kExperts, [&](Executor& x) { x.experts_add(on(op, side)); });
  }
  first_part_.send_rows(true);
  const Experts mine = on(op, Side::kFirst);
  if (mine.up.weight != nullptr) first_part_.keep_experts(first_local_[layer]);
  if (mine.up.weight != nullptr || mine.shared.up.weight != nullptr) {
    first_->experts_add(mine);
    first_->start();  // before anybody here waits
  }
  const HostRows rows = first_part_.rows_out();
  run(Side::kSecond, Operation::kExperts, [&](Executor& x) {
    second_part_.take_routed(on(routed_norm_, Side::kSecond), rows);
    second_part_.keep_experts(second_local_[layer]);
    Experts theirs = on(op, Side::kSecond);
    theirs.shared = {};  // the first's
    x.experts_add(theirs);
    second_part_.send_rows(false);
    first_part_.add_residual(second_part_.rows_out().residual);
  });
}

}  // namespace

ExecutorSpec spec_of(const ExecutorSpec& whole, const Placement& placement, Side side) {
  ExecutorSpec spec = whole;
  for (KvGroupSpec& group : spec.kv_groups) group.num_layers = 0;
  for (size_t l = 0; l < spec.layers.size(); ++l) {
    KvGroupSpec& group = spec.kv_groups[static_cast<size_t>(spec.layers[l].group)];
    const bool here = placement.layers[l].on_first == (side == Side::kFirst);
    spec.layers[l].index = here ? group.num_layers++ : 0;
  }
  if (side == Side::kSecond) spec.max_logit_rows = 1;  // none, and what is empty is odd
  return spec;
}

std::unique_ptr<Executor> make_mixed_executor(const ExecutorSpec& whole, const Placement& placement,
                                              std::unique_ptr<Executor> first,
                                              std::unique_ptr<Executor> second) {
  return std::make_unique<MixedExecutor>(whole, placement, std::move(first), std::move(second));
}

}  // namespace millrace::mixed
