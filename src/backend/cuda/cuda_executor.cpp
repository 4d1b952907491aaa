#include "backend/cuda/cuda_executor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "backend/cuda/block_copies.h"
#include "backend/cuda/graph.h"
#include "backend/cuda/rank_part.h"
#include "backend/cuda/sample_batch.h"
#include "backend/cuda/step_launcher.h"
#include "backend/mixed_part.h"
#include "base/check.h"
#include "base/error.h"
#include "kernels/cuda/moe/sigmoid_routing.h"

namespace millrace::cuda {
namespace {

bool same_norm(const Norm& a, const Norm& b) {
  return a.weight == b.weight && a.bias == b.bias && a.eps == b.eps && a.kind == b.kind;
}

// An event with a time, recorded when it is made.
class TimingEvent {
 public:
  explicit TimingEvent(const Stream& stream) {
    MILLRACE_CUDA_TRY(cudaEventCreate(&event_));
    MILLRACE_CUDA_TRY(cudaEventRecord(event_, stream.get()));
  }
  ~TimingEvent() { cudaEventDestroy(event_); }
  TimingEvent(const TimingEvent&) = delete;
  TimingEvent& operator=(const TimingEvent&) = delete;
  double seconds_until(const TimingEvent& later) const {  // both are done
    float ms = 0.0f;
    MILLRACE_CUDA_TRY(cudaEventElapsedTime(&ms, event_, later.event_));
    return 1e-3 * static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// StepPlan::runs of a batch.
void find_runs(const Batch& batch, std::vector<StepPlan::Run>& runs) {
  runs.clear();
  bool any = false;
  const auto add = [&](int64_t first, int64_t count, bool fp8) {
    if (count <= 0) return;
    any = any || fp8;
    if (!runs.empty() && runs.back().fp8 == fp8) {
      runs.back().count += count;
    } else {
      runs.push_back({first, count, fp8});
    }
  };
  for (const SequenceSlice& s : batch.sequences) {
    const int32_t prompt = std::clamp(s.fp8_until - s.context_len, 0, s.num_tokens);
    add(s.first_row, prompt, true);
    add(s.first_row + prompt, s.num_tokens - prompt, false);
  }
  if (!any) runs.clear();
}

// In the order of StepOp's alternatives.
Operation operation_of(const StepOp& op) {
  constexpr Operation kOperations[] = {
      Operation::kEmbed,   Operation::kNormQkv, Operation::kRopeAppend, Operation::kAttend,
      Operation::kProject, Operation::kFfn,     Operation::kRoute,      Operation::kExperts,
      Operation::kNormQkv, Operation::kLogits,  Operation::kPick,       Operation::kPick,
      Operation::kRoute,   Operation::kExperts, Operation::kExperts,    Operation::kNormQkv,
      Operation::kAttend,  Operation::kNormQkv, Operation::kEmbed,      Operation::kFfn,
      Operation::kEmbed,   Operation::kAttend,  Operation::kFfn};
  static_assert(std::size(kOperations) == std::variant_size_v<StepOp>);
  return kOperations[op.index()];
}

// Operations are recorded and launched together when somebody wants a result. Steps that repeat, decoding
// above all, are replayed as graphs.
class CudaExecutor final : public Executor, public MixedPart {
 public:
  CudaExecutor(const ExecutorSpec& spec, const Device& device, std::unique_ptr<RankPart> part)
      : device_(device),
        spec_(spec),
        part_(std::move(part)),
        work_(spec, {device, stream_.get()}, part_ == nullptr ? 0 : part_->attended_cols()),
        launcher_(spec_, work_, {device, stream_.get()}, part_.get()),
        block_copies_(stream_, largest_block_of(spec)) {
    for (Sampled& s : sampled_) {
      s.tokens = PinnedBuffer(work_.best.bytes(), "the sampled tokens");
      s.details = PinnedBuffer(work_.sample_details.bytes(), "the logprobs");
      s.rows.reserve(static_cast<size_t>(spec.max_logit_rows));
    }
  }
  ~CudaExecutor() override { cudaStreamSynchronize(stream_.get()); }  // nothing may still use the buffers

  void begin(const Batch& batch) override;
  void embed(const Embed& op) override;
  void layer_inputs(const LayerInputs& op) override { record(op); }
  void end_layer(const EndLayer& op) override { record(op); }
  void add_given(int layer) override {
    if (plan_.given_rows > 0 && layer < plan_.given_further) record(GivenOp{layer});
  }
  void norm_qkv(const NormQkv& op) override { record(op); }
  void norm_latent_qkv(const NormLatentQkv& op) override { record(op); }
  void rope_append_kv(const Rope& op) override;
  void attend(const Attend& op) override;
  void norm_mix(const NormMix& op) override { record(op); }
  void mix(const StateMix& op) override { record(op); }
  void time_mix(const TimeMix& op) override { record(op); }
  void channel_mix_add(const ChannelMix& op) override { record(op); }
  void project_add(const Projection& op) override { record(op); }
  void ffn_add(const Ffn& op) override { record(op); }
  void route(const Route& op) override;
  void experts_add(const Experts& op) override;
  void norm_residual(const Norm& op) override { record(NormResidualOp{op}); }
  void norm_logits(const Logits& op) override { record(op); }
  std::span<const float> logits() override;
  std::span<const float> own_logits() override;
  std::span<const float> logits_of(std::span<const int32_t> rows) override;
  // Ranks pick by what all of them know (engine/rank_sampler.h).
  bool samples() const override { return part_ == nullptr && supports_sampling(spec_.vocab, device_); }
  void start() override { flush(); }
  bool sample(std::span<const SampleRow> rows) override;
  std::span<const SampledRow> sampled() override;
  void read_hidden(const Norm& norm, int32_t row, std::span<float> to) override;
  void read_block(int group, int32_t block, std::span<std::byte> to) override;
  void write_block(int group, int32_t block, std::span<const std::byte> from) override;
  void copy_block(int group, int32_t from, int32_t to) override;
  void finish_reads() override {
    device_.use();
    block_copies_.finish();
  }
  std::span<const int32_t> greedy_tokens() override;
  bool time_operations() override { return times_operations_ = true; }
  std::vector<TimedOperation> operation_times() override;
  std::vector<float> read_slot(Slot slot) override;
  void write_slot(Slot slot, std::span<const float> values) override;

  void send_rows(bool routing) override;
  HostRows rows_out() override;
  void set_residual(std::span<const float> rows) override;
  void add_residual(std::span<const float> rows) override;
  void take_routed(const Norm& norm, const HostRows& rows) override;
  void keep_experts(std::span<const int32_t> local) override;

 private:
  struct SlotPlace {
    const DeviceBuffer& buffer;
    int64_t rows, cols;
  };
  SlotPlace place_of(Slot slot) const;
  std::span<std::byte> block_bytes(int group, int32_t block) const;  // on the device
  void record(const StepOp& op) {
    ops_.push_back(op);
    if (part_ != nullptr && part_->blocks()) flush();
  }
  void flush();
  void launch_timed();
  void upload_given(const Batch& batch);
  void upload_rope_positions(const Batch& batch);
  void upload_types(const Batch& batch);
  void upload_sampling(std::span<const SampleRow> rows);
  float* host_logits();
  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    MILLRACE_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, kind, stream_.get()));
  }

  const Device& device_;
  ExecutorSpec spec_;
  Stream stream_;
  const std::unique_ptr<RankPart> part_;  // absent: the whole model is here
  Workspace work_;
  StepLauncher launcher_;
  GraphCache graphs_;
  BlockCopies block_copies_;
  PinnedBuffer logits_host_;  // made when somebody reads logits

  // The batch: filled in pinned memory, then copied. The next step waits for the copy before it fills again.
  PinnedBuffer batch_host_;
  DeviceBuffer batch_device_;
  Event batch_sent_;
  std::optional<BatchArrays> batch_;
  std::vector<int32_t> tokens_;
  StepPlan plan_;
  std::vector<StepOp> ops_;  // recorded, not launched
  std::vector<uint64_t> last_signature_;

  // What few steps have: rows of images and their positions, types of tokens. The sent copies are waited for.
  PinnedBuffer given_host_, rope_host_, types_host_;
  DeviceBuffer given_, rope_;
  Event given_sent_, rope_sent_, types_sent_;
  bool typed_ = false;  // some of Workspace::token_types are not zero

  // As half of a mixed executor: rows and routing on their way to the host, rows on their way here.
  PinnedBuffer rows_out_, routing_out_, rows_in_host_;
  DeviceBuffer rows_in_;
  Event rows_sent_, rows_taken_;
  bool routing_sent_ = false, keeps_some_ = false;
  struct LocalExperts {
    const int32_t* host;
    DeviceBuffer numbers;
    int32_t count;
  };
  std::deque<LocalExperts> local_experts_;  // of each layer whose experts are shared out
  void upload_rows(std::span<const float> rows);

  bool times_operations_ = false;
  std::vector<TimedOperation> operation_times_;

  // Sampling: the rows' parameters on their way to the device, and two steps' tokens on their way back.
  PinnedBuffer sampling_host_;
  DeviceBuffer sampling_device_;
  Event sampling_sent_;
  struct Sampled {
    SampleBatch batch;
    PinnedBuffer tokens, details;
    Event ready;
    std::vector<SampledRow> rows;
  };
  std::array<Sampled, 2> sampled_;
  size_t started_ = 0, taken_ = 0;  // steps, so far

  // The last step's hidden states behind a norm, copied to the host when somebody reads the first of them.
  std::mutex hidden_mutex_;
  PinnedBuffer hidden_host_;
  std::optional<Norm> hidden_norm_;  // nothing: not there
};

// ---------------------------------------------------------------- the batch

void CudaExecutor::begin(const Batch& batch) {
  device_.use();
  flush();  // a step of which nobody wanted a result: its keys and values are wanted
  batch_.emplace(batch, spec_);
  plan_.rows = static_cast<int64_t>(batch.tokens.size());
  plan_.logit_rows = static_cast<int64_t>(batch.logit_rows.size());
  plan_.single_tokens = batch_->single_tokens();
  plan_.last_position = batch_->last_position();
  plan_.sparse = batch_->sparse();
  plan_.last_read = batch_->last_read();
  find_runs(batch, plan_.runs);
  plan_.adapters = batch_->adapted() ? batch.adapters : nullptr;
  // Steps that decode all look: one graph serves those that were launched ahead and those that were not.
  plan_.takes_sampled = !batch.sampled_rows.empty() || plan_.single_tokens;
  hidden_norm_.reset();
  tokens_.assign(batch.tokens.begin(), batch.tokens.end());
  upload_given(batch);
  upload_rope_positions(batch);
  upload_types(batch);
  const size_t bytes = batch_->size() * sizeof(int32_t);
  if (bytes == 0) return;
  batch_sent_.wait();
  if (bytes > batch_device_.bytes()) {
    stream_.synchronize();  // kernels of the last step may still read the old one
    graphs_.clear();
    batch_host_ = PinnedBuffer(2 * bytes, "the batch");
    batch_device_ = DeviceBuffer(2 * bytes, "the batch");
  }
  batch_->fill(batch_host_.as<int32_t>());
  copy(batch_device_.as<void>(), batch_host_.as<void>(), bytes, cudaMemcpyHostToDevice);
  batch_sent_.record(stream_);
}

// Numbers of the rows, then their values.
void CudaExecutor::upload_given(const Batch& batch) {
  plan_.given_rows = std::ssize(batch.given);
  plan_.given_further = batch.given.empty() ? 0 : batch.given.front().further;
  if (batch.given.empty()) return;
  const auto rows = static_cast<size_t>(plan_.given_rows), hidden = static_cast<size_t>(spec_.hidden);
  const size_t columns = (size_t{1} + static_cast<size_t>(plan_.given_further)) * hidden;
  const size_t values_at = (rows + 3) / 4 * 4;  // in words
  const size_t bytes = (values_at + rows * columns) * sizeof(float);
  given_sent_.wait();
  if (bytes > given_.bytes()) {  // no graph points to it: steps with given rows are none
    stream_.synchronize();
    given_host_ = PinnedBuffer(bytes, "rows of images");
    given_ = DeviceBuffer(bytes, "rows of images");
  }
  auto* numbers = given_host_.as<int32_t>();
  auto* values = given_host_.as<float>() + values_at;
  for (size_t i = 0; i < rows; ++i) {
    const GivenRow& given = batch.given[i];
    MILLRACE_CHECK(given.row >= 0 && given.row < plan_.rows && given.further == plan_.given_further);
    numbers[i] = given.row;
    std::memcpy(values + i * columns, given.values, columns * sizeof(float));
  }
  copy(given_.as<void>(), given_host_.as<void>(), bytes, cudaMemcpyHostToDevice);
  given_sent_.record(stream_);
  plan_.given_numbers = given_.as<const int32_t>();
  plan_.given_values = given_.as<const float>() + values_at;
}

void CudaExecutor::upload_rope_positions(const Batch& batch) {
  plan_.rope_positions = nullptr;
  if (batch.rope_positions.empty()) return;
  MILLRACE_CHECK(std::ssize(batch.rope_positions) == 3 * plan_.rows);
  rope_sent_.wait();
  if (rope_.bytes() == 0) {
    const size_t most = 3 * static_cast<size_t>(spec_.max_tokens) * sizeof(int32_t);
    rope_host_ = PinnedBuffer(most, "rotary positions");
    rope_ = DeviceBuffer(most, "rotary positions");
  }
  std::memcpy(rope_host_.as<void>(), batch.rope_positions.data(), batch.rope_positions.size_bytes());
  copy(rope_.as<void>(), rope_host_.as<void>(), batch.rope_positions.size_bytes(), cudaMemcpyHostToDevice);
  rope_sent_.record(stream_);
  plan_.rope_positions = rope_.as<const int32_t>();
}

// Of pairs of texts; else all are zeros, as they were made.
void CudaExecutor::upload_types(const Batch& batch) {
  const bool pairs = std::any_of(batch.sequences.begin(), batch.sequences.end(), [](const SequenceSlice& s) {
    return s.second_text < int64_t{s.context_len} + s.num_tokens;
  });
  if (!pairs && !typed_) return;
  typed_ = pairs;
  types_sent_.wait();
  const size_t bytes = work_.token_types.bytes();
  if (types_host_.bytes() == 0) types_host_ = PinnedBuffer(bytes, "types of tokens");
  auto* types = types_host_.as<int32_t>();
  std::memset(types, 0, bytes);
  for (const SequenceSlice& s : batch.sequences) {
    for (int32_t i = 0; i < s.num_tokens; ++i) types[s.first_row + i] = s.context_len + i >= s.second_text;
  }
  copy(work_.token_types.as<void>(), types, bytes, cudaMemcpyHostToDevice);
  types_sent_.record(stream_);
}

void CudaExecutor::embed(const Embed& op) {
  const Weight& table = *op.table;
  MILLRACE_CHECK(table.cols == spec_.hidden);
  for (const int32_t token : tokens_) MILLRACE_CHECK(token >= 0 && token < table.rows);
  if (op.positions != nullptr) {
    MILLRACE_CHECK(op.positions->cols == spec_.hidden && batch_->last_position() < op.positions->rows);
  }
  if (op.types != nullptr)
    MILLRACE_CHECK(op.types->cols == spec_.hidden && op.types->rows > (typed_ ? 1 : 0));
  record(op);
}

void CudaExecutor::rope_append_kv(const Rope& op) {
  MILLRACE_CHECK(2 * op.inv_freq.size() <=
                 static_cast<size_t>(spec_.head_dim_of(spec_.layers[static_cast<size_t>(op.layer)].group)));
  const size_t table = launcher_.angle_table(op.inv_freq, op.magnitude, op.axes);
  record(RopeOp{
      op.layer,
      table,
      {launcher_.inv_freq(table), static_cast<int32_t>(op.inv_freq.size()), op.magnitude, op.interleaved},
      {op.growth.scale, op.growth.every, op.growth.offset},
      op.appends});
}

void CudaExecutor::attend(const Attend& op) {
  // A chunk begins where a window of its size does, or later.
  const int32_t window = op.window > 0 ? op.window : op.chunk;
  MILLRACE_CHECK(batch_->holds_window(spec_.layers[static_cast<size_t>(op.layer)].group, window));
  record(op);
}

void CudaExecutor::route(const Route& op) {
  MILLRACE_CHECK(op.experts_per_token == spec_.experts_per_token && op.experts_per_token <= spec_.experts);
  const bool sigmoid =
      op.weighting == Route::Weighting::kSigmoid || op.weighting == Route::Weighting::kSigmoidRenormalized;
  const bool grouped = op.groups_chosen < op.groups;
  if (sigmoid || grouped) {
    MILLRACE_CHECK(op.groups > 0 && spec_.experts % op.groups == 0 &&
                   op.groups_chosen * (spec_.experts / op.groups) >= op.experts_per_token);
    MILLRACE_CHECK(supports_sigmoid_routing(spec_.experts, op.groups));
  }
  plan_.softmax_over_all = op.weighting == Route::Weighting::kSoftmaxAll;
  plan_.chosen =
      sigmoid || grouped || op.scale != 1.0f || op.score_scale != 1.0f || op.expert_scales != nullptr;
  record(op);
}

// Of experts that are here in part the choice has been made: those of other layers of the step choose
// themselves.
void CudaExecutor::experts_add(const Experts& op) {
  record(op);
  if (!keeps_some_) return;
  keeps_some_ = false;
  const bool chosen = std::exchange(plan_.chosen, true);
  flush();
  plan_.chosen = chosen;
}

// Decoding repeats: its steps are captured, those of a small batch at first sight, larger ones, beside which
// launching is short, at the second in a row. A chunk of a prompt is launched as it is, and so is all that
// ranks do whose exchanges wait on the host.
void CudaExecutor::flush() {
  device_.use();  // the thread may have worked on another GPU since
  if (ops_.empty()) return;
  constexpr int64_t kMaxGraphRows = 256, kAtFirstSight = 4;
  if (times_operations_) return launch_timed();
  const auto launch = [&] { launcher_.launch(ops_, plan_, *batch_, batch_device_.as<int32_t>()); };
  const bool waits = part_ != nullptr && part_->blocks();
  if (plan_.single_tokens && plan_.rows > 0 && plan_.rows <= kMaxGraphRows && !waits) {
    std::vector<uint64_t> signature = signature_of(ops_, plan_);
    if (plan_.rows <= kAtFirstSight || signature == last_signature_ || graphs_.has(signature)) {
      graphs_.get(signature, stream_, launch).launch(stream_);
    } else {
      launch();
    }
    last_signature_ = std::move(signature);
  } else {
    launch();
  }
  ops_.clear();
}

// With an event ahead of each operation, and not as a graph: nothing overlaps with its neighbours.
void CudaExecutor::launch_timed() {
  std::vector<size_t> at;
  std::deque<TimingEvent> events;
  launcher_.launch(ops_, plan_, *batch_, batch_device_.as<int32_t>(), [&](size_t i) {
    at.push_back(i);
    events.emplace_back(stream_);
  });
  const TimingEvent end(stream_);
  stream_.synchronize();
  for (size_t i = 0; i < at.size(); ++i) {
    const TimingEvent& next = i + 1 < at.size() ? events[i + 1] : end;
    operation_times_.push_back({operation_of(ops_[at[i]]), events[i].seconds_until(next)});
  }
  ops_.clear();
}

std::vector<TimedOperation> CudaExecutor::operation_times() {
  flush();
  return std::exchange(operation_times_, {});
}

float* CudaExecutor::host_logits() {
  if (logits_host_.bytes() == 0) logits_host_ = PinnedBuffer(work_.logits.bytes(), "the logits");
  return logits_host_.as<float>();
}

std::span<const float> CudaExecutor::logits() {
  if (part_ == nullptr) return own_logits();
  return part_->collect_logits(own_logits(), plan_.logit_rows);
}

std::span<const float> CudaExecutor::own_logits() {
  flush();
  const size_t count = static_cast<size_t>(plan_.logit_rows) * static_cast<size_t>(spec_.vocab);
  if (count == 0) return {};
  copy(host_logits(), work_.logits.as<void>(), count * sizeof(float), cudaMemcpyDeviceToHost);
  stream_.synchronize();
  return {logits_host_.as<const float>(), count};
}

std::span<const float> CudaExecutor::logits_of(std::span<const int32_t> rows) {
  if (part_ != nullptr) return logits();
  flush();
  const auto vocab = static_cast<size_t>(spec_.vocab);
  for (size_t i = 0; i < rows.size();) {  // rows that follow one another in one copy
    size_t n = 1;
    while (i + n < rows.size() && rows[i + n] == rows[i] + static_cast<int32_t>(n)) ++n;
    MILLRACE_CHECK(rows[i] >= 0 && rows[i + n - 1] < plan_.logit_rows);
    const size_t at = static_cast<size_t>(rows[i]) * vocab;
    copy(host_logits() + at, work_.logits.as<float>() + at, n * vocab * sizeof(float),
         cudaMemcpyDeviceToHost);
    i += n;
  }
  if (!rows.empty()) stream_.synchronize();
  return {host_logits(), static_cast<size_t>(plan_.logit_rows) * vocab};
}

std::span<const int32_t> CudaExecutor::greedy_tokens() {
  if (part_ != nullptr) return part_->collect_greedy(own_logits(), plan_.logit_rows);
  ops_.emplace_back(ArgmaxOp{});
  flush();
  const auto count = static_cast<size_t>(plan_.logit_rows);
  auto* tokens = sampled_[started_ % 2].tokens.as<int32_t>();
  if (count > 0) {
    copy(tokens, work_.best.as<void>(), count * sizeof(int32_t), cudaMemcpyDeviceToHost);
    stream_.synchronize();
  }
  std::replace(tokens, tokens + count, SampledRow::kNothing, 0);  // all are the largest then
  return {tokens, count};
}

// ---------------------------------------------------------------- sampling

void CudaExecutor::upload_sampling(std::span<const SampleRow> rows) {
  const SampleBatch& batch = sampled_[started_ % 2].batch;
  sampling_sent_.wait();
  if (batch.bytes() > sampling_device_.bytes()) {
    stream_.synchronize();  // the last step's kernels may still read the old one
    graphs_.clear();
    sampling_host_ = PinnedBuffer(2 * batch.bytes(), "the sampling parameters");
    sampling_device_ = DeviceBuffer(2 * batch.bytes(), "the sampling parameters");
  }
  batch.fill(rows, sampling_host_.as<void>());
  copy(sampling_device_.as<void>(), sampling_host_.as<void>(), batch.bytes(), cudaMemcpyHostToDevice);
  sampling_sent_.record(stream_);
  plan_.sampling = sampling_device_.as<void>();
}

bool CudaExecutor::sample(std::span<const SampleRow> rows) {
  if (part_ != nullptr) return false;
  MILLRACE_CHECK(rows.size() == static_cast<size_t>(plan_.logit_rows));
  MILLRACE_CHECK(started_ - taken_ < sampled_.size());
  Sampled& s = sampled_[started_ % 2];
  s.batch.lay_out(rows);
  const bool greedy = s.batch.plain_greedy();
  if (!greedy && !supports_sampling(spec_.vocab, device_)) return false;
  if (greedy) {
    ops_.emplace_back(ArgmaxOp{});
  } else {
    upload_sampling(rows);
    ops_.emplace_back(SampleOp{});
  }
  flush();
  if (!rows.empty()) {
    copy(s.tokens.as<void>(), work_.best.as<void>(), rows.size() * sizeof(int32_t), cudaMemcpyDeviceToHost);
  }
  if (s.batch.details()) {
    copy(s.details.as<void>(), work_.sample_details.as<void>(), rows.size() * sizeof(SampleDetails),
         cudaMemcpyDeviceToHost);
  }
  s.ready.record(stream_);
  ++started_;
  return true;
}

std::span<const SampledRow> CudaExecutor::sampled() {
  MILLRACE_CHECK(taken_ < started_);
  Sampled& s = sampled_[taken_++ % 2];
  s.ready.wait();
  s.rows.assign(s.batch.rows(), {});
  for (size_t r = 0; r < s.rows.size(); ++r) {
    SampledRow& row = s.rows[r];
    if (s.batch.skips(r)) continue;
    row.token = s.tokens.as<const int32_t>()[r];
    if (s.batch.logprobs(r) < 0 || row.token < 0) continue;
    const SampleDetails& details = s.details.as<const SampleDetails>()[r];
    row.chosen = details.chosen;
    row.largest = details.largest;
    row.units = details.units;
    static_assert(sizeof(SampledRow::Top) == sizeof(SampleDetails::Top));
    row.top = {reinterpret_cast<const SampledRow::Top*>(details.top), static_cast<size_t>(details.num_top)};
  }
  return s.rows;
}

void CudaExecutor::read_hidden(const Norm& norm, int32_t row, std::span<float> to) {
  device_.use();
  const auto hidden = static_cast<size_t>(spec_.hidden);
  MILLRACE_CHECK(row >= 0 && row < plan_.rows && to.size() == hidden);
  const std::lock_guard lock(hidden_mutex_);
  if (!hidden_norm_.has_value() || !same_norm(*hidden_norm_, norm)) {
    flush();
    const size_t bytes = static_cast<size_t>(plan_.rows) * hidden * sizeof(float);
    if (bytes > hidden_host_.bytes()) hidden_host_ = PinnedBuffer(bytes, "the hidden states");
    copy(hidden_host_.as<void>(), launcher_.hidden(norm, plan_.rows), bytes, cudaMemcpyDeviceToHost);
    stream_.synchronize();
    hidden_norm_ = norm;
  }
  std::memcpy(to.data(), hidden_host_.as<const float>() + static_cast<size_t>(row) * hidden, to.size_bytes());
}

// ---------------------------------------------------------------- half of a mixed executor

void CudaExecutor::send_rows(bool routing) {
  device_.use();
  graphs_.allow_pieces(3 * spec_.layers.size());
  if (routing) ops_.emplace_back(ChooseOp{});
  flush();
  const size_t most = static_cast<size_t>(spec_.max_tokens) * sizeof(float);
  if (rows_out_.bytes() == 0) rows_out_ = PinnedBuffer(most * static_cast<size_t>(spec_.hidden), "rows sent");
  const auto rows = static_cast<size_t>(plan_.rows);
  routing_sent_ = routing;
  if (rows > 0) {
    copy(rows_out_.as<void>(), work_.residual.as<void>(),
         rows * static_cast<size_t>(spec_.hidden) * sizeof(float), cudaMemcpyDeviceToHost);
  }
  if (routing && rows > 0) {
    const auto k = static_cast<size_t>(spec_.experts_per_token);
    if (routing_out_.bytes() == 0) routing_out_ = PinnedBuffer(2 * most * k, "routing sent");
    copy(routing_out_.as<void>(), work_.chosen.as<void>(), rows * k * sizeof(int32_t),
         cudaMemcpyDeviceToHost);
    copy(routing_out_.as<std::byte>() + most * k, work_.chosen_weight.as<void>(), rows * k * sizeof(float),
         cudaMemcpyDeviceToHost);
  }
  rows_sent_.record(stream_);
}

HostRows CudaExecutor::rows_out() {
  rows_sent_.wait();
  const auto rows = static_cast<size_t>(plan_.rows), k = static_cast<size_t>(spec_.experts_per_token);
  HostRows out{{rows_out_.as<const float>(), rows * static_cast<size_t>(spec_.hidden)}, {}, {}};
  if (!routing_sent_) return out;
  const size_t most = static_cast<size_t>(spec_.max_tokens) * k;
  out.chosen = {routing_out_.as<const int32_t>(), rows * k};
  out.weights = {routing_out_.as<const float>() + most, rows * k};
  return out;
}

void CudaExecutor::upload_rows(std::span<const float> rows) {
  device_.use();
  MILLRACE_CHECK(std::ssize(rows) == plan_.rows * spec_.hidden);
  const size_t most =
      static_cast<size_t>(spec_.max_tokens) * static_cast<size_t>(spec_.hidden) * sizeof(float);
  if (rows_in_.bytes() == 0) {
    rows_in_host_ = PinnedBuffer(most, "rows taken");
    rows_in_ = DeviceBuffer(most, "rows taken");
  }
  rows_taken_.wait();
  std::memcpy(rows_in_host_.as<void>(), rows.data(), rows.size_bytes());
}

void CudaExecutor::set_residual(std::span<const float> rows) {
  flush();
  upload_rows(rows);
  if (!rows.empty())
    copy(work_.residual.as<void>(), rows_in_host_.as<void>(), rows.size_bytes(), cudaMemcpyHostToDevice);
  rows_taken_.record(stream_);
}

void CudaExecutor::add_residual(std::span<const float> rows) {
  flush();  // what still reads the rows before these is launched before them
  upload_rows(rows);
  if (rows.empty()) return;
  copy(rows_in_.as<void>(), rows_in_host_.as<void>(), rows.size_bytes(), cudaMemcpyHostToDevice);
  rows_taken_.record(stream_);
  plan_.rows_in = rows_in_.as<const float>();
  ops_.emplace_back(AddRowsOp{});
}

void CudaExecutor::take_routed(const Norm&, const HostRows&) {
  throw_error(ErrorCode::kUnsupported,
              "device cuda: it is the first of two devices, expected another second");
}

void CudaExecutor::keep_experts(std::span<const int32_t> local) {
  device_.use();
  auto found = std::find_if(local_experts_.begin(), local_experts_.end(),
                            [&](const LocalExperts& l) { return l.host == local.data(); });
  if (found == local_experts_.end()) {
    LocalExperts& numbers = local_experts_.emplace_back();
    numbers.host = local.data();
    numbers.numbers = DeviceBuffer(local.size_bytes(), "numbers of experts");
    numbers.count = 1 + *std::max_element(local.begin(), local.end());
    copy(numbers.numbers.as<void>(), local.data(), local.size_bytes(), cudaMemcpyHostToDevice);
    stream_.synchronize();
    found = local_experts_.end() - 1;
  }
  flush();  // those before choose themselves
  ops_.emplace_back(KeepExpertsOp{found->numbers.as<const int32_t>(), found->count});
  keeps_some_ = true;
}

// ---------------------------------------------------------------- slots

CudaExecutor::SlotPlace CudaExecutor::place_of(Slot slot) const {
  const int64_t query_cols = static_cast<int64_t>(spec_.heads) * spec_.head_dim;
  const int64_t key_cols = static_cast<int64_t>(spec_.kv_heads) * spec_.head_dim;
  switch (slot) {
    case Slot::kResidual:
      return {work_.residual, plan_.rows, spec_.hidden};
    case Slot::kQuery:
      return {work_.query, plan_.rows, query_cols};
    case Slot::kKey:
      return {work_.key, plan_.rows, key_cols};
    case Slot::kValue:
      return {work_.value, plan_.rows, spec_.kv_parts() == 1 ? 0 : key_cols};
    case Slot::kAttention:
      return {work_.attention, plan_.rows, query_cols};
    case Slot::kLogits:
      break;
  }
  return {work_.logits, plan_.logit_rows, spec_.vocab};
}

std::span<std::byte> CudaExecutor::block_bytes(int group, int32_t block) const {
  const size_t bytes = spec_.kv_block_bytes(group);
  MILLRACE_CHECK(block >= 0 && block < spec_.kv_groups[static_cast<size_t>(group)].num_blocks);
  return {work_.pools[static_cast<size_t>(group)].as<std::byte>() + static_cast<size_t>(block) * bytes,
          bytes};
}

void CudaExecutor::read_block(int group, int32_t block, std::span<std::byte> to) {
  device_.use();
  const std::span<std::byte> from = block_bytes(group, block);
  MILLRACE_CHECK(to.size() == from.size());
  flush();  // what the step wrote
  block_copies_.read(from.data(), to);
}

void CudaExecutor::write_block(int group, int32_t block, std::span<const std::byte> from) {
  device_.use();
  const std::span<std::byte> to = block_bytes(group, block);
  MILLRACE_CHECK(to.size() == from.size());
  flush();
  block_copies_.write(to.data(), from);
  launcher_.summarize_block(group, block);
}

void CudaExecutor::copy_block(int group, int32_t from, int32_t to) {
  device_.use();
  const std::span<std::byte> source = block_bytes(group, from);
  flush();
  copy(block_bytes(group, to).data(), source.data(), source.size(), cudaMemcpyDeviceToDevice);
  launcher_.summarize_block(group, to);
}

std::vector<float> CudaExecutor::read_slot(Slot slot) {
  flush();
  const SlotPlace place = place_of(slot);
  std::vector<float> values(static_cast<size_t>(place.rows * place.cols));
  if (!values.empty()) {
    copy(values.data(), place.buffer.as<void>(), values.size() * sizeof(float), cudaMemcpyDeviceToHost);
    stream_.synchronize();
  }
  return values;
}

void CudaExecutor::write_slot(Slot slot, std::span<const float> values) {
  flush();
  const SlotPlace place = place_of(slot);
  MILLRACE_CHECK(values.size_bytes() <= place.buffer.bytes());
  if (values.empty()) return;
  copy(place.buffer.as<void>(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice);
  stream_.synchronize();
}

}  // namespace

size_t executor_workspace_bytes(const ExecutorSpec& spec, const Device& device) {
  return workspace_bytes_of(spec, device);
}

size_t executor_workspace_bytes(const ExecutorSpec& whole, const Device& device, const dist::Shares& shares) {
  return workspace_bytes_of(RankPart::local_spec(shares, whole), device,
                            int64_t{whole.heads} * whole.head_dim) +
         RankPart::bytes(shares, whole);
}

std::unique_ptr<Executor> make_cuda_executor(const ExecutorSpec& spec, const Device& device) {
  device.use();
  return std::make_unique<CudaExecutor>(spec, device, nullptr);
}

std::unique_ptr<Executor> make_cuda_executor(const ExecutorSpec& whole, const Device& device,
                                             dist::Communicator& group, const dist::Shares& shares) {
  device.use();
  return std::make_unique<CudaExecutor>(RankPart::local_spec(shares, whole), device,
                                        std::make_unique<RankPart>(group, shares, whole, device));
}

}  // namespace millrace::cuda
