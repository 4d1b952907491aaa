// The C functions of millrace/kernels/attention.h: what is checked on every device.
#include "millrace/kernels/attention.h"

#include <cmath>

#include "base/paging.h"
#include "kernels/api/mr_device.h"

namespace millrace::api {
namespace {

constexpr int32_t kMaxHeadCount = 1 << 16, kMaxHeadDim = 1 << 12;

void check_config(const mr_attention_config* config) {
  static_assert(MR_KV_BLOCK_TOKENS == kBlockTokens);
  require_pointer(config, "config");
  require_range(config->kv_heads, 1, kMaxHeadCount, "kv_heads");
  require_range(config->heads, config->kv_heads, kMaxHeadCount, "heads");
  require_range(config->head_dim, 1, kMaxHeadDim, "head_dim");
  require_range(config->max_rows, 1, INT32_MAX, "max_rows");
  require_range(config->max_sequences, 1, INT32_MAX, "max_sequences");
  require_range(config->max_context, 1, INT32_MAX - kBlockTokens, "max_context");
  if (config->heads % config->kv_heads != 0) {
    throw_error(ErrorCode::kBadInput, "heads is {}, expected a multiple of the {} KV heads", config->heads,
                config->kv_heads);
  }
  dtype_of(config->kv_type, "kv_type");
}

void check_batch(const mr_batch* batch, const mr_attention_config& config) {
  require_pointer(batch, "batch");
  require_range(batch->num_sequences, 0, config.max_sequences, "num_sequences");
  if (batch->num_sequences == 0) return;
  require_aligned(batch->row_starts, alignof(int32_t), "row_starts");
  require_aligned(batch->context_lengths, alignof(int32_t), "context_lengths");
  require_aligned(batch->block_tables, alignof(int32_t), "block_tables");
  require_range(batch->row_starts[0], 0, 0, "row_starts[0]");
  for (int32_t s = 0; s < batch->num_sequences; ++s) {
    const int32_t begin = batch->row_starts[s], end = batch->row_starts[s + 1];
    if (end < begin || end > config.max_rows) {
      throw_error(ErrorCode::kBadInput, "row_starts[{}] is {}, expected {} to max_rows, {}", s + 1, end,
                  begin, config.max_rows);
    }
    const int64_t context = batch->context_lengths[s], length = context + end - begin;
    if (context < 0 || length > config.max_context) {
      throw_error(ErrorCode::kBadInput,
                  "sequence {} has {} tokens before {} new ones, expected at most {} (max_context) in all", s,
                  context, end - begin, config.max_context);
    }
    const int32_t blocks = blocks_for(length);
    require_range(batch->table_stride, 0, kMaxElements, "table_stride");
    if (batch->table_stride < blocks) {
      throw_error(ErrorCode::kBadInput, "table_stride is {}, expected at least the {} blocks of sequence {}",
                  batch->table_stride, blocks, s);
    }
  }
}

mr_kv_cache checked_cache(const mr_kv_cache* cache, const mr_attention& attention) {
  require_pointer(cache, "cache");
  require_aligned(cache->blocks, kWorkspaceAlignment, "cache.blocks");
  require_range(cache->num_blocks, 1, INT32_MAX, "cache.num_blocks");
  mr_kv_cache checked = *cache;
  const auto block_bytes = static_cast<int64_t>(attention.block_bytes);
  checked.block_stride_bytes = stride_or(cache->block_stride_bytes, block_bytes, "cache.block_stride_bytes");
  if (checked.block_stride_bytes % 16 != 0) {
    throw_error(ErrorCode::kBadInput, "cache.block_stride_bytes is {}, expected a multiple of 16",
                checked.block_stride_bytes);
  }
  return checked;
}

void check_planned(const mr_attention* attention) {
  require_pointer(attention, "attention");
  if (!attention->planned) throw_error(ErrorCode::kBadInput, "mr_attention_plan has not been called");
}

void check_rotary(const mr_rotary* rotary, int32_t head_dim) {
  require_range(rotary->num_freqs, 0, head_dim / 2, "rotary.num_freqs");
  if (rotary->num_freqs > 0) require_aligned(rotary->inv_freq, alignof(float), "rotary.inv_freq");
  require_finite(rotary->magnitude, "rotary.magnitude");
  require_range(rotary->interleaved, 0, 1, "rotary.interleaved");
}

}  // namespace
}  // namespace millrace::api

namespace api = millrace::api;

extern "C" {

mr_status mr_kv_block_bytes(const mr_device* device, const mr_attention_config* config, size_t* bytes) {
  return api::tell_bytes(device, bytes, [&](const mr_device& on) {
    api::check_config(config);
    return on.kv_block_bytes(*config);
  });
}

mr_status mr_attention_workspace_bytes(const mr_device* device, const mr_attention_config* config,
                                       size_t* bytes) {
  return api::tell_bytes(device, bytes, [&](const mr_device& on) {
    api::check_config(config);
    return on.attention_workspace_bytes(*config);
  });
}

mr_status mr_attention_create(mr_device* device, const mr_attention_config* config, void* workspace,
                              size_t workspace_bytes, mr_attention** attention) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(attention, "attention");
    *attention = nullptr;
    api::check_config(config);
    api::require_workspace(workspace, workspace_bytes, device->attention_workspace_bytes(*config));
    auto made = device->make_attention(*config, workspace);
    made->block_bytes = device->kv_block_bytes(*config);
    *attention = made.release();
  });
}

void mr_attention_destroy(mr_attention* attention) { delete attention; }

mr_status mr_attention_plan(mr_attention* attention, const mr_batch* batch, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(attention, "attention");
    attention->planned = false;
    api::check_batch(batch, attention->config);
    attention->plan(*batch, stream);
    attention->planned = true;
  });
}

mr_status mr_attention_append(mr_attention* attention, const mr_kv_cache* cache, const mr_rotary* rotary,
                              float* query, float* key, const float* value, mr_stream stream) {
  return api::guarded([&] {
    api::check_planned(attention);
    const mr_kv_cache checked = api::checked_cache(cache, *attention);
    if (rotary != nullptr) {
      api::check_rotary(rotary, attention->config.head_dim);
      api::require_aligned(query, alignof(float), "query");
    }
    api::require_aligned(key, alignof(float), "key");
    api::require_aligned(value, alignof(float), "value");
    attention->append(checked, rotary, query, key, value, stream);
  });
}

mr_status mr_attention_run(mr_attention* attention, const mr_kv_cache* cache, const mr_attention_args* args,
                           const float* query, float* out, mr_stream stream) {
  return api::guarded([&] {
    api::check_planned(attention);
    const mr_kv_cache checked = api::checked_cache(cache, *attention);
    api::require_pointer(args, "args");
    api::require_range(args->window, 0, INT32_MAX, "args.window");
    api::require_finite(args->scale, "args.scale");
    api::allow_aligned(args->sinks, alignof(float), "args.sinks");
    api::require_aligned(query, 16, "query");
    api::require_aligned(out, 16, "out");
    mr_attention_args checked_args = *args;
    if (args->scale == 0.0f) {
      checked_args.scale = 1.0f / std::sqrt(static_cast<float>(attention->config.head_dim));
    }
    attention->run(checked, checked_args, query, out, stream);
  });
}

mr_status mr_rotary_apply(mr_device* device, const mr_rotary* rotary, const int32_t* positions, int64_t rows,
                          int32_t heads, int32_t head_dim, float* x, int64_t row_stride, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(rotary, "rotary");
    api::require_range(rows, 0, api::kMaxElements, "rows");
    api::require_range(heads, 1, api::kMaxHeadCount, "heads");
    api::require_range(head_dim, 1, api::kMaxHeadDim, "head_dim");
    api::check_rotary(rotary, head_dim);
    const int64_t cols = int64_t{heads} * head_dim, stride = api::stride_or(row_stride, cols, "row_stride");
    api::product(rows, stride, "rows of x");
    if (rows == 0) return;
    api::require_aligned(positions, alignof(int32_t), "positions");
    api::require_aligned(x, alignof(float), "x");
    device->rotary_apply(*rotary, positions, rows, heads, head_dim, x, stride, stream);
  });
}

}  // extern "C"
