// Cross-entropy of rows of logits: one pass for the log-sum-exp, a long row by a cluster of CTAs, and for the
// gradient one that reads and writes. Roofline: memory.
#include <cooperative_groups.h>

#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/online_sum.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kAhead = 4;  // loads of a thread under way: 96 KB of an SM's three CTAs
// A long row is summed in eight parts, which are added in order: by a cluster of eight CTAs where there are
// few rows, else one after another by one.
constexpr int kParts = 8;
constexpr int64_t kLongRow = 32768, kFewRows = 512;

struct CrossEntropyParams {
  Rows logits;
  const int32_t* targets;
  int32_t ignore_index;
  float *loss, *lse;
  int64_t vocab;
};

// Part `part` of a row that has so many, by this CTA's threads: thread 0 has the sum.
template <Form kForm>
__device__ inline OnlineSum sum_of_part(const CrossEntropyParams& op, int64_t row, int part, int parts) {
  __shared__ float partial[2][kThreads / kWarpLanes];
  const int64_t part_cols = (op.vocab + parts * kColumns - 1) / (parts * kColumns) * kColumns;
  const int64_t first = part * part_cols, end = min(first + part_cols, op.vocab);
  OnlineSum online;
  for (int64_t begin = first; begin < end; begin += kThreads * kColumns * kAhead) {
    Raw8 raw[kAhead];
    const auto col_of = [&](int j) {
      return begin + (j * kThreads + static_cast<int>(threadIdx.x)) * kColumns;
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      raw[j] = load8<kForm>(op.logits, row, col_of(j), columns_left<kForm>(end, col_of(j)));
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int n = columns_left<kForm>(end, col_of(j));
      if (n > 0) online.add<kForm>(to_float<kForm>(op.logits, raw[j]), n);
    }
  }
  OnlineSum all;
  __syncthreads();  // the sums of the part before are read
  all.max = team_max<kThreads>(online.max, partial[0]);
  all.sum = team_sum<kThreads>(online.sum_below(all.max), partial[1]);
  return all;
}

// What the CTAs of a row have found, in the order of its columns, in the first of them.
__device__ inline OnlineSum sum_of_cluster([[maybe_unused]] OnlineSum* mine) {
  OnlineSum all;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older GPUs have no clusters, and get a CTA for a row
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();  // all CTAs' sums are there
  if (cluster.block_rank() == 0 && threadIdx.x == 0) {
    for (int i = 0; i < kParts; ++i) all.join(*cluster.map_shared_rank(mine, i));
  }
  cluster.sync();  // read before a CTA ends
#endif
  return all;
}

// kCtas CTAs for a row.
template <Form kForm, int kCtas>
__global__ void __launch_bounds__(kThreads, kForm == Form::kBf16 ? 3 : 1)
    cross_entropy_kernel(CrossEntropyParams op) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t row = blockIdx.x / kCtas;
  const bool last = blockIdx.x % kCtas == 0 && threadIdx.x == 0;  // who has the row's sum in the end
  float of_target = 0.0f;                                         // on its way under the sums
  const int32_t target = last ? op.targets[row] : 0;
  const bool inside = target >= 0 && target < op.vocab;
  if (last && inside) of_target = to_float(op.logits, load8(op.logits, row, target, 1)).v[0];
  OnlineSum all;
  if constexpr (kCtas > 1) {
    __shared__ OnlineSum of_cta;
    const OnlineSum mine = sum_of_part<kForm>(op, row, static_cast<int>(blockIdx.x % kCtas), kParts);
    if (threadIdx.x == 0) of_cta = mine;
    all = sum_of_cluster(&of_cta);
  } else {
    const int parts = op.vocab >= kLongRow ? kParts : 1;
    for (int part = 0; part < parts; ++part) all.join(sum_of_part<kForm>(op, row, part, parts));
  }
  if (!last) return;
  const float lse = all.max + logf(all.sum);
  float loss = 0.0f;
  if (target != op.ignore_index) loss = inside ? lse - of_target : NAN;
  op.lse[row] = lse;
  op.loss[row] = loss;
}

template <Form kForm>
void launch_form(const CrossEntropyParams& op, int64_t rows, const Launch& at) {
  const bool cluster = op.vocab >= kLongRow && rows < kFewRows && at.device.has_bulk_copies();
  const unsigned ctas = cluster ? kParts : 1;
  launch_overlapping("cross_entropy_kernel", ctas,
                     cluster ? cross_entropy_kernel<kForm, kParts> : cross_entropy_kernel<kForm, 1>,
                     dim3(static_cast<unsigned>(rows) * ctas), kThreads, 0, at, op);
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
  if (is_plain_bf16(op.logits) && op.vocab % kColumns == 0)
    return launch_form<Form::kBf16>(op, args.rows, at);
  launch_form<Form::kAny>(op, args.rows, at);
}

void launch_cross_entropy_backward(const mr_cross_entropy_backward_args& args, const Launch& at) {
  const CrossEntropyBackwardOp op{
      rows_of(args.logits), rows_of(args.dlogits), args.targets, args.ignore_index, args.lse, args.dloss};
  launch_each_row("cross-entropy backward", op, args.rows, args.vocab, at);
}

}  // namespace millrace::cuda
