// The C functions of millrace/kernels/linear_attention.h: what is checked on every device.
#include "millrace/kernels/linear_attention.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

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

struct NamedFloats {
  const float* data;
  const char* name;
};
void require_floats(std::initializer_list<NamedFloats> arrays) {
  for (const NamedFloats& a : arrays) require_aligned(a.data, alignof(float), a.name);
}
void allow_floats(std::initializer_list<NamedFloats> arrays) {  // or null
  for (const NamedFloats& a : arrays) allow_aligned(a.data, alignof(float), a.name);
}

void check_heads(int32_t keys, int32_t heads, const char* keys_name, const char* heads_name) {
  require_range(keys, 1, kMaxLinearHeads, keys_name);
  require_range(heads, 1, kMaxLinearHeads, heads_name);
  if (heads % keys != 0)
    throw_error(ErrorCode::kBadInput, "{} is {}, expected a multiple of {}, {}", heads_name, heads, keys_name,
                keys);
}

mr_gated_delta_args checked(const mr_device& device, const mr_gated_delta_args* given, bool pointers) {
  require_pointer(given, "args");
  mr_gated_delta_args args = *given;
  check_heads(args.key_heads, args.value_heads, "args.key_heads", "args.value_heads");
  require_range(args.key_dim, 1, kMaxLinearDim, "args.key_dim");
  require_range(args.value_dim, 1, kMaxLinearDim, "args.value_dim");
  if (!std::isfinite(args.scale)) throw_error(ErrorCode::kBadInput, "args.scale is not finite");
  if (args.scale == 0.0f) args.scale = 1.0f / std::sqrt(static_cast<float>(args.key_dim));
  if (!pointers) return args;
  if (check_sequences(device, args.cu_seqlens, args.sequences, args.most_tokens)) {
    require_floats({{args.q, "args.q"}, {args.k, "args.k"}, {args.v, "args.v"}, {args.out, "args.out"}});
  }
  allow_floats({{args.g, "args.g"},
                {args.beta, "args.beta"},
                {args.initial_state, "args.initial_state"},
                {args.final_state, "args.final_state"}});
  return args;
}

mr_selective_scan_args checked(const mr_device& device, const mr_selective_scan_args* given, bool pointers) {
  require_pointer(given, "args");
  const mr_selective_scan_args args = *given;
  check_heads(args.groups, args.heads, "args.groups", "args.heads");
  require_range(args.state_dim, 1, kMaxLinearDim, "args.state_dim");
  require_range(args.head_dim, 1, kMaxLinearDim, "args.head_dim");
  if (!pointers) return args;
  if (check_sequences(device, args.cu_seqlens, args.sequences, args.most_tokens)) {
    require_floats({{args.x, "args.x"},
                    {args.dt, "args.dt"},
                    {args.a, "args.a"},
                    {args.b, "args.b"},
                    {args.c, "args.c"},
                    {args.out, "args.out"}});
  }
  allow_floats({{args.d, "args.d"},
                {args.initial_state, "args.initial_state"},
                {args.final_state, "args.final_state"}});
  return args;
}

mr_short_conv_args checked(const mr_device& device, const mr_short_conv_args* given) {
  require_pointer(given, "args");
  const mr_short_conv_args args = *given;
  require_range(args.channels, 1, INT32_MAX, "args.channels");
  require_range(args.taps, 1, kMaxTaps, "args.taps");
  require_range(args.silu, 0, 1, "args.silu");
  if (check_sequences(device, args.cu_seqlens, args.sequences, args.most_tokens)) {
    require_floats({{args.x, "args.x"}, {args.weight, "args.weight"}, {args.out, "args.out"}});
  }
  allow_floats({{args.bias, "args.bias"},
                {args.initial_rows, "args.initial_rows"},
                {args.final_rows, "args.final_rows"}});
  return args;
}

mr_wkv7_args checked(const mr_device& device, const mr_wkv7_args* given, bool pointers) {
  require_pointer(given, "args");
  mr_wkv7_args args = *given;
  require_range(args.heads, 1, kMaxLinearHeads, "args.heads");
  require_range(args.key_dim, 1, kMaxLinearDim, "args.key_dim");
  require_range(args.value_dim, 1, kMaxLinearDim, "args.value_dim");
  if (!std::isfinite(args.scale)) throw_error(ErrorCode::kBadInput, "args.scale is not finite");
  if (args.scale == 0.0f) args.scale = 1.0f;
  if (!pointers) return args;
  if (check_sequences(device, args.cu_seqlens, args.sequences, args.most_tokens)) {
    require_floats({{args.r, "args.r"},
                    {args.w, "args.w"},
                    {args.k, "args.k"},
                    {args.v, "args.v"},
                    {args.a, "args.a"},
                    {args.b, "args.b"},
                    {args.out, "args.out"}});
  }
  allow_floats({{args.initial_state, "args.initial_state"}, {args.final_state, "args.final_state"}});
  return args;
}

// Of a backward pass: what the forward call got, whose output is not looked at. Gradients are aligned.
template <class Args>
Args checked_backward(const mr_device& device, const Args* given) {
  require_pointer(given, "args");
  Args args = *given;
  float somewhere = 0.0f;
  args.forward.out = &somewhere;
  args.forward.final_state = nullptr;
  args.forward = checked(device, &args.forward, true);
  args.forward.out = nullptr;
  if (args.forward.sequences > 0 && device.has_host_memory() &&
      args.forward.cu_seqlens[args.forward.sequences] > 0)
    require_floats({{args.d_out, "args.d_out"}});
  allow_floats({{args.d_final_state, "args.d_final_state"}, {args.d_initial_state, "args.d_initial_state"}});
  return args;
}

void check_gradient(const float* of, const float* gradient, const char* name) {
  if (of == nullptr && gradient != nullptr)
    throw_error(ErrorCode::kBadInput, "args.d{}: found a gradient of args.forward.{}, which is NULL", name,
                name);
}

// Lengths count in what a backward pass takes, so its pointers are looked at for the workspace as well.
mr_gated_delta_backward_args checked(const mr_device& device, const mr_gated_delta_backward_args* given,
                                     bool /*pointers*/) {
  const mr_gated_delta_backward_args args = checked_backward(device, given);
  allow_floats({{args.dq, "args.dq"},
                {args.dk, "args.dk"},
                {args.dv, "args.dv"},
                {args.dg, "args.dg"},
                {args.dbeta, "args.dbeta"}});
  check_gradient(args.forward.g, args.dg, "g");
  check_gradient(args.forward.beta, args.dbeta, "beta");
  return args;
}

mr_selective_scan_backward_args checked(const mr_device& device, const mr_selective_scan_backward_args* given,
                                        bool /*pointers*/) {
  const mr_selective_scan_backward_args args = checked_backward(device, given);
  allow_floats({{args.dx, "args.dx"},
                {args.ddt, "args.ddt"},
                {args.da, "args.da"},
                {args.db, "args.db"},
                {args.dc, "args.dc"},
                {args.dd, "args.dd"}});
  check_gradient(args.forward.d, args.dd, "d");
  return args;
}

mr_wkv7_backward_args checked(const mr_device& device, const mr_wkv7_backward_args* given,
                              bool /*pointers*/) {
  const mr_wkv7_backward_args args = checked_backward(device, given);
  allow_floats({{args.dr, "args.dr"},
                {args.dw, "args.dw"},
                {args.dk, "args.dk"},
                {args.dv, "args.dv"},
                {args.da, "args.da"},
                {args.db, "args.db"}});
  return args;
}

using Rule = LinearBackwardShape::Rule;

// On a device whose memory the host does not read the longest sequence is what the caller says.
template <class Forward>
LinearBackwardShape backward_shape(const mr_device& device, Rule rule, const Forward& args, int32_t key_heads,
                                   int32_t heads, int32_t key_dim, int32_t value_dim) {
  LinearBackwardShape shape{rule, args.sequences, key_heads, heads, key_dim, value_dim, 0};
  if (!device.has_host_memory()) shape.longest = args.most_tokens;
  for (int32_t s = 0; device.has_host_memory() && s < args.sequences; ++s)
    shape.longest = std::max<int64_t>(shape.longest, args.cu_seqlens[s + 1] - args.cu_seqlens[s]);
  return shape;
}

LinearBackwardShape shape_of(const mr_device& device, const mr_gated_delta_args& a) {
  return backward_shape(device, Rule::kGatedDelta, a, a.key_heads, a.value_heads, a.key_dim, a.value_dim);
}
LinearBackwardShape shape_of(const mr_device& device, const mr_selective_scan_args& a) {
  return backward_shape(device, Rule::kSelectiveScan, a, a.groups, a.heads, a.state_dim, a.head_dim);
}
LinearBackwardShape shape_of(const mr_device& device, const mr_wkv7_args& a) {
  return backward_shape(device, Rule::kWkv7, a, a.heads, a.heads, a.key_dim, a.value_dim);
}

[[noreturn]] void only_on_cpus(const char* what) {
  throw_error(ErrorCode::kUnsupported, "{}: computed on CPUs alone, not on this device", what);
}

size_t workspace_of(const mr_device& device, const mr_gated_delta_args& a) {
  return device.linear_attention_workspace_bytes(a.key_dim, a.value_dim);
}
size_t workspace_of(const mr_device& device, const mr_selective_scan_args& a) {
  return device.linear_attention_workspace_bytes(a.state_dim, a.head_dim);
}
size_t workspace_of(const mr_device& device, const mr_wkv7_args& a) {
  return device.wkv7_workspace_bytes(a.key_dim, a.value_dim);
}
template <class Backward>
size_t workspace_of(const mr_device& device, const Backward& a) {
  return device.linear_backward_workspace_bytes(shape_of(device, a.forward));
}

template <class Args>
mr_status tell_workspace(mr_device* device, const Args* args, size_t* bytes) {
  return tell_bytes(device, bytes, [&](const mr_device& on) {
    return workspace_of(on, checked(on, args, /*pointers=*/false));
  });
}

// A backward pass of no sequences still writes the gradients of whole heads: zeros.
template <class Args>
bool is_nothing(const Args& args) {
  if constexpr (requires { args.sequences; }) return args.sequences == 0;
  return false;
}

template <class Args>
mr_status run(mr_device* device, const Args* args, void* workspace, size_t workspace_bytes, mr_stream stream,
              void (mr_device::*call)(const Args&, void*, mr_stream)) {
  return guarded([&] {
    require_pointer(device, "device");
    const Args good = checked(*device, args, /*pointers=*/true);
    require_workspace(workspace, workspace_bytes, workspace_of(*device, good));
    if (!is_nothing(good)) (device->*call)(good, workspace, stream);
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
void mr_device::gated_delta_backward(const mr_gated_delta_backward_args&, void*, mr_stream) {
  api::only_on_cpus("gradients of the gated delta rule");
}
void mr_device::selective_scan_backward(const mr_selective_scan_backward_args&, void*, mr_stream) {
  api::only_on_cpus("gradients of the selective scan");
}
void mr_device::wkv7_backward(const mr_wkv7_backward_args&, void*, mr_stream) {
  api::only_on_cpus("gradients of wkv7");
}

mr_status mr_wkv7_workspace_bytes(mr_device* device, const mr_wkv7_args* args, size_t* bytes) {
  return api::tell_workspace(device, args, bytes);
}

mr_status mr_chunk_wkv7(mr_device* device, const mr_wkv7_args* args, void* workspace, size_t workspace_bytes,
                        mr_stream stream) {
  return api::run(device, args, workspace, workspace_bytes, stream, &mr_device::wkv7);
}

mr_status mr_gated_delta_backward_workspace_bytes(mr_device* device, const mr_gated_delta_backward_args* args,
                                                  size_t* bytes) {
  return api::tell_workspace(device, args, bytes);
}

mr_status mr_gated_delta_backward(mr_device* device, const mr_gated_delta_backward_args* args,
                                  void* workspace, size_t workspace_bytes, mr_stream stream) {
  return api::run(device, args, workspace, workspace_bytes, stream, &mr_device::gated_delta_backward);
}

mr_status mr_selective_scan_backward_workspace_bytes(mr_device* device,
                                                     const mr_selective_scan_backward_args* args,
                                                     size_t* bytes) {
  return api::tell_workspace(device, args, bytes);
}

mr_status mr_selective_scan_backward(mr_device* device, const mr_selective_scan_backward_args* args,
                                     void* workspace, size_t workspace_bytes, mr_stream stream) {
  return api::run(device, args, workspace, workspace_bytes, stream, &mr_device::selective_scan_backward);
}

mr_status mr_wkv7_backward_workspace_bytes(mr_device* device, const mr_wkv7_backward_args* args,
                                           size_t* bytes) {
  return api::tell_workspace(device, args, bytes);
}

mr_status mr_wkv7_backward(mr_device* device, const mr_wkv7_backward_args* args, void* workspace,
                           size_t workspace_bytes, mr_stream stream) {
  return api::run(device, args, workspace, workspace_bytes, stream, &mr_device::wkv7_backward);
}

mr_status mr_gated_delta_workspace_bytes(mr_device* device, const mr_gated_delta_args* args, size_t* bytes) {
  return api::tell_workspace(device, args, bytes);
}

mr_status mr_chunk_gated_delta_rule(mr_device* device, const mr_gated_delta_args* args, void* workspace,
                                    size_t workspace_bytes, mr_stream stream) {
  return api::run(device, args, workspace, workspace_bytes, stream, &mr_device::gated_delta);
}

mr_status mr_selective_scan_workspace_bytes(mr_device* device, const mr_selective_scan_args* args,
                                            size_t* bytes) {
  return api::tell_workspace(device, args, bytes);
}

mr_status mr_selective_scan(mr_device* device, const mr_selective_scan_args* args, void* workspace,
                            size_t workspace_bytes, mr_stream stream) {
  return api::run(device, args, workspace, workspace_bytes, stream, &mr_device::selective_scan);
}

mr_status mr_short_conv(mr_device* device, const mr_short_conv_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_short_conv_args good = api::checked(*device, args);
    if (good.sequences > 0) device->short_conv(good, stream);
  });
}
