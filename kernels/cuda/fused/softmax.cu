// Softmax of rows and its gradient, a row in registers where it fits. Roofline: memory.
#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/online_sum.cuh"
#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/fused/team_launch.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

struct SoftmaxParams {
  Rows x, y;
  float scale;
  int64_t rows, cols;
};

// A row in registers: its maximum, then its exponentials once, which stay there until their sum is known. A
// team takes rows gridDim apart, the next one's loads under way.
template <int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads* kTeams<kThreads>) softmax_kernel(SoftmaxParams op) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ float partials[2][2][kThreads / kWarpLanes];
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTeams<kThreads> + threadIdx.x / kThreads,
                step = static_cast<int64_t>(gridDim.x) * kTeams<kThreads>;
  Raw8 raw[kGroups];
  const auto read = [&](int64_t row) {
    each_group<kThreads, kGroups>(op.cols, thread,
                                  [&](int g, int64_t col, int n) { raw[g] = load8(op.x, row, col, n); });
  };
  if (first < op.rows) read(first);
  int turn = 0;  // of the partial results: a row's are read while the next one's are written
  for (int64_t row = first; row < op.rows; row += step, turn ^= 1) {
    float(&partial)[2][kThreads / kWarpLanes] = partials[turn];
    Values8 v[kGroups];
    float most = -INFINITY;
    each_group<kThreads, kGroups>(op.cols, thread, [&](int g, int64_t, int n) {
      v[g] = to_float(op.x, raw[g]);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        v[g].v[i] = i < n ? v[g].v[i] * op.scale : -INFINITY;
        most = fmaxf(most, v[g].v[i]);
      }
    });
    if (row + step < op.rows) read(row + step);
    const float row_max = team_max<kThreads>(most, partial[0]);
    float sum = 0.0f;
    each_group<kThreads, kGroups>(op.cols, thread, [&](int g, int64_t, int) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        v[g].v[i] = exp_of(v[g].v[i] - row_max);
        sum += v[g].v[i];
      }
    });
    sum = team_sum<kThreads>(sum, partial[1]);
    // A row of nothing but -infinity is 0 / 0.
    const float by = row_max == -INFINITY ? NAN : 1.0f / sum;
    each_group<kThreads, kGroups>(op.cols, thread, [&](int g, int64_t col, int n) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) v[g].v[i] *= by;
      store8(op.y, row, col, n, v[g]);
    });
  }
}

// A longer row, which is read twice.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) softmax_long_kernel(SoftmaxParams op) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ float partial[2][kThreads / kWarpLanes];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  OnlineSum online;
  each_group<kThreads, 0>(op.cols, thread, [&](int, int64_t col, int n) {
    Values8 v = to_float(op.x, load8(op.x, row, col, n));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v.v[i] *= op.scale;
    online.add(v, n);
  });
  const float row_max = team_max<kThreads>(online.max, partial[0]);
  const float row_sum = team_sum<kThreads>(online.sum_below(row_max), partial[1]);
  const float by = row_max == -INFINITY ? NAN : 1.0f / row_sum;
  each_group<kThreads, 0>(op.cols, thread, [&](int, int64_t col, int n) {
    Values8 v = to_float(op.x, load8(op.x, row, col, n));
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
  ptx::let_dependents_start();
  ptx::wait_for_previous();
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
    if constexpr (Team::kGroups == 0) {
      launch_overlapping("softmax_long_kernel", 1, softmax_long_kernel<Team::kThreads>,
                         dim3(static_cast<unsigned>(args.rows)), Team::kThreads, 0, at, op);
    } else {
      const auto kernel = softmax_kernel<Team::kThreads, Team::kGroups>;
      launch_overlapping("softmax_kernel", 1, kernel, dim3(resident_ctas<Team>(kernel, args.rows, at.device)),
                         team_cta_threads<Team>(), 0, at, op);
    }
  });
}

void launch_softmax_backward(const mr_softmax_backward_args& args, const Launch& at) {
  const SoftmaxBackwardParams op{rows_of(args.y), rows_of(args.dy), rows_of(args.dx),
                                 args.scale,      args.rows,        args.cols};
  with_team(args.cols, [&](auto team) {
    using Team = decltype(team);
    launch_overlapping("softmax_backward_kernel", 1, softmax_backward_kernel<Team::kThreads, Team::kGroups>,
                       dim3(team_ctas<Team>(args.rows)), team_cta_threads<Team>(), 0, at, op);
  });
}

}  // namespace millrace::cuda
