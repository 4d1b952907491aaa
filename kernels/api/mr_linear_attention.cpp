// The C functions of millrace/kernels/linear_attention.h: what is checked on every device.
#include "millrace/kernels/linear_attention.h"

#include <algorithm>
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

mr_wkv7_args checked_wkv7(const mr_device& device, const mr_wkv7_args* given, bool pointers) {
  require_pointer(given, "args");
  mr_wkv7_args args = *given;
  require_range(args.heads, 1, kMaxLinearHeads, "args.heads");
  require_range(args.key_dim, 1, kMaxLinearDim, "args.key_dim");
  require_range(args.value_dim, 1, kMaxLinearDim, "args.value_dim");
  if (!std::isfinite(args.scale)) throw_error(ErrorCode::kBadInput, "args.scale is not finite");
  if (args.scale == 0.0f) args.scale = 1.0f;
  if (!pointers) return args;
  if (check_sequences(device, args.cu_seqlens, args.sequences, args.most_tokens)) {
    require_floats(args.r, "args.r");
    require_floats(args.w, "args.w");
    require_floats(args.k, "args.k");
    require_floats(args.v, "args.v");
    require_floats(args.a, "args.a");
    require_floats(args.b, "args.b");
    require_floats(args.out, "args.out");
  }
  allow_floats(args.initial_state, "args.initial_state");
  allow_floats(args.final_state, "args.final_state");
  return args;
}

// Of a backward pass: what the forward call got, whose output is not looked at. Gradients are aligned.
template <class Args, class Check>
Args checked_backward(const mr_device& device, const Args* given, const Check& check) {
  require_pointer(given, "args");
  Args args = *given;
  float somewhere = 0.0f;
  args.forward.out = &somewhere;
  args.forward.final_state = nullptr;
  args.forward = check(device, &args.forward, true);
  args.forward.out = nullptr;
  if (args.forward.sequences > 0 && device.has_host_memory() &&
      args.forward.cu_seqlens[args.forward.sequences] > 0)
    require_floats(args.d_out, "args.d_out");
  allow_floats(args.d_final_state, "args.d_final_state");
  allow_floats(args.d_initial_state, "args.d_initial_state");
  return args;
}

mr_gated_delta_backward_args checked_delta_backward(const mr_device& device,
                                                    const mr_gated_delta_backward_args* given) {
  const mr_gated_delta_backward_args args = checked_backward(device, given, checked_delta);
  allow_floats(args.dq, "args.dq");
  allow_floats(args.dk, "args.dk");
  allow_floats(args.dv, "args.dv");
  allow_floats(args.dg, "args.dg");
  allow_floats(args.dbeta, "args.dbeta");
  if (args.forward.g == nullptr && args.dg != nullptr)
    throw_error(ErrorCode::kBadInput, "args.dg: found a gradient of args.forward.g, which is NULL");
  if (args.forward.beta == nullptr && args.dbeta != nullptr)
    throw_error(ErrorCode::kBadInput, "args.dbeta: found a gradient of args.forward.beta, which is NULL");
  return args;
}

mr_selective_scan_backward_args checked_scan_backward(const mr_device& device,
                                                      const mr_selective_scan_backward_args* given) {
  const mr_selective_scan_backward_args args = checked_backward(device, given, checked_scan);
  allow_floats(args.dx, "args.dx");
  allow_floats(args.ddt, "args.ddt");
  allow_floats(args.da, "args.da");
  allow_floats(args.db, "args.db");
  allow_floats(args.dc, "args.dc");
  allow_floats(args.dd, "args.dd");
  if (args.forward.d == nullptr && args.dd != nullptr)
    throw_error(ErrorCode::kBadInput, "args.dd: found a gradient of args.forward.d, which is NULL");
  return args;
}

mr_wkv7_backward_args checked_wkv7_backward(const mr_device& device, const mr_wkv7_backward_args* given) {
  const mr_wkv7_backward_args args = checked_backward(device, given, checked_wkv7);
  allow_floats(args.dr, "args.dr");
  allow_floats(args.dw, "args.dw");
  allow_floats(args.dk, "args.dk");
  allow_floats(args.dv, "args.dv");
  allow_floats(args.da, "args.da");
  allow_floats(args.db, "args.db");
  return args;
}

// On a device whose memory the host does not read the lengths are not known, and neither is there a kernel.
template <class Forward>
LinearBackwardShape backward_shape(const mr_device& device, const Forward& args, int32_t heads,
                                   int32_t key_dim, int32_t value_dim) {
  LinearBackwardShape shape{args.sequences, heads, key_dim, value_dim, 0};
  for (int32_t s = 0; device.has_host_memory() && s < args.sequences; ++s)
    shape.longest = std::max<int64_t>(shape.longest, args.cu_seqlens[s + 1] - args.cu_seqlens[s]);
  return shape;
}

LinearBackwardShape shape_of(const mr_device& device, const mr_gated_delta_args& a) {
  return backward_shape(device, a, a.value_heads, a.key_dim, a.value_dim);
}
LinearBackwardShape shape_of(const mr_device& device, const mr_selective_scan_args& a) {
  return backward_shape(device, a, a.heads, a.state_dim, a.head_dim);
}
LinearBackwardShape shape_of(const mr_device& device, const mr_wkv7_args& a) {
  return backward_shape(device, a, a.heads, a.key_dim, a.value_dim);
}

[[noreturn]] void only_on_cpus(const char* what) {
  throw_error(ErrorCode::kUnsupported, "{}: computed on CPUs alone, not on this device", what);
}

template <class Args, class Check>
mr_status backward_bytes(mr_device* device, const Args* args, size_t* bytes, const Check& check) {
  return guarded([&] {
    require_pointer(device, "device");
    require_pointer(bytes, "bytes");
    const Args checked = check(*device, args);
    *bytes = device->linear_backward_workspace_bytes(shape_of(*device, checked.forward));
  });
}

template <class Args, class Check>
mr_status run_backward(mr_device* device, const Args* args, void* workspace, size_t workspace_bytes,
                       const Check& check, void (mr_device::*run)(const Args&, void*)) {
  return guarded([&] {
    require_pointer(device, "device");
    const Args checked = check(*device, args);
    require_workspace(workspace, workspace_bytes,
                      device->linear_backward_workspace_bytes(shape_of(*device, checked.forward)));
    (device->*run)(checked, workspace);
  });
}

}  // namespace
}  // namespace millrace::api

using namespace millrace;

size_t mr_device::wkv7_workspace_bytes(int32_t, int32_t) const { api::only_on_cpus("wkv7"); }
void mr_device::wkv7(const mr_wkv7_args&, void*, mr_stream) { api::only_on_cpus("wkv7"); }
size_t mr_device::linear_backward_workspace_bytes(const api::LinearBackwardShape&) const {
  api::only_on_cpus("gradients of linear attention");
}
void mr_device::gated_delta_backward(const mr_gated_delta_backward_args&, void*) {
  api::only_on_cpus("gradients of the gated delta rule");
}
void mr_device::selective_scan_backward(const mr_selective_scan_backward_args&, void*) {
  api::only_on_cpus("gradients of the selective scan");
}
void mr_device::wkv7_backward(const mr_wkv7_backward_args&, void*) { api::only_on_cpus("gradients of wkv7"); }

mr_status mr_wkv7_workspace_bytes(mr_device* device, const mr_wkv7_args* args, size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(bytes, "bytes");
    const mr_wkv7_args checked = api::checked_wkv7(*device, args, false);
    *bytes = device->wkv7_workspace_bytes(checked.key_dim, checked.value_dim);
  });
}

mr_status mr_chunk_wkv7(mr_device* device, const mr_wkv7_args* args, void* workspace, size_t workspace_bytes,
                        mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_wkv7_args checked = api::checked_wkv7(*device, args, true);
    api::require_workspace(workspace, workspace_bytes,
                           device->wkv7_workspace_bytes(checked.key_dim, checked.value_dim));
    if (checked.sequences > 0) device->wkv7(checked, workspace, stream);
  });
}

mr_status mr_gated_delta_backward_workspace_bytes(mr_device* device, const mr_gated_delta_backward_args* args,
                                                  size_t* bytes) {
  return api::backward_bytes(device, args, bytes, api::checked_delta_backward);
}

mr_status mr_gated_delta_backward(mr_device* device, const mr_gated_delta_backward_args* args,
                                  void* workspace, size_t workspace_bytes, mr_stream) {
  return api::run_backward(device, args, workspace, workspace_bytes, api::checked_delta_backward,
                           &mr_device::gated_delta_backward);
}

mr_status mr_selective_scan_backward_workspace_bytes(mr_device* device,
                                                     const mr_selective_scan_backward_args* args,
                                                     size_t* bytes) {
  return api::backward_bytes(device, args, bytes, api::checked_scan_backward);
}

mr_status mr_selective_scan_backward(mr_device* device, const mr_selective_scan_backward_args* args,
                                     void* workspace, size_t workspace_bytes, mr_stream) {
  return api::run_backward(device, args, workspace, workspace_bytes, api::checked_scan_backward,
                           &mr_device::selective_scan_backward);
}

mr_status mr_wkv7_backward_workspace_bytes(mr_device* device, const mr_wkv7_backward_args* args,
                                           size_t* bytes) {
  return api::backward_bytes(device, args, bytes, api::checked_wkv7_backward);
}

mr_status mr_wkv7_backward(mr_device* device, const mr_wkv7_backward_args* args, void* workspace,
                           size_t workspace_bytes, mr_stream) {
  return api::run_backward(device, args, workspace, workspace_bytes, api::checked_wkv7_backward,
                           &mr_device::wkv7_backward);
}

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
