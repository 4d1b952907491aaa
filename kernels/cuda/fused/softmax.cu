// Softmax of rows and its gradient, a row in registers where it fits. Roofline: memory.
#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/online_sum.cuh"
#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/fused/team_launch.h"

namespace millrace::cuda {
namespace {

struct SoftmaxParams {
  Rows x, y;
  float scale;
  int64_t rows, cols;
};

template <int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads* kTeams<kThreads>) softmax_kernel(SoftmaxParams op) {
  constexpr int kKept = kGroups > 0 ? kGroups : 1;
  __shared__ float partial[2][kThreads / kWarpLanes];
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTeams<kThreads> + threadIdx.x / kThreads;
  if (row >= op.rows) return;
  Raw8 raw[kKept];
  const auto read = [&](int g, int64_t col, int n) { raw[g] = load8(op.x, row, col, n); };
  if constexpr (kGroups > 0) each_group<kThreads, kGroups>(op.cols, thread, read);
  OnlineSum online;
  each_group<kThreads, kGroups>(op.cols, thread, [&](int g, int64_t col, int n) {
    if constexpr (kGroups == 0) read(g, col, n);
    Values8 v = to_float(op.x, raw[g]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v.v[i] *= op.scale;
    online.add(v, n);
  });
  const float row_max = team_max<kThreads>(online.max, partial[0]);
  const float row_sum = team_sum<kThreads>(online.sum_below(row_max), partial[1]);
  // A row of nothing but -infinity is 0 / 0.
  const float by = row_max == -INFINITY ? NAN : 1.0f / row_sum;
  each_group<kThreads, kGroups>(op.cols, thread, [&](int g, int64_t col, int n) {
    if constexpr (kGroups == 0) read(g, col, n);
    Values8 v = to_float(op.x, raw[g]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v.v[i] = exp_of(v.v[i] * op.scale - row_max) * by;
    store8(op.y, row, col, n, v);
  });
}

struct SoftmaxBackwardParams {
  Rows y, dy, dx;
  float scale;
  int64_t rows, cols;
};

template <int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads* kTeams<kThreads>)
    softmax_backward_kernel(SoftmaxBackwardParams op) {
  constexpr int kKept = kGroups > 0 ? kGroups : 1;
  __shared__ float partial[kThreads / kWarpLanes];
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTeams<kThreads> + threadIdx.x / kThreads;
  if (row >= op.rows) return;
  Raw8 y[kKept], dy[kKept];
  const auto read = [&](int g, int64_t col, int n) {
    y[g] = load8(op.y, row, col, n);
    dy[g] = load8(op.dy, row, col, n);
  };
  if constexpr (kGroups > 0) each_group<kThreads, kGroups>(op.cols, thread, read);
  float sum = 0.0f;
  each_group<kThreads, kGroups>(op.cols, thread, [&](int g, int64_t col, int n) {
    if constexpr (kGroups == 0) read(g, col, n);
    const Values8 p = to_float(op.y, y[g]), d = to_float(op.dy, dy[g]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum = fmaf(p.v[i], d.v[i], sum);
  });
  sum = team_sum<kThreads>(sum, partial);
  each_group<kThreads, kGroups>(op.cols, thread, [&](int g, int64_t col, int n) {
    if constexpr (kGroups == 0) read(g, col, n);
    const Values8 p = to_float(op.y, y[g]), d = to_float(op.dy, dy[g]);
    Values8 dx;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) dx.v[i] = op.scale * p.v[i] * (d.v[i] - sum);
    store8(op.dx, row, col, n, dx);
  });
}

}  // namespace

void launch_softmax(const mr_softmax_args& args, const Launch& at) {
  const SoftmaxParams op{rows_of(args.x), rows_of(args.y), args.scale, args.rows, args.cols};
  with_team(args.cols, [&](auto team) {
    using Team = decltype(team);
    softmax_kernel<Team::kThreads, Team::kGroups>
        <<<team_ctas<Team>(args.rows), team_cta_threads<Team>(), 0, at.stream>>>(op);
  });
  check_launch("softmax_kernel");
}

void launch_softmax_backward(const mr_softmax_backward_args& args, const Launch& at) {
  const SoftmaxBackwardParams op{rows_of(args.y), rows_of(args.dy), rows_of(args.dx),
                                 args.scale,      args.rows,        args.cols};
  with_team(args.cols, [&](auto team) {
    using Team = decltype(team);
    softmax_backward_kernel<Team::kThreads, Team::kGroups>
        <<<team_ctas<Team>(args.rows), team_cta_threads<Team>(), 0, at.stream>>>(op);
  });
  check_launch("softmax_backward_kernel");
}

}  // namespace millrace::cuda
