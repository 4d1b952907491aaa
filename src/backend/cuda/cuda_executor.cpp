#include "backend/cuda/cuda_executor.h"

#include <algorithm>
#include <deque>
#include <optional>

#include "backend/cuda/batch_arrays.h"
#include "backend/cuda/cuda_weight.h"
#include "backend/cuda/device.h"
#include "backend/cuda/ops/ops.h"
#include "base/check.h"
#include "base/error.h"

namespace millrace::cuda {
namespace {

// Floats of each working buffer. All rows of a step at once: the buffers that experts need are the largest.
struct WorkspaceShape {
  explicit WorkspaceShape(const ExecutorSpec& spec) {
    const auto rows = static_cast<size_t>(spec.max_tokens);
    const size_t pairs = rows * static_cast<size_t>(spec.experts_per_token);
    hidden = rows * static_cast<size_t>(spec.hidden);
    query = rows * static_cast<size_t>(spec.heads) * static_cast<size_t>(spec.head_dim);
    key = rows * static_cast<size_t>(spec.kv_heads) * static_cast<size_t>(spec.head_dim);
    gate = std::max(rows * static_cast<size_t>(spec.ffn), pairs * static_cast<size_t>(spec.expert_ffn));
    down = pairs * static_cast<size_t>(spec.hidden);
    scores = rows * static_cast<size_t>(spec.experts);
    chosen = pairs;
    normed_logit_rows = static_cast<size_t>(spec.max_logit_rows) * static_cast<size_t>(spec.hidden);
    logits = static_cast<size_t>(spec.max_logit_rows) * static_cast<size_t>(spec.vocab);
  }
  size_t total() const {
    return 2 * hidden + 2 * query + 2 * key + 2 * gate + down + scores + 2 * chosen + normed_logit_rows +
           logits;
  }
  size_t hidden, query, key, gate, down, scores, chosen, normed_logit_rows, logits;
};

DeviceBuffer floats(size_t count) { return {count * sizeof(float), "the workspace"}; }
const float* vector_of(const Weight* weight) { return weight != nullptr ? own(*weight).vector() : nullptr; }

class CudaExecutor final : public Executor {
 public:
  explicit CudaExecutor(const ExecutorSpec& spec);
  ~CudaExecutor() override;

  void begin(const Batch& batch) override;
  void embed(const Weight& table, float scale) override;
  void norm_qkv(const NormQkv& op) override;
  void rope_append_kv(const Rope& op) override;
  void attend(const Attend& op) override;
  void project_add(const Linear& op) override;
  void ffn_add(const Ffn& op) override;
  void route(const Route& op) override;
  void experts_add(const Experts& op) override;
  void norm_logits(const Logits& op) override;
  std::span<const float> logits() override;
  void read_block(int group, int32_t block, std::span<std::byte> to) override;
  void write_block(int group, int32_t block, std::span<const std::byte> from) override;
  void copy_block(int group, int32_t from, int32_t to) override;
  std::vector<float> read_slot(Slot slot) override;
  void write_slot(Slot slot, std::span<const float> values) override;

 private:
  struct SlotPlace {
    const DeviceBuffer& buffer;
    int64_t rows, cols;
  };
  SlotPlace place_of(Slot slot) const;
  std::span<std::byte> block_bytes(int group, int32_t block) const;  // on the device
  void norm_rows(const Norm& op);
  void norm_heads(const Norm& op, int32_t heads, const DeviceBuffer& values);
  void linear(const Linear& op, const DeviceBuffer& x, int64_t count, bool add, const DeviceBuffer& y,
              int64_t expected_rows, int64_t expected_cols);
  void expert_linear(const Linear& op, const DeviceBuffer& x, int64_t pairs_per_x_row, const DeviceBuffer& y,
                     int64_t expected_rows, int64_t expected_cols);
  LayerCache cache_of(int layer) const;
  const float* inv_freq_on_device(std::span<const float> values);
  const int32_t* in_batch(size_t offset) const { return batch_device_.as<const int32_t>() + offset; }
  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);

  ExecutorSpec spec_;
  Stream stream_;
  DeviceBuffer residual_, normed_;                // [tokens, hidden]
  DeviceBuffer query_, attention_;                // [tokens, heads, head_dim]
  DeviceBuffer key_, value_;                      // [tokens, kv_heads, head_dim]
  DeviceBuffer gate_, up_;                        // [tokens, ffn] or [tokens, slots, expert_ffn]
  DeviceBuffer down_;                             // [tokens, slots, hidden]
  DeviceBuffer scores_, chosen_, chosen_weight_;  // [tokens, experts], [tokens, slots] twice
  DeviceBuffer normed_logit_rows_, logits_;       // [logit rows, hidden], [logit rows, vocab]
  std::vector<DeviceBuffer> pools_;  // per group: [blocks][layers][key, value][kv_heads][16][head_dim]
  PinnedBuffer logits_host_;

  // The batch: filled in pinned memory, then copied. The next step waits for the copy before it fills again.
  PinnedBuffer batch_host_;
  DeviceBuffer batch_device_;
  Event batch_sent_;
  std::optional<BatchArrays> batch_;
  std::vector<int32_t> tokens_;
  int64_t rows_ = 0, logit_rows_ = 0;

  struct AngleTable {
    std::vector<float> values;
    DeviceBuffer device;
  };
  std::deque<AngleTable>
      angle_tables_;  // each distinct Rope::inv_freq, uploaded once; a model has one or two
};

CudaExecutor::CudaExecutor(const ExecutorSpec& spec) : spec_(spec) {
  const WorkspaceShape shape(spec);
  residual_ = floats(shape.hidden);
  normed_ = floats(shape.hidden);
  query_ = floats(shape.query);
  attention_ = floats(shape.query);
  key_ = floats(shape.key);
  value_ = floats(shape.key);
  gate_ = floats(shape.gate);
  up_ = floats(shape.gate);
  down_ = floats(shape.down);
  scores_ = floats(shape.scores);
  chosen_ = DeviceBuffer(shape.chosen * sizeof(int32_t), "the workspace");
  chosen_weight_ = floats(shape.chosen);
  normed_logit_rows_ = floats(shape.normed_logit_rows);
  logits_ = floats(shape.logits);
  logits_host_ = PinnedBuffer(shape.logits * sizeof(float), "the logits");
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    const auto blocks = static_cast<size_t>(spec.kv_groups[g].num_blocks);
    pools_.emplace_back(spec.kv_block_bytes(static_cast<int>(g)) * blocks, "the KV cache");
  }
}

CudaExecutor::~CudaExecutor() { cudaStreamSynchronize(stream_.get()); }  // nothing may still use the buffers

// ---------------------------------------------------------------- the batch

void CudaExecutor::begin(const Batch& batch) {
  batch_.emplace(batch, spec_);
  rows_ = static_cast<int64_t>(batch.tokens.size());
  logit_rows_ = static_cast<int64_t>(batch.logit_rows.size());
  tokens_.assign(batch.tokens.begin(), batch.tokens.end());
  const size_t bytes = batch_->size() * sizeof(int32_t);
  if (bytes == 0) return;
  batch_sent_.wait();
  if (bytes > batch_device_.bytes()) {
    stream_.synchronize();  // kernels of the last step may still read the old one
    batch_host_ = PinnedBuffer(2 * bytes, "the batch");
    batch_device_ = DeviceBuffer(2 * bytes, "the batch");
  }
  batch_->fill(batch_host_.as<int32_t>());
  copy(batch_device_.as<void>(), batch_host_.as<void>(), bytes, cudaMemcpyHostToDevice);
  batch_sent_.record(stream_);
}

LayerCache CudaExecutor::cache_of(int layer) const {
  const auto [group, index] = spec_.layers[static_cast<size_t>(layer)];
  LayerCache cache;
  cache.pool = pools_[static_cast<size_t>(group)].as<void>();
  cache.type = spec_.kv_type;
  cache.layer_offset = static_cast<int64_t>(index) * 2 * spec_.kv_heads * kBlockTokens * spec_.head_dim;
  cache.block_elements = static_cast<int64_t>(spec_.kv_groups[static_cast<size_t>(group)].num_layers) * 2 *
                         spec_.kv_heads * kBlockTokens * spec_.head_dim;
  cache.positions = in_batch(batch_->positions());
  cache.sequence_of = in_batch(batch_->sequence_of());
  cache.table_starts = in_batch(batch_->table_starts(group));
  cache.tables = in_batch(batch_->tables(group));
  cache.heads = spec_.heads;
  cache.kv_heads = spec_.kv_heads;
  cache.head_dim = spec_.head_dim;
  return cache;
}

// ---------------------------------------------------------------- operations

void CudaExecutor::embed(const Weight& table, float scale) {
  MILLRACE_CHECK(table.cols == spec_.hidden);
  for (const int32_t token : tokens_) MILLRACE_CHECK(token >= 0 && token < table.rows);
  launch_embed(own(table).matrix, in_batch(batch_->tokens()), rows_, scale, residual_.as<float>(),
               stream_.get());
}

void CudaExecutor::norm_qkv(const NormQkv& op) {
  const int64_t dim = spec_.head_dim;
  norm_rows(op.norm);
  linear(op.q, normed_, rows_, false, query_, spec_.heads * dim, spec_.hidden);
  linear(op.k, normed_, rows_, false, key_, spec_.kv_heads * dim, spec_.hidden);
  linear(op.v, normed_, rows_, false, value_, spec_.kv_heads * dim, spec_.hidden);
  if (op.q_norm.weight != nullptr) norm_heads(op.q_norm, spec_.heads, query_);
  if (op.k_norm.weight != nullptr) norm_heads(op.k_norm, spec_.kv_heads, key_);
}

void CudaExecutor::rope_append_kv(const Rope& op) {
  MILLRACE_CHECK(2 * op.inv_freq.size() <= static_cast<size_t>(spec_.head_dim));
  const RopeParams params{inv_freq_on_device(op.inv_freq), static_cast<int32_t>(op.inv_freq.size()),
                          op.magnitude, op.interleaved};
  launch_rope_append_kv(cache_of(op.layer), params, rows_, query_.as<float>(), key_.as<float>(),
                        value_.as<float>(), stream_.get());
}

void CudaExecutor::attend(const Attend& op) {
  MILLRACE_CHECK(batch_->holds_window(spec_.layers[static_cast<size_t>(op.layer)].group, op.window));
  const AttentionParams params{op.window, op.scale, vector_of(op.sinks)};
  launch_attention(cache_of(op.layer), params, rows_, query_.as<float>(), attention_.as<float>(),
                   stream_.get());
}

void CudaExecutor::project_add(const Linear& op) {
  linear(op, attention_, rows_, true, residual_, spec_.hidden,
         static_cast<int64_t>(spec_.heads) * spec_.head_dim);
}

void CudaExecutor::ffn_add(const Ffn& op) {
  norm_rows(op.norm);
  linear(op.gate, normed_, rows_, false, gate_, spec_.ffn, spec_.hidden);
  linear(op.up, normed_, rows_, false, up_, spec_.ffn, spec_.hidden);
  launch_activate({}, rows_ * spec_.ffn, gate_.as<float>(), up_.as<float>(), stream_.get());
  linear(op.down, gate_, rows_, true, residual_, spec_.hidden, spec_.ffn);
}

void CudaExecutor::route(const Route& op) {
  MILLRACE_CHECK(op.experts_per_token == spec_.experts_per_token && op.experts_per_token <= spec_.experts);
  norm_rows(op.norm);
  linear(op.router, normed_, rows_, false, scores_, spec_.experts, spec_.hidden);
  // Softmax over all, renormalized over the chosen, is softmax over the chosen.
  launch_choose_experts(scores_.as<float>(), rows_, spec_.experts, spec_.experts_per_token,
                        op.weighting == Route::Weighting::kSoftmaxAll, chosen_.as<int32_t>(),
                        chosen_weight_.as<float>(), stream_.get());
}

void CudaExecutor::experts_add(const Experts& op) {
  const int64_t k = spec_.experts_per_token, pairs = rows_ * k;
  expert_linear(op.gate, normed_, k, gate_, spec_.expert_ffn, spec_.hidden);
  expert_linear(op.up, normed_, k, up_, spec_.expert_ffn, spec_.hidden);
  const Activation activation{op.activation == Experts::Activation::kClampedSwiglu, op.alpha, op.limit};
  launch_activate(activation, pairs * spec_.expert_ffn, gate_.as<float>(), up_.as<float>(), stream_.get());
  expert_linear(op.down, gate_, 1, down_, spec_.hidden, spec_.expert_ffn);
  launch_combine_experts(down_.as<float>(), chosen_weight_.as<float>(), rows_, spec_.experts_per_token,
                         spec_.hidden, residual_.as<float>(), stream_.get());
}

void CudaExecutor::norm_logits(const Logits& op) {
  launch_rmsnorm(residual_.as<float>(), in_batch(batch_->logit_rows()), vector_of(op.norm.weight),
                 op.norm.eps, logit_rows_, spec_.hidden, normed_logit_rows_.as<float>(), stream_.get());
  linear(op.output, normed_logit_rows_, logit_rows_, false, logits_, spec_.vocab, spec_.hidden);
}

std::span<const float> CudaExecutor::logits() {
  const size_t count = static_cast<size_t>(logit_rows_) * static_cast<size_t>(spec_.vocab);
  if (count > 0) {
    copy(logits_host_.as<void>(), logits_.as<void>(), count * sizeof(float), cudaMemcpyDeviceToHost);
    stream_.synchronize();
  }
  return {logits_host_.as<const float>(), count};
}

// ---------------------------------------------------------------- parts of operations

void CudaExecutor::norm_rows(const Norm& op) {
  launch_rmsnorm(residual_.as<float>(), nullptr, vector_of(op.weight), op.eps, rows_, spec_.hidden,
                 normed_.as<float>(), stream_.get());
}

void CudaExecutor::norm_heads(const Norm& op, int32_t heads, const DeviceBuffer& values) {
  launch_rmsnorm(values.as<float>(), nullptr, vector_of(op.weight), op.eps, rows_ * heads, spec_.head_dim,
                 values.as<float>(), stream_.get());
}

void CudaExecutor::linear(const Linear& op, const DeviceBuffer& x, int64_t count, bool add,
                          const DeviceBuffer& y, int64_t expected_rows, int64_t expected_cols) {
  MILLRACE_CHECK(op.weight->rows == expected_rows && op.weight->cols == expected_cols);
  launch_linear(own(*op.weight).matrix, vector_of(op.bias), x.as<float>(), count, add, y.as<float>(),
                stream_.get());
}

void CudaExecutor::expert_linear(const Linear& op, const DeviceBuffer& x, int64_t pairs_per_x_row,
                                 const DeviceBuffer& y, int64_t expected_rows, int64_t expected_cols) {
  MILLRACE_CHECK(op.weight->rows == expected_rows && op.weight->cols == expected_cols);
  MILLRACE_CHECK(op.weight->experts == spec_.experts);
  launch_expert_linear(own(*op.weight).matrix, vector_of(op.bias), x.as<float>(), pairs_per_x_row,
                       chosen_.as<int32_t>(), rows_ * spec_.experts_per_token, y.as<float>(), stream_.get());
}

const float* CudaExecutor::inv_freq_on_device(std::span<const float> values) {
  for (const AngleTable& table : angle_tables_) {
    if (std::equal(table.values.begin(), table.values.end(), values.begin(), values.end())) {
      return table.device.as<const float>();
    }
  }
  AngleTable& table = angle_tables_.emplace_back();
  table.values.assign(values.begin(), values.end());
  table.device = DeviceBuffer(values.size_bytes(), "the rotary angles");
  if (!values.empty()) {
    copy(table.device.as<void>(), table.values.data(), values.size_bytes(), cudaMemcpyHostToDevice);
    stream_.synchronize();
  }
  return table.device.as<const float>();
}

void CudaExecutor::copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  MILLRACE_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, kind, stream_.get()));
}

// ---------------------------------------------------------------- slots

CudaExecutor::SlotPlace CudaExecutor::place_of(Slot slot) const {
  const int64_t query_cols = static_cast<int64_t>(spec_.heads) * spec_.head_dim;
  const int64_t key_cols = static_cast<int64_t>(spec_.kv_heads) * spec_.head_dim;
  switch (slot) {
    case Slot::kResidual:
      return {residual_, rows_, spec_.hidden};
    case Slot::kQuery:
      return {query_, rows_, query_cols};
    case Slot::kKey:
      return {key_, rows_, key_cols};
    case Slot::kValue:
      return {value_, rows_, key_cols};
    case Slot::kAttention:
      return {attention_, rows_, query_cols};
    case Slot::kLogits:
      break;
  }
  return {logits_, logit_rows_, spec_.vocab};
}

std::span<std::byte> CudaExecutor::block_bytes(int group, int32_t block) const {
  const size_t bytes = spec_.kv_block_bytes(group);
  MILLRACE_CHECK(block >= 0 && block < spec_.kv_groups[static_cast<size_t>(group)].num_blocks);
  return {pools_[static_cast<size_t>(group)].as<std::byte>() + static_cast<size_t>(block) * bytes, bytes};
}

void CudaExecutor::read_block(int group, int32_t block, std::span<std::byte> to) {
  const std::span<std::byte> from = block_bytes(group, block);
  MILLRACE_CHECK(to.size() == from.size());
  copy(to.data(), from.data(), to.size(), cudaMemcpyDeviceToHost);
  stream_.synchronize();
}

void CudaExecutor::write_block(int group, int32_t block, std::span<const std::byte> from) {
  const std::span<std::byte> to = block_bytes(group, block);
  MILLRACE_CHECK(to.size() == from.size());
  copy(to.data(), from.data(), to.size(), cudaMemcpyHostToDevice);
  stream_.synchronize();
}

void CudaExecutor::copy_block(int group, int32_t from, int32_t to) {
  const std::span<std::byte> source = block_bytes(group, from);
  copy(block_bytes(group, to).data(), source.data(), source.size(), cudaMemcpyDeviceToDevice);
}

std::vector<float> CudaExecutor::read_slot(Slot slot) {
  const SlotPlace place = place_of(slot);
  std::vector<float> values(static_cast<size_t>(place.rows * place.cols));
  if (!values.empty()) {
    copy(values.data(), place.buffer.as<void>(), values.size() * sizeof(float), cudaMemcpyDeviceToHost);
    stream_.synchronize();
  }
  return values;
}

void CudaExecutor::write_slot(Slot slot, std::span<const float> values) {
  const SlotPlace place = place_of(slot);
  MILLRACE_CHECK(values.size_bytes() <= place.buffer.bytes());
  if (values.empty()) return;
  copy(place.buffer.as<void>(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice);
  stream_.synchronize();
}

}  // namespace

size_t executor_workspace_bytes(const ExecutorSpec& spec) {
  return WorkspaceShape(spec).total() * sizeof(float);
}

std::unique_ptr<Executor> make_cuda_executor(const ExecutorSpec& spec) {
  return std::make_unique<CudaExecutor>(spec);
}

}  // namespace millrace::cuda
