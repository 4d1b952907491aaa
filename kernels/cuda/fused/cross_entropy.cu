// Cross-entropy of rows of logits: one pass for the log-sum-exp, and for the gradient one that reads and
// writes. Roofline: memory.
#include <cooperative_groups.h>

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

// The log-sum-exp of columns [begin, end) of a row, by a CTA.
__device__ inline OnlineSum sum_of_columns(const CrossEntropyParams& op, int64_t row, int64_t begin,
                                           int64_t end) {
  __shared__ float partial[2][kThreads / kWarpLanes];
  OnlineSum online;
  for (int64_t first = begin; first < end; first += kThreads * kColumns * kAhead) {
    Raw8 raw[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t col = first + (j * kThreads + static_cast<int>(threadIdx.x)) * kColumns;
      raw[j] = load8(op.logits, row, col, columns_left(end, col));
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t col = first + (j * kThreads + static_cast<int>(threadIdx.x)) * kColumns;
      online.add(to_float(op.logits, raw[j]), columns_left(end, col));
    }
  }
  OnlineSum all;
  all.max = team_max<kThreads>(online.max, partial[0]);
  all.sum = team_sum<kThreads>(online.sum_below(all.max), partial[1]);
  return all;
}

__device__ inline void write_loss(const CrossEntropyParams& op, int64_t row, const OnlineSum& all) {
  const float lse = all.max + logf(all.sum);
  const int32_t target = op.targets[row];
  const bool inside = target >= 0 && target < op.vocab;
  float loss = 0.0f;
  if (target != op.ignore_index) {
    loss = inside ? lse - to_float(op.logits, load8(op.logits, row, target, 1)).v[0] : NAN;
  }
  op.lse[row] = lse;
  op.loss[row] = loss;
}

// One CTA per row.
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(CrossEntropyParams op) {
  const int64_t row = blockIdx.x;
  const OnlineSum all = sum_of_columns(op, row, 0, op.vocab);
  if (threadIdx.x == 0) write_loss(op, row, all);
}

// A cluster per row: a part of the columns for each CTA, whose sums the first one adds in order. So few rows
// keep all SMs busy.
constexpr int kClusterCtas = 8;
constexpr int64_t kClusterVocab = 65536;  // from here on: 8,192 columns for each CTA
__global__ void __launch_bounds__(kThreads) cross_entropy_cluster_kernel(CrossEntropyParams op) {
#if __CUDA_ARCH__ >= 900
  __shared__ float2 of_cta[kClusterCtas];
  const auto cluster = cooperative_groups::this_cluster();
  const unsigned rank = cluster.block_rank();
  const int64_t row = blockIdx.x / kClusterCtas;
  const int64_t width = (op.vocab + kClusterCtas * kColumns - 1) / (kClusterCtas * kColumns) * kColumns;
  const int64_t begin = rank * width, end = min(op.vocab, begin + width);
  cluster.sync();  // the first CTA is there before anybody writes into its memory
  const OnlineSum mine = sum_of_columns(op, row, begin, end);
  if (threadIdx.x == 0) cluster.map_shared_rank(of_cta, 0)[rank] = {mine.max, mine.sum};
  cluster.sync();  // the first CTA waits for the others' sums
  if (rank != 0 || threadIdx.x != 0) return;
  OnlineSum all;
#pragma unroll
  for (int i = 0; i < kClusterCtas; ++i) all.max = fmaxf(all.max, of_cta[i].x);
#pragma unroll
  for (int i = 0; i < kClusterCtas; ++i) {
    OnlineSum part;
    part.max = of_cta[i].x;
    part.sum = of_cta[i].y;
    all.sum += part.sum_below(all.max);
  }
  write_loss(op, row, all);
#endif
}

void launch_cluster(const CrossEntropyParams& op, int64_t rows, const Launch& at) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * kClusterCtas));
  config.blockDim = dim3(kThreads);
  config.stream = at.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kClusterCtas, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_call(cudaLaunchKernelEx(&config, cross_entropy_cluster_kernel, op), "cross_entropy_cluster_kernel");
  check_launch("cross_entropy_cluster_kernel");
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
  // By the row's length alone: it fixes the order of the sum. The grid has at most 2^31 - 1 CTAs.
  if (at.device.has_bulk_copies() && args.vocab >= kClusterVocab && args.rows <= INT32_MAX / kClusterCtas) {
    return launch_cluster(op, args.rows, at);
  }
  cross_entropy_kernel<<<static_cast<unsigned>(args.rows), kThreads, 0, at.stream>>>(op);
  check_launch("cross_entropy_kernel");
}

void launch_cross_entropy_backward(const mr_cross_entropy_backward_args& args, const Launch& at) {
  const CrossEntropyBackwardOp op{
      rows_of(args.logits), rows_of(args.dlogits), args.targets, args.ignore_index, args.lse, args.dloss};
  launch_each_row("cross-entropy backward", op, args.rows, args.vocab, at.stream);
}

}  // namespace millrace::cuda
