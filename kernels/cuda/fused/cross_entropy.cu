// Cross-entropy of rows of logits: one pass for the log-sum-exp, and for the gradient one that reads and
// writes. Roofline: memory.
#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/online_sum.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kAhead = 4;  // loads of a thread under way: 128 KB of an SM's four CTAs

struct CrossEntropyParams {
  Rows logits;
  const int32_t* targets;
  int32_t ignore_index;
  float *loss, *lse;
  int64_t vocab;
};

// One CTA per row.
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(CrossEntropyParams op) {
  __shared__ float partial[2][kThreads / kWarpLanes];
  const int64_t row = blockIdx.x;
  OnlineSum online;
  for (int64_t begin = 0; begin < op.vocab; begin += kThreads * kColumns * kAhead) {
    Raw8 raw[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t col = begin + (j * kThreads + static_cast<int>(threadIdx.x)) * kColumns;
      raw[j] = load8(op.logits, row, col, columns_left(op.vocab, col));
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t col = begin + (j * kThreads + static_cast<int>(threadIdx.x)) * kColumns;
      online.add(to_float(op.logits, raw[j]), columns_left(op.vocab, col));
    }
  }
  const float row_max = team_max<kThreads>(online.max, partial[0]);
  const float row_sum = team_sum<kThreads>(online.sum_below(row_max), partial[1]);
  if (threadIdx.x != 0) return;
  const float lse = row_max + logf(row_sum);
  const int32_t target = op.targets[row];
  const bool inside = target >= 0 && target < op.vocab;
  float loss = 0.0f;
  if (target != op.ignore_index) {
    loss = inside ? lse - to_float(op.logits, load8(op.logits, row, target, 1)).v[0] : NAN;
  }
  op.lse[row] = lse;
  op.loss[row] = loss;
}

struct CrossEntropyBackwardOp {
  Rows logits, dlogits;
  const int32_t* targets;
  int32_t ignore_index;
  const float *lse, *dloss;
  struct Loaded {
    Raw8 logits;
    float lse, dloss;
    int32_t target;
  };
  __device__ Loaded load(int64_t row, int64_t col, int n) const {
    return {load8(logits, row, col, n), lse[row], dloss[row], targets[row]};
  }
  __device__ void finish(const Loaded& l, int64_t row, int64_t col, int n) const {
    Values8 v = to_float(logits, l.logits);
    const bool ignored = l.target == ignore_index;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float p = exp_of(v.v[i] - l.lse) - (col + i == l.target ? 1.0f : 0.0f);
      v.v[i] = ignored ? 0.0f : l.dloss * p;
    }
    store8(dlogits, row, col, n, v);
  }
};

}  // namespace

void launch_cross_entropy(const mr_cross_entropy_args& args, const Launch& at) {
  const CrossEntropyParams op{
      rows_of(args.logits), args.targets, args.ignore_index, args.loss, args.lse, args.vocab};
  cross_entropy_kernel<<<static_cast<unsigned>(args.rows), kThreads, 0, at.stream>>>(op);
  check_launch("cross_entropy_kernel");
}

void launch_cross_entropy_backward(const mr_cross_entropy_backward_args& args, const Launch& at) {
  const CrossEntropyBackwardOp op{
      rows_of(args.logits), rows_of(args.dlogits), args.targets, args.ignore_index, args.lse, args.dloss};
  launch_each_row("cross-entropy backward", op, args.rows, args.vocab, at.stream);
}

}  // namespace millrace::cuda
