// The C functions of millrace/kernels/linear_attention.h: what is checked on every device.
#include "millrace/kernels/linear_attention.h"

#include <cmath>

#include "base/state_block.h"
#include "kernels/api/mr_device.h"

namespace millrace::api {
namespace {

constexpr int64_t kMaxSequences = 1 << 24, kMaxLinearHeads = 1 << 16, kMaxLinearDim = 1 << 14;

// Whether there may be a token: what a GPU's memory says is not looked at.
bool check_sequences(const mr_device& device, const int32_t* cu_seqlens, int32_t sequences,
                     int32_t most_tokens) {
  require_range(sequences, 0, kMaxSequences, "args.sequences");
  require_range(most_tokens, 0, INT32_MAX, "args.most_tokens");
  if (sequences == 0) return false;
  require_aligned(cu_seqlens, 4, "args.cu_seqlens");
  if (!device.has_host_memory()) return true;
  if (cu_seqlens[0] != 0)
    throw_error(ErrorCode::kBadInput, "args.cu_seqlens[0] is {}, expected 0", cu_seqlens[0]);
  for (int32_t s = 0; s < sequences; ++s) {
    if (cu_seqlens[s + 1] < cu_seqlens[s])
      throw_error(ErrorCode::kBadInput, "args.cu_seqlens[{}] is {}, expected at least {}, the one before it",
                  s + 1, cu_seqlens[s + 1], cu_seqlens[s]);
    if (most_tokens > 0 && cu_seqlens[s + 1] - cu_seqlens[s] > most_tokens)
      throw_error(ErrorCode::kBadInput, "sequence {} has {} tokens, expected at most {}, args.most_tokens", s,
                  cu_seqlens[s + 1] - cu_seqlens[s], most_tokens);
  }
  return cu_seqlens[sequences] > 0;
}

void require_floats(const float* data, const char* name) { require_aligned(data, 4, name); }
void allow_floats(const float* data, const char* name) {
  if (data != nullptr) require_aligned(data, 4, name);
}

void check_heads(int32_t keys, int32_t heads, const char* keys_name, const char* heads_name) {
  require_range(keys, 1, kMaxLinearHeads, keys_name);
  require_range(heads, 1, kMaxLinearHeads, heads_name);
  if (heads % keys != 0)
    throw_error(ErrorCode::kBadInput, "{} is {}, expected a multiple of {}, {}", heads_name, heads, keys_name,
                keys);
}

mr_gated_delta_args checked_delta(const mr_device& device, const mr_gated_delta_args* given, bool pointers) {
  require_pointer(given, "args");
  mr_gated_delta_args args = *given;
  check_heads(args.key_heads, args.value_heads, "args.key_heads", "args.value_heads");
  require_range(args.key_dim, 1, kMaxLinearDim, "args.key_dim");
  require_range(args.value_dim, 1, kMaxLinearDim, "args.value_dim");
  if (!std::isfinite(args.scale)) throw_error(ErrorCode::kBadInput, "args.scale is not finite");
  if (args.scale == 0.0f) args.scale = 1.0f / std::sqrt(static_cast<float>(args.key_dim));
  if (!pointers) return args;
  if (check_sequences(device, args.cu_seqlens, args.sequences, args.most_tokens)) {
    require_floats(args.q, "args.q");
    require_floats(args.k, "args.k");
    require_floats(args.v, "args.v");
    require_floats(args.out, "args.out");
  }
  allow_floats(args.g, "args.g");
  allow_floats(args.beta, "args.beta");
  allow_floats(args.initial_state, "args.initial_state");
  allow_floats(args.final_state, "args.final_state");
  return args;
}

mr_selective_scan_args checked_scan(const mr_device& device, const mr_selective_scan_args* given,
                                    bool pointers) {
  require_pointer(given, "args");
  const mr_selective_scan_args args = *given;
  check_heads(args.groups, args.heads, "args.groups", "args.heads");
  require_range(args.state_dim, 1, kMaxLinearDim, "args.state_dim");
  require_range(args.head_dim, 1, kMaxLinearDim, "args.head_dim");
  if (!pointers) return args;
  if (check_sequences(device, args.cu_seqlens, args.sequences, args.most_tokens)) {
    require_floats(args.x, "args.x");
    require_floats(args.dt, "args.dt");
    require_floats(args.a, "args.a");
    require_floats(args.b, "args.b");
    require_floats(args.c, "args.c");
    require_floats(args.out, "args.out");
  }
  allow_floats(args.d, "args.d");
  allow_floats(args.initial_state, "args.initial_state");
  allow_floats(args.final_state, "args.final_state");
  return args;
}

mr_short_conv_args checked_conv(const mr_device& device, const mr_short_conv_args* given) {
  require_pointer(given, "args");
  const mr_short_conv_args args = *given;
  require_range(args.channels, 1, INT32_MAX, "args.channels");
  require_range(args.taps, 1, kMaxTaps, "args.taps");
  require_range(args.silu, 0, 1, "args.silu");
  if (check_sequences(device, args.cu_seqlens, args.sequences, args.most_tokens)) {
    require_floats(args.x, "args.x");
    require_floats(args.weight, "args.weight");
    require_floats(args.out, "args.out");
  }
  allow_floats(args.bias, "args.bias");
  allow_floats(args.initial_rows, "args.initial_rows");
  allow_floats(args.final_rows, "args.final_rows");
  return args;
}

}  // namespace
}  // namespace millrace::api

using namespace millrace;

mr_status mr_gated_delta_workspace_bytes(mr_device* device, const mr_gated_delta_args* args, size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(bytes, "bytes");
    const mr_gated_delta_args checked = api::checked_delta(*device, args, false);
    *bytes = device->linear_attention_workspace_bytes(checked.key_dim, checked.value_dim);
  });
}

mr_status mr_chunk_gated_delta_rule(mr_device* device, const mr_gated_delta_args* args, void* workspace,
                                    size_t workspace_bytes, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_gated_delta_args checked = api::checked_delta(*device, args, true);
    api::require_workspace(workspace, workspace_bytes,
                           device->linear_attention_workspace_bytes(checked.key_dim, checked.value_dim));
    if (checked.sequences > 0) device->gated_delta(checked, workspace, stream);
  });
}

mr_status mr_selective_scan_workspace_bytes(mr_device* device, const mr_selective_scan_args* args,
                                            size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(bytes, "bytes");
    const mr_selective_scan_args checked = api::checked_scan(*device, args, false);
    *bytes = device->linear_attention_workspace_bytes(checked.state_dim, checked.head_dim);
  });
}

mr_status mr_selective_scan(mr_device* device, const mr_selective_scan_args* args, void* workspace,
                            size_t workspace_bytes, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_selective_scan_args checked = api::checked_scan(*device, args, true);
    api::require_workspace(workspace, workspace_bytes,
                           device->linear_attention_workspace_bytes(checked.state_dim, checked.head_dim));
    if (checked.sequences > 0) device->selective_scan(checked, workspace, stream);
  });
}

mr_status mr_short_conv(mr_device* device, const mr_short_conv_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_short_conv_args checked = api::checked_conv(*device, args);
    if (checked.sequences > 0) device->short_conv(checked, stream);
  });
}
