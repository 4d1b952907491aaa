// Linear attention on a GPU behind the C API.
#include "base/error.h"
#include "kernels/api/cuda/cuda_device.h"
#include "kernels/cuda/linear/linear_backward.h"
#include "kernels/cuda/linear/short_conv.h"
#include "kernels/cuda/linear/state_scan.h"

namespace millrace::api::gpu {
namespace {

constexpr int64_t kMostCtas = INT32_MAX;

void check_key_dim(int32_t key_dim, const char* name) {
  if (key_dim > cuda::kMaxStateKeyDim)
    throw_error(ErrorCode::kUnsupported, "{} is {}, expected at most {} on a GPU", name, key_dim,
                cuda::kMaxStateKeyDim);
}

void launch_scan(const cuda::StateScan& op, bool delta, const cuda::Launch& at) {
  const int64_t ctas = int64_t{op.sequences.count} * op.heads * (op.value_dim / 64 + 1);
  if (ctas > kMostCtas)
    throw_error(ErrorCode::kUnsupported,
                "linear attention of {} sequences of {} heads: too many for one launch", op.sequences.count,
                op.heads);
  if (delta) {
    cuda::launch_gated_delta(op, at);
  } else {
    cuda::launch_selective_scan(op, at);
  }
}

// Heads and their sizes, which the two rules call differently.
struct Heads {
  int32_t key_heads, heads, key_dim, value_dim;
};

template <class Args>
cuda::StateScan scan_of(const Args& args, const Heads& s, const float* q, const float* k, const float* v) {
  cuda::StateScan op;
  op.q = q;
  op.k = k;
  op.v = v;
  op.q_stride = op.k_stride = int64_t{s.key_heads} * s.key_dim;
  op.v_stride = int64_t{s.heads} * s.value_dim;
  op.out = args.out;
  op.key_heads = s.key_heads;
  op.heads = s.heads;
  op.key_dim = s.key_dim;
  op.value_dim = s.value_dim;
  op.sequences = {args.sequences, args.cu_seqlens, nullptr};
  op.initial = args.initial_state;
  op.final_state = args.final_state;
  op.most_tokens = args.most_tokens;
  return op;
}

// What the workspace of gradients depends on.
cuda::LinearBackward backward_of(const LinearBackwardShape& shape) {
  cuda::LinearBackward op;
  op.delta = shape.rule == LinearBackwardShape::Rule::kGatedDelta;
  op.sequences = shape.sequences;
  op.key_heads = shape.key_heads;
  op.heads = shape.heads;
  op.key_dim = shape.key_dim;
  op.value_dim = shape.value_dim;
  op.most_tokens = static_cast<int32_t>(shape.longest);
  return op;
}

template <class Args>
cuda::LinearBackward backward_of(LinearBackwardShape::Rule rule, const Args& args, const Heads& s,
                                 void* workspace) {
  const auto& f = args.forward;
  cuda::LinearBackward op =
      backward_of({rule, f.sequences, s.key_heads, s.heads, s.key_dim, s.value_dim, f.most_tokens});
  op.initial = f.initial_state;
  op.row_starts = f.cu_seqlens;
  op.d_out = args.d_out;
  op.d_final = args.d_final_state;
  op.d_initial = args.d_initial_state;
  op.workspace = static_cast<float*>(workspace);
  return op;
}

}  // namespace

size_t CudaDevice::linear_attention_workspace_bytes(int32_t, int32_t) const { return 0; }

void CudaDevice::gated_delta(const mr_gated_delta_args& args, void*, mr_stream stream) {
  check_key_dim(args.key_dim, "args.key_dim");
  cuda::StateScan op =
      scan_of(args, {args.key_heads, args.value_heads, args.key_dim, args.value_dim}, args.q, args.k, args.v);
  op.logs = args.g;
  op.betas = args.beta;
  op.scale = args.scale;
  launch_scan(op, true, at(stream));
}

void CudaDevice::selective_scan(const mr_selective_scan_args& args, void*, mr_stream stream) {
  check_key_dim(args.state_dim, "args.state_dim");
  cuda::StateScan op =
      scan_of(args, {args.groups, args.heads, args.state_dim, args.head_dim}, args.c, args.b, args.x);
  op.rates = args.a;
  op.steps = args.dt;
  op.skip = args.d;
  launch_scan(op, false, at(stream));
}

// ---------------------------------------------------------------- gradients

size_t CudaDevice::linear_backward_workspace_bytes(const LinearBackwardShape& shape) const {
  if (shape.rule == LinearBackwardShape::Rule::kWkv7)
    return mr_device::linear_backward_workspace_bytes(shape);
  for (const int32_t dim : {shape.key_dim, shape.value_dim}) {
    if (dim > cuda::kMaxBackwardDim)
      throw_error(ErrorCode::kUnsupported,
                  "gradients of linear attention: keys of {} and values of {}, expected at most {} on a GPU",
                  shape.key_dim, shape.value_dim, cuda::kMaxBackwardDim);
  }
  if (shape.sequences == 0) return 0;
  if (shape.longest == 0)
    throw_error(
        ErrorCode::kBadInput,
        "args.forward.most_tokens is 0, expected the tokens of the longest sequence: gradients on a GPU "
        "take room for them");
  const int64_t chunks = shape.sequences * ((shape.longest - 1) / cuda::kBackwardChunk + 1);
  if (chunks > UINT16_MAX || shape.heads > UINT16_MAX)
    throw_error(ErrorCode::kUnsupported,
                "gradients of linear attention: {} chunks of {} heads, expected at most {} of each", chunks,
                shape.heads, UINT16_MAX);
  return cuda::linear_backward_floats(backward_of(shape), device_) * sizeof(float);
}

void CudaDevice::gated_delta_backward(const mr_gated_delta_backward_args& args, void* workspace,
                                      mr_stream stream) {
  const mr_gated_delta_args& f = args.forward;
  cuda::LinearBackward op = backward_of(LinearBackwardShape::Rule::kGatedDelta, args,
                                        {f.key_heads, f.value_heads, f.key_dim, f.value_dim}, workspace);
  op.q = f.q;
  op.k = f.k;
  op.v = f.v;
  op.logs = f.g;
  op.betas = f.beta;
  op.scale = f.scale;
  op.dq = args.dq;
  op.dk = args.dk;
  op.dv = args.dv;
  op.d_logs = args.dg;
  op.d_betas = args.dbeta;
  cuda::launch_linear_backward(op, at(stream));
}

void CudaDevice::selective_scan_backward(const mr_selective_scan_backward_args& args, void* workspace,
                                         mr_stream stream) {
  const mr_selective_scan_args& f = args.forward;
  cuda::LinearBackward op = backward_of(LinearBackwardShape::Rule::kSelectiveScan, args,
                                        {f.groups, f.heads, f.state_dim, f.head_dim}, workspace);
  op.q = f.c;
  op.k = f.b;
  op.v = f.x;
  op.rates = f.a;
  op.betas = f.dt;
  op.skip = f.d;
  op.dq = args.dc;
  op.dk = args.db;
  op.dv = args.dx;
  op.d_betas = args.ddt;
  op.d_rates = args.da;
  op.d_skip = args.dd;
  cuda::launch_linear_backward(op, at(stream));
}

void CudaDevice::short_conv(const mr_short_conv_args& args, mr_stream stream) {
  if (int64_t{args.sequences} * (args.channels / 128 + 1) > kMostCtas)
    throw_error(ErrorCode::kUnsupported,
                "convolutions of {} sequences of {} channels: too many for one launch", args.sequences,
                args.channels);
  cuda::ShortConv op;
  op.x = args.x;
  op.x_stride = args.channels;
  op.weight = args.weight;
  op.bias = args.bias;
  op.channels = args.channels;
  op.taps = args.taps;
  op.silu = args.silu != 0;
  op.out = args.out;
  op.sequences = {args.sequences, args.cu_seqlens, nullptr};
  op.initial_rows = args.initial_rows;
  op.final_rows = args.final_rows;
  op.most_tokens = args.most_tokens;
  cuda::launch_short_conv(op, at(stream));
}

}  // namespace millrace::api::gpu
