// Linear attention on a GPU behind the C API.
#include "base/error.h"
#include "kernels/api/cuda/cuda_device.h"
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

}  // namespace

size_t CudaDevice::linear_attention_workspace_bytes(int32_t, int32_t) const { return 0; }

void CudaDevice::gated_delta(const mr_gated_delta_args& args, void*, mr_stream stream) {
  check_key_dim(args.key_dim, "args.key_dim");
  cuda::StateScan op;
  op.q = args.q;
  op.k = args.k;
  op.v = args.v;
  op.q_stride = op.k_stride = int64_t{args.key_heads} * args.key_dim;
  op.v_stride = int64_t{args.value_heads} * args.value_dim;
  op.logs = args.g;
  op.betas = args.beta;
  op.scale = args.scale;
  op.out = args.out;
  op.key_heads = args.key_heads;
  op.heads = args.value_heads;
  op.key_dim = args.key_dim;
  op.value_dim = args.value_dim;
  op.sequences = {args.sequences, args.cu_seqlens, nullptr};
  op.initial = args.initial_state;
  op.final_state = args.final_state;
  op.most_tokens = args.most_tokens;
  launch_scan(op, true, at(stream));
}

void CudaDevice::selective_scan(const mr_selective_scan_args& args, void*, mr_stream stream) {
  check_key_dim(args.state_dim, "args.state_dim");
  cuda::StateScan op;
  op.q = args.c;
  op.k = args.b;
  op.v = args.x;
  op.q_stride = op.k_stride = int64_t{args.groups} * args.state_dim;
  op.v_stride = int64_t{args.heads} * args.head_dim;
  op.rates = args.a;
  op.steps = args.dt;
  op.skip = args.d;
  op.out = args.out;
  op.key_heads = args.groups;
  op.heads = args.heads;
  op.key_dim = args.state_dim;
  op.value_dim = args.head_dim;
  op.sequences = {args.sequences, args.cu_seqlens, nullptr};
  op.initial = args.initial_state;
  op.final_state = args.final_state;
  op.most_tokens = args.most_tokens;
  launch_scan(op, false, at(stream));
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
