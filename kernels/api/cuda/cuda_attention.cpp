// Paged attention of the C API on a GPU: a plan is the batch's arrays in the caller's workspace, copied there
// in order on the stream; each layer then launches what the executor of an engine launches.
#include <algorithm>
#include <vector>

#include "base/paging.h"
#include "kernels/api/cuda/cuda_device.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/key_tiles.h"
#include "kernels/cuda/attention/split_plan.h"

namespace millrace::api::gpu {
namespace {

DType kv_type_of(const mr_attention_config& config) { return static_cast<DType>(config.kv_type); }

// Elements of a head of a token; those of fp8 are bytes, with a scale.
int64_t head_elements(const mr_attention_config& config) {
  return config.head_dim + (kv_type_of(config) == DType::kF8E4M3 ? 1 : 0);
}

bool on_tensor_cores(const mr_attention_config& config, const cuda::Device& device) {
  return cuda::supports_paged_attention(kv_type_of(config), config.heads, config.kv_heads, config.head_dim,
                                        device);
}

// int32s of the largest batch: positions, sequences of rows, where tables begin, tables, chunks.
int64_t batch_ints(const mr_attention_config& config) {
  const int64_t tables = product(config.max_sequences, blocks_for(config.max_context), "block tables");
  const int64_t chunk =
      std::max(1, cuda::prefill_chunk_tokens(config.heads, config.kv_heads, config.head_dim));
  const int64_t chunks = config.max_rows / chunk + std::min(config.max_rows, config.max_sequences);
  return 2 * int64_t{config.max_rows} + config.max_sequences + tables + 4 * (chunks + 1);
}

struct AttentionMemory {
  AttentionMemory(DeviceArena& arena, const mr_attention_config& config, const cuda::Device& device) {
    const auto rows = static_cast<size_t>(config.max_rows);
    batch = arena.take<int32_t>(static_cast<size_t>(batch_ints(config)));
    angles = arena.take<float2>(rows * static_cast<size_t>(config.head_dim / 2));
    if (!on_tensor_cores(config, device)) return;
    partial_bytes =
        cuda::partial_bytes_for(config.max_rows, config.max_context, config.kv_heads, config.head_dim);
    partial = arena.take<float>(partial_bytes / sizeof(float));
    arrived_count = rows * static_cast<size_t>(config.kv_heads);
    arrived = arena.take<int32_t>(arrived_count);
  }
  int32_t* batch;
  float2* angles;  // [rows][num_freqs]
  float* partial = nullptr;
  int32_t* arrived = nullptr;
  size_t partial_bytes = 0, arrived_count = 0;
};

class CudaAttention final : public mr_attention {
 public:
  CudaAttention(const mr_attention_config& of, const cuda::Device& device, DeviceArena arena)
      : mr_attention(of),
        device_(device),
        tensor_cores_(on_tensor_cores(of, device)),
        memory_(arena, of, device) {}

  void plan(const mr_batch& batch, mr_stream stream) override {
    device_.use();
    rows_ = batch.num_sequences == 0 ? 0 : batch.row_starts[batch.num_sequences];
    sequences_.clear();
    ints_.clear();
    last_position_ = -1;
    fill(batch);
    if (!zeroed_ && memory_.arrived_count > 0) {
      MILLRACE_CUDA_TRY(cudaMemsetAsync(memory_.arrived, 0, memory_.arrived_count * sizeof(int32_t), stream));
    }
    zeroed_ = true;
    if (ints_.empty()) return;
    // Of pageable memory: it is read before this returns.
    MILLRACE_CUDA_TRY(cudaMemcpyAsync(memory_.batch, ints_.data(), ints_.size() * sizeof(int32_t),
                                      cudaMemcpyHostToDevice, stream));
  }

  void append(const mr_kv_cache& cache, const mr_rotary* rotary, float* query, float* key, const float* value,
              mr_stream stream) override {
    if (rows_ == 0) return;
    for (const PlannedSequence& s : sequences_) check_blocks(cache, s, s.context);
    device_.use();
    const cuda::Launch at{device_, stream};
    cuda::RopeParams rope{nullptr, 0, 1.0f, false};
    if (rotary != nullptr) {
      rope = {rotary->inv_freq, rotary->num_freqs, rotary->magnitude, rotary->interleaved != 0};
      cuda::launch_angles(memory_.batch, rows_, rope, memory_.angles, at);
    }
    cuda::launch_rope_append_kv(cache_of(cache), rope, memory_.angles, rows_, query, key, value, at);
  }

  void run(const mr_kv_cache& cache, const mr_attention_args& args, const float* query, float* out,
           mr_stream stream) override {
    if (rows_ == 0) return;
    for (const PlannedSequence& s : sequences_) {
      check_blocks(cache, s, args.window > 0 ? std::max(0, s.context - args.window + 1) : 0);
    }
    device_.use();
    const cuda::Launch at{device_, stream};
    const cuda::AttentionParams params{args.window, args.scale, args.sinks};
    if (!tensor_cores_) {
      return cuda::launch_attention(cache_of(cache), params, rows_, query, out, at);
    }
    cuda::PagedAttention op;
    op.cache = cache_of(cache);
    op.op = params;
    op.rows = static_cast<int32_t>(rows_);
    op.max_splits = cuda::max_splits_for(last_position_, args.window);
    op.query = query;
    op.out = out;
    if (cuda::splits_in_parallel(rows_, config.kv_heads, config.head_dim, op.max_splits, args.window,
                                 memory_.partial_bytes, device_)) {
      op.partial = memory_.partial;
    }
    op.arrived = memory_.arrived;
    if (device_.has_wgmma() && rows_ >= cuda::kMinPrefillRows) {
      op.chunks = memory_.batch + chunks_at_;
      op.num_chunks = num_chunks_;
    }
    cuda::launch_paged_attention(op, at);
  }

 private:
  struct PlannedSequence {
    int32_t first_row, rows, context;
    size_t table;  // where its blocks begin in ints_
  };

  // [rows] positions | [rows] sequence | [sequences] table starts | tables | chunks, aligned to four
  void fill(const mr_batch& batch) {
    const auto rows = static_cast<size_t>(rows_);
    const auto count = static_cast<size_t>(batch.num_sequences);
    ints_.resize(2 * rows + count);
    for (int32_t s = 0; s < batch.num_sequences; ++s) {
      const int32_t first = batch.row_starts[s], num_rows = batch.row_starts[s + 1] - first;
      const int32_t context = batch.context_lengths[s];
      ints_[2 * rows + static_cast<size_t>(s)] = static_cast<int32_t>(ints_.size());
      if (num_rows == 0) continue;
      for (int32_t i = 0; i < num_rows; ++i) {
        ints_[static_cast<size_t>(first + i)] = context + i;
        ints_[rows + static_cast<size_t>(first + i)] = s;
      }
      sequences_.push_back({first, num_rows, context, ints_.size()});
      last_position_ = std::max(last_position_, context + num_rows - 1);
      const int32_t* table = batch.block_tables + s * batch.table_stride;
      ints_.insert(ints_.end(), table, table + blocks_for(int64_t{context} + num_rows));
    }
    add_chunks();
  }

  // Rows of one sequence that a CTA of the prefill kernel takes, those that see the most first.
  void add_chunks() {
    num_chunks_ = 0;
    chunks_at_ = (ints_.size() + 3) / 4 * 4;
    if (!tensor_cores_ || rows_ < cuda::kMinPrefillRows) return;
    const int32_t tokens = cuda::prefill_chunk_tokens(config.heads, config.kv_heads, config.head_dim);
    struct Chunk {
      int32_t row, rows, position, sequence;
    };
    std::vector<Chunk> chunks;
    for (const PlannedSequence& s : sequences_) {
      const int32_t index = ints_[static_cast<size_t>(rows_ + s.first_row)];
      for (int32_t i = 0; i < s.rows; i += tokens) {
        chunks.push_back({s.first_row + i, std::min(tokens, s.rows - i), s.context + i, index});
      }
    }
    std::stable_sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) {
      return a.position + a.rows > b.position + b.rows;
    });
    ints_.resize(chunks_at_);
    for (const Chunk& c : chunks) ints_.insert(ints_.end(), {c.row, c.rows, c.position, c.sequence});
    num_chunks_ = static_cast<int32_t>(chunks.size());
  }

  // Blocks of the positions from `first` to the sequence's end.
  void check_blocks(const mr_kv_cache& cache, const PlannedSequence& s, int32_t first) const {
    const int32_t last = blocks_for(int64_t{s.context} + s.rows);
    for (int32_t b = first / kBlockTokens; b < last; ++b) {
      const int32_t block = ints_[s.table + static_cast<size_t>(b)];
      if (block < 0 || block >= cache.num_blocks) {
        throw_error(ErrorCode::kBadInput,
                    "block_tables: entry {} of the sequence at row {} is {}, expected 0 to {}", b,
                    s.first_row, block, cache.num_blocks - 1);
      }
    }
  }

  cuda::LayerCache cache_of(const mr_kv_cache& from) const {
    cuda::LayerCache cache;
    cache.pool = from.blocks;
    cache.type = kv_type_of(config);
    cache.block_elements = from.block_stride_bytes / static_cast<int64_t>(bytes_of(cache.type, 1));
    cache.positions = memory_.batch;
    cache.sequence_of = memory_.batch + rows_;
    cache.table_starts = memory_.batch + 2 * rows_;
    cache.tables = memory_.batch;
    cache.heads = config.heads;
    cache.kv_heads = config.kv_heads;
    cache.head_dim = config.head_dim;
    cache.order = tensor_cores_ ? cuda::CacheOrder::kSwizzled : cuda::CacheOrder::kRows;
    return cache;
  }

  const cuda::Device& device_;
  const bool tensor_cores_;
  AttentionMemory memory_;
  bool zeroed_ = false;
  // Of the plan.
  int64_t rows_ = 0;
  int32_t last_position_ = -1;
  size_t chunks_at_ = 0;
  int32_t num_chunks_ = 0;
  std::vector<PlannedSequence> sequences_;  // those with rows
  std::vector<int32_t> ints_;               // what lies at memory_.batch
};

}  // namespace

size_t cuda_kv_block_bytes(const mr_attention_config& config) {
  const DType type = kv_type_of(config);
  if (type != DType::kF32 && type != DType::kF16 && type != DType::kBF16 && type != DType::kF8E4M3) {
    throw_error(ErrorCode::kUnsupported, "kv_type is {}, a GPU has f32, f16, bf16 and f8_e4m3",
                info(type).name);
  }
  const auto elements = static_cast<size_t>(2 * config.kv_heads * kBlockTokens * head_elements(config));
  return (elements * bytes_of(type, 1) + 15) / 16 * 16;
}

size_t cuda_attention_workspace_bytes(const mr_attention_config& config, const cuda::Device& device) {
  cuda_kv_block_bytes(config);  // throws for types it has no kernels for
  DeviceArena count(nullptr);
  const AttentionMemory memory(count, config, device);
  return count.used();
}

std::unique_ptr<mr_attention> make_cuda_attention(const mr_attention_config& config,
                                                  const cuda::Device& device, void* workspace) {
  return std::make_unique<CudaAttention>(config, device, DeviceArena(workspace));
}

}  // namespace millrace::api::gpu
