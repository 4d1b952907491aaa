// Paged attention on a CPU behind the C API: the plan, the batch's block tables and scratch lie in the
// caller's workspace.
#include <algorithm>

#include "base/paging.h"
#include "kernels/api/cpu_device.h"
#include "kernels/cpu/attention/paged_attention.h"
#include "kernels/cpu/attention/rope_append_kv.h"
#include "kernels/quant/kv_types.h"

namespace millrace::api {
namespace {

cpu::AttentionShape shape_of(const mr_attention_config& config) {
  return {config.heads, config.kv_heads, config.head_dim, config.max_rows, config.max_context};
}

struct CpuAttentionMemory {
  CpuAttentionMemory(const mr_attention_config& config, int threads, cpu::Arena& arena)
      : plan(shape_of(config), threads, arena) {
    const int64_t max_blocks = blocks_for(config.max_context);
    sequences = arena.take<cpu::AttentionSequence>(config.max_sequences);
    tables = arena.take<const int32_t*>(config.max_sequences);
    table_entries = arena.take<int32_t>(product(config.max_sequences, max_blocks, "block tables"));
    const int64_t angles = product(config.max_rows, config.head_dim / 2, "rotary angles");
    cosines = arena.take<float>(angles);
    sines = arena.take<float>(angles);
    if (config.kv_type == MR_Q8_0) {
      query_blocks = arena.take<ActivationBlock>(
          product(config.max_rows, int64_t{config.heads} * config.head_dim, "queries") / cpu::kQuantBlock);
    }
  }
  using ActivationBlock = cpu::ActivationBlock;

  cpu::AttentionPlan plan;
  cpu::AttentionSequence* sequences;        // [max_sequences]
  const int32_t** tables;                   // [max_sequences]
  int32_t* table_entries;                   // [max_sequences][blocks of max_context]
  float *cosines, *sines;                   // [max_rows][head_dim / 2]
  ActivationBlock* query_blocks = nullptr;  // of an int8 cache: [max_rows][heads * head_dim / 32]
};

class CpuAttention final : public mr_attention {
 public:
  CpuAttention(const mr_attention_config& of, const cpu::KernelTable& kernels, ThreadPool& pool,
               cpu::Arena arena)
      : mr_attention(of), ctx_{kernels, pool}, memory_(of, pool.size(), arena) {}

  void plan(const mr_batch& batch, mr_stream) override {
    const int64_t max_blocks = blocks_for(config.max_context);
    for (int32_t s = 0; s < batch.num_sequences; ++s) {
      const int32_t first = batch.row_starts[s], rows = batch.row_starts[s + 1] - first;
      const int32_t context = batch.context_lengths[s];
      memory_.sequences[s] = {first, rows, context};
      int32_t* table = memory_.table_entries + s * max_blocks;
      std::copy_n(batch.block_tables + s * batch.table_stride, blocks_for(int64_t{context} + rows), table);
      memory_.tables[s] = table;
    }
    memory_.plan.begin_step({memory_.sequences, static_cast<size_t>(batch.num_sequences)});
  }

  void append(const mr_kv_cache& cache, const mr_rotary* rotary, float* query, float* key, const float* value,
              mr_stream) override {
    for (const cpu::AttentionSequence& s : memory_.plan.sequences()) {
      if (s.num_tokens > 0) check_blocks(cache, s, s.context_len);
    }
    cpu::RopeAppendKv op{};
    op.rows = memory_.plan.rows();
    op.heads = config.heads;
    op.kv_heads = config.kv_heads;
    op.head_dim = config.head_dim;
    op.positions = memory_.plan.positions();
    op.sequence_of = memory_.plan.sequence_of();
    op.cosines = memory_.cosines;
    op.sines = memory_.sines;
    op.query = query;
    op.key = key;
    op.value = value;
    op.kv = kv_of(cache);
    if (rotary != nullptr) {
      op.half = rotary->num_freqs;
      op.interleaved = rotary->interleaved != 0;
      cpu::rotary_angles(
          ctx_, {{rotary->inv_freq, static_cast<size_t>(op.half)}, rotary->magnitude, op.interleaved},
          op.positions, op.rows, memory_.cosines, memory_.sines);
    }
    cpu::rope_append_kv(ctx_, op);
  }

  void run(const mr_kv_cache& cache, const mr_attention_args& args, const float* query, float* out,
           mr_stream) override {
    for (const cpu::AttentionSequence& s : memory_.plan.sequences()) {
      const int32_t behind = args.window > 0 ? std::max(0, s.context_len - args.window + 1) : 0;
      if (s.num_tokens > 0) check_blocks(cache, s, behind);
    }
    if (config.kv_type == MR_Q8_0) {
      cpu::quantize_queries(ctx_, memory_.plan, query, memory_.query_blocks);
    }
    cpu::paged_attention(
        ctx_, memory_.plan,
        {query, memory_.query_blocks, out, kv_of(cache), {.window = args.window}, args.scale, args.sinks});
  }

 private:
  // Blocks of the positions from `first` to the sequence's end.
  void check_blocks(const mr_kv_cache& cache, const cpu::AttentionSequence& s, int32_t first) const {
    const auto index = static_cast<int64_t>(&s - memory_.plan.sequences().data());
    const int32_t last = blocks_for(int64_t{s.context_len} + s.num_tokens);
    for (int32_t b = first / kBlockTokens; b < last; ++b) {
      const int32_t block = memory_.tables[index][b];
      if (block < 0 || block >= cache.num_blocks) {
        throw_error(ErrorCode::kBadInput, "block_tables: entry {} of sequence {} is {}, expected 0 to {}", b,
                    index, block, cache.num_blocks - 1);
      }
    }
  }

  cpu::PagedKv kv_of(const mr_kv_cache& cache) const {
    cpu::PagedKv kv;
    kv.type = static_cast<DType>(config.kv_type);
    kv.pool = static_cast<uint8_t*>(cache.blocks);
    kv.num_blocks = cache.num_blocks;
    kv.block_bytes = cache.block_stride_bytes;
    kv.head_bytes = kBlockTokens * static_cast<int64_t>(kv_head_bytes(kv.type, config.head_dim));
    kv.value_offset = config.kv_heads * kv.head_bytes;
    kv.tables = memory_.tables;
    return kv;
  }

  cpu::Context ctx_;
  CpuAttentionMemory memory_;
};

}  // namespace

std::unique_ptr<mr_attention> make_cpu_attention(const mr_attention_config& config,
                                                 const cpu::KernelTable& kernels, ThreadPool& pool,
                                                 void* workspace) {
  return std::make_unique<CpuAttention>(config, kernels, pool, cpu::Arena(static_cast<uint8_t*>(workspace)));
}

size_t cpu_attention_workspace_bytes(const mr_attention_config& config, int threads) {
  cpu::Arena count(nullptr);
  const CpuAttentionMemory layout(config, threads, count);
  return count.used();
}

}  // namespace millrace::api
