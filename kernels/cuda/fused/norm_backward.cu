// Gradients of RMSNorm and LayerNorm. A CTA takes a fixed block of rows, keeps its sums of dweight and dbias
// in registers and leaves them as partial sums; a second kernel adds those in a fixed order. Roofline:
// memory.
#include <algorithm>

#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/fused/team_launch.h"
#include "kernels/cuda/ptx/prefetch.cuh"

namespace millrace::cuda {
namespace {

// Two CTAs on each SM of an H200, and no fewer than 16 rows each: partial sums are written and read once
// more.
constexpr int64_t kMaxBlocks = 264, kMinRowsOfBlock = 16;

struct NormBackwardParams {
  Rows x, dy, dsum, dx, weight;
  bool layer, has_dsum, has_weight, wants_sums;
  float weight_offset;
  const float *mean, *rstd;
  float* partials;  // [blocks][2][cols]: dweight, dbias
  int64_t rows, cols, rows_of_block;
};

struct RowStatistics {
  float mean, rstd;
};

// n = (x - mean) * rstd and g = dy * (weight + offset) of eight columns; zeros past the row's end.
struct Terms {
  Values8 n, g, dy;
};
__device__ inline Terms terms_of(const NormBackwardParams& op, const Raw8& x, const Raw8& dy,
                                 const RowStatistics& of, int64_t col, int n) {
  Terms t;
  t.n = to_float(op.x, x);
  t.dy = to_float(op.dy, dy);
  t.g = t.dy;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) t.n.v[i] = i < n ? (t.n.v[i] - of.mean) * of.rstd : 0.0f;
  if (op.has_weight) {
    const Values8 w = to_float(op.weight, load8(op.weight, 0, col, n));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) t.g.v[i] *= w.v[i] + op.weight_offset;
  }
  return t;
}

// The team's next row, on its way to L2 while this one is summed: sums take the registers for it.
template <int kThreads, int kGroups>
__device__ inline void prefetch_row(const NormBackwardParams& op, int64_t row, int64_t end, int thread) {
  if (row >= end) return;
  each_group<kThreads, kGroups>(op.cols, thread, [&](int, int64_t col, int n) {
    if (n == 0) return;
    ptx::prefetch_l2(at_column(op.x, row, col));
    ptx::prefetch_l2(at_column(op.dy, row, col));
  });
}

template <int kThreads, int kGroups>
__global__ void __launch_bounds__(kThreads* kTeams<kThreads>) norm_backward_kernel(NormBackwardParams op) {
  constexpr int kKept = kGroups > 0 ? kGroups : 1;
  constexpr int kRowsAtOnce = kTeams<kThreads>;
  __shared__ float partial[2][2][kThreads / kWarpLanes];  // two rows' in turn, so that one barrier is enough
  const int thread = static_cast<int>(threadIdx.x % kThreads),
            team = static_cast<int>(threadIdx.x / kThreads);
  const int64_t cols = op.cols;
  const float size = static_cast<float>(cols);
  const int64_t begin = blockIdx.x * op.rows_of_block;
  const int64_t end = min(begin + op.rows_of_block, op.rows);
  float* sums = op.partials + static_cast<int64_t>(blockIdx.x) * 2 * cols;

  Values8 dweight[kKept] = {}, dbias[kKept] = {};
  int turn = 0;
  for (int64_t row = begin + team; row < end; row += kRowsAtOnce, turn ^= 1) {
    const RowStatistics of{op.layer ? op.mean[row] : 0.0f, op.rstd[row]};
    Raw8 x[kKept], dy[kKept], dsum[kKept];
    const auto read = [&](int g, int64_t col, int n) {
      x[g] = load8(op.x, row, col, n);
      dy[g] = load8(op.dy, row, col, n);
      if (op.has_dsum) dsum[g] = load8(op.dsum, row, col, n);
    };
    if constexpr (kGroups > 0) each_group<kThreads, kGroups>(cols, thread, read);
    prefetch_row<kThreads, kGroups>(op, row + kRowsAtOnce, end, thread);
    float sum_gn = 0.0f, sum_g = 0.0f;
    each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
      if constexpr (kGroups == 0) read(g, col, n);
      const Terms t = terms_of(op, x[g], dy[g], of, col, n);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        sum_gn = fmaf(t.g.v[i], t.n.v[i], sum_gn);
        sum_g += t.g.v[i];
      }
    });
    sum_gn = warp_sum(sum_gn);
    sum_g = warp_sum(sum_g);
    if constexpr (kThreads > kWarpLanes) {
      if (threadIdx.x % kWarpLanes == 0) {
        partial[turn][0][threadIdx.x / kWarpLanes] = sum_gn;
        partial[turn][1][threadIdx.x / kWarpLanes] = sum_g;
      }
      __syncthreads();  // all warps' sums are there; those of the row before are not written over yet
      sum_gn = sum_g = 0.0f;
#pragma unroll
      for (int i = 0; i < kThreads / kWarpLanes; ++i) {
        sum_gn += partial[turn][0][i];
        sum_g += partial[turn][1][i];
      }
    }
    const float mean_gn = sum_gn / size, mean_g = op.layer ? sum_g / size : 0.0f;
    each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
      if constexpr (kGroups == 0) read(g, col, n);
      const Terms t = terms_of(op, x[g], dy[g], of, col, n);
      Values8 dx;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) dx.v[i] = (t.g.v[i] - mean_g - t.n.v[i] * mean_gn) * of.rstd;
      if (op.has_dsum) {
        const Values8 more = to_float(op.dsum, dsum[g]);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dx.v[i] += more.v[i];
      }
      store8(op.dx, row, col, n, dx);
      if (!op.wants_sums) return;
      if constexpr (kGroups == 0) {  // this thread alone has these columns
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (i >= n) continue;
          sums[col + i] = fmaf(t.dy.v[i], t.n.v[i], row == begin ? 0.0f : sums[col + i]);
          sums[cols + col + i] = t.dy.v[i] + (row == begin ? 0.0f : sums[cols + col + i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          dweight[g].v[i] = fmaf(t.dy.v[i], t.n.v[i], dweight[g].v[i]);
          dbias[g].v[i] += t.dy.v[i];
        }
      }
    });
  }
  if constexpr (kGroups == 0) return;
  if (!op.wants_sums) return;
  if constexpr (kThreads > kWarpLanes) {
    each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i >= n) continue;
        sums[col + i] = dweight[g].v[i];
        sums[cols + col + i] = dbias[g].v[i];
      }
    });
  } else {
    // The warps' sums, added in their order.
    constexpr int kWidth = kThreads * kColumns * kKept;
    __shared__ float of_team[kTeams<kThreads>][kWidth];
    for (int part = 0; part < 2; ++part) {
      each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
          of_team[team][col + i] = part == 0 ? dweight[g].v[i] : dbias[g].v[i];
      });
      __syncthreads();  // all warps' sums are there
      for (int c = threadIdx.x; c < cols; c += kTeamCta) {
        float sum = 0.0f;
        for (int j = 0; j < kTeams<kThreads>; ++j) sum += of_team[j][c];
        sums[part * cols + c] = sum;
      }
      __syncthreads();  // read before the second half is written over them
    }
  }
}

constexpr int kReduceWarps = 32;

// dweight and dbias from [blocks][2][cols]: warp w adds blocks w, w + 32, .. of 32 columns, then the warps'
// sums are added in order.
__global__ void __launch_bounds__(kReduceWarps* kWarpLanes)
    norm_sums_kernel(const float* partials, int64_t blocks, int64_t cols, Rows dweight, Rows dbias) {
  __shared__ float of_warp[kReduceWarps][kWarpLanes];
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes, which = blockIdx.y;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kWarpLanes + lane;
  const Rows& to = which == 0 ? dweight : dbias;
  if (to.data == nullptr) return;
  float sum = 0.0f;
  if (col < cols) {
    for (int64_t b = warp; b < blocks; b += kReduceWarps) sum += partials[(b * 2 + which) * cols + col];
  }
  of_warp[warp][lane] = sum;
  __syncthreads();  // all warps' sums are there
  if (warp != 0 || col >= cols) return;
  Values8 total{};
  for (int j = 0; j < kReduceWarps; ++j) total.v[0] += of_warp[j][lane];
  store8(to, 0, col, 1, total);
}

// 256, 1,024, 4,096 or 8,192 columns in registers: sums and two rows' parts are there too.
template <class F>
void with_backward_team(int64_t cols, F&& f) {
  if (cols <= Team<32, 1>::kCols) return f(Team<32, 1>{});
  if (cols <= Team<32, 4>::kCols) return f(Team<32, 4>{});
  if (cols <= Team<256, 2>::kCols) return f(Team<256, 2>{});
  if (cols <= Team<512, 2>::kCols) return f(Team<512, 2>{});
  return f(Team<512, 0>{});
}

int64_t rows_of_block(int64_t rows) {
  return std::max(kMinRowsOfBlock, (rows + kMaxBlocks - 1) / kMaxBlocks);
}

}  // namespace

int64_t norm_backward_blocks(int64_t rows, int64_t) {
  return (rows + rows_of_block(rows) - 1) / rows_of_block(rows);
}

void launch_norm_backward(const mr_norm_backward_args& args, float* partials, const Launch& at) {
  const int64_t blocks = norm_backward_blocks(args.rows, args.cols);
  const bool wants_sums = args.dweight.data != nullptr || args.dbias.data != nullptr;
  const NormBackwardParams op{
      .x = rows_of(args.x),
      .dy = rows_of(args.dy),
      .dsum = rows_of(args.dsum),
      .dx = rows_of(args.dx),
      .weight = rows_of(args.weight),
      .layer = args.kind == MR_NORM_LAYER,
      .has_dsum = args.dsum.data != nullptr,
      .has_weight = args.weight.data != nullptr,
      .wants_sums = wants_sums,
      .weight_offset = args.weight_offset,
      .mean = args.mean,
      .rstd = args.rstd,
      .partials = partials,
      .rows = args.rows,
      .cols = args.cols,
      .rows_of_block = rows_of_block(args.rows),
  };
  if (blocks > 0) {
    with_backward_team(args.cols, [&](auto team) {
      using Team = decltype(team);
      norm_backward_kernel<Team::kThreads, Team::kGroups>
          <<<static_cast<unsigned>(blocks), team_cta_threads<Team>(), 0, at.stream>>>(op);
    });
    check_launch("norm_backward_kernel");
  }
  if (!wants_sums) return;
  const dim3 grid(static_cast<unsigned>((args.cols + kWarpLanes - 1) / kWarpLanes), 2);
  norm_sums_kernel<<<grid, kReduceWarps * kWarpLanes, 0, at.stream>>>(
      partials, blocks, args.cols, rows_of(args.dweight), rows_of(args.dbias));
  check_launch("norm_sums_kernel");
}

}  // namespace millrace::cuda
