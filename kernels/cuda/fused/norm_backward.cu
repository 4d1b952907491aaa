// Gradients of RMSNorm and LayerNorm. A CTA takes a fixed block of rows, keeps its sums of dweight and dbias
// in registers and leaves them as partial sums; a second kernel adds those in a fixed order. Roofline:
// memory.
#include <algorithm>

#include "kernels/cuda/fused/fused.h"
#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/fused/team_launch.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/async_copy.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

// Two CTAs on each SM of an H200, and no fewer than 8 rows each: partial sums are written and read once more.
constexpr int64_t kMaxBlocks = 264, kMinRowsOfBlock = 8;

struct NormBackwardParams {
  Rows x, dy, dsum, dx, weight;
  bool layer, has_dsum, has_weight, wants_sums;
  float weight_offset, by_cols;  // by_cols: 1 / cols
  const float *mean, *rstd;
  float* partials;  // [blocks][2][cols]: dweight, dbias
  int64_t rows, cols, rows_of_block;
};

struct RowStatistics {
  float mean, rstd;
};

// What a kernel knows when it is compiled, as in norm.cu.
struct AnyNorm {
  static constexpr Form kForm = Form::kAny;
  __device__ static bool layer(const NormBackwardParams& op) { return op.layer; }
};
template <bool kLayer>
struct PlainNorm {
  static constexpr Form kForm = Form::kBf16;
  __device__ static constexpr bool layer(const NormBackwardParams&) { return kLayer; }
};

// n = (x - mean) * rstd and g = dy * (weight + offset) of eight columns; zeros past the row's end.
struct Terms {
  Values8 n, g, dy;
};
template <class Known>
__device__ inline Terms terms_of(const NormBackwardParams& op, const Raw8& x, const Raw8& dy,
                                 const Raw8& weight, const RowStatistics& of, int n) {
  constexpr Form kForm = Known::kForm;
  Terms t;
  t.n = to_float<kForm>(op.x, x);
  t.dy = to_float<kForm>(op.dy, dy);
  t.g = t.dy;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const float off = Known::layer(op) ? t.n.v[i] - of.mean : t.n.v[i];
    t.n.v[i] = i < n ? off * of.rstd : 0.0f;
  }
  if (op.has_weight) {
    const Values8 w = to_float<kForm>(op.weight, weight);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) t.g.v[i] *= w.v[i] + op.weight_offset;
  }
  return t;
}

// n sums of eight, 16 bytes at a time where every row of `cols` begins at as many.
__device__ inline void store_floats(float* to, int n, int64_t cols, const Values8& x) {
  if (n == kColumns && cols % 4 == 0) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < n) to[i] = x.v[i];
  }
}

// A CTA's sums of dweight and, of a LayerNorm, dbias: of its one team, or of its warps, added in their order.
template <class Team>
__device__ inline void leave_sums(const NormBackwardParams& op, float* sums, const Values8* dweight,
                                  const Values8* dbias, bool layer, int thread, int team) {
  constexpr int kThreads = Team::kThreads, kGroups = Team::kGroups;
  const int64_t cols = op.cols;
  if constexpr (kThreads > kWarpLanes) {
    each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int n) {
      store_floats(sums + col, n, cols, dweight[g]);
      if (layer) store_floats(sums + cols + col, n, cols, dbias[g]);
    });
  } else {
    constexpr int kWidth = kThreads * kColumns * kGroups;
    __shared__ float of_team[kTeams<kThreads>][kWidth];
    for (int part = 0; part < (layer ? 2 : 1); ++part) {
      each_group<kThreads, kGroups>(cols, thread, [&](int g, int64_t col, int) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          of_team[team][col + i] = part == 0 ? dweight[g].v[i] : dbias[g].v[i];
        }
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

// The next rows' parts of a thread, on their way into its own places of shared memory. Nobody else reads
// them: waiting for one's own copies is enough.
template <class Team>
struct RowsAhead {
  static constexpr int kCtaThreads = static_cast<int>(team_cta_threads<Team>());
  static constexpr int kRows = kCtaThreads * Team::kGroups > 512 ? 2 : 4;  // 64 KB of x and dy in a CTA

  static size_t bytes(bool has_dsum) {
    return sizeof(uint4) * kCtaThreads * Team::kGroups * kRows * (has_dsum ? 3 : 2);
  }
  // All of dsum's places lie behind those of x and dy.
  __device__ static uint4* place(uint4* shared, int array, int row, int g) {
    const int part =
        array < 2 ? (row * 2 + array) * Team::kGroups + g : (2 * kRows + row) * Team::kGroups + g;
    return shared + part * kCtaThreads + threadIdx.x;
  }
};

// CTAs of an SM, so that one's loads and sums fill the other's barriers.
template <class Team, class Known>
inline constexpr int kRowCtas = Known::kForm == Form::kBf16&& Team::kGroups == 1 ? 2 : 1;

template <class Team, class Known>
__global__ void __launch_bounds__(team_cta_threads<Team>(), (kRowCtas<Team, Known>))
    norm_backward_kernel(NormBackwardParams op) {
  constexpr int kThreads = Team::kThreads, kGroups = Team::kGroups, kKept = kGroups > 0 ? kGroups : 1;
  constexpr Form kForm = Known::kForm;
  constexpr bool kRing = kForm == Form::kBf16 && kGroups > 0;
  constexpr int kRowsAtOnce = kTeams<kThreads>;
  using Ahead = RowsAhead<Team>;
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  extern __shared__ uint4 ring[];
  __shared__ float partial[2][2][kThreads / kWarpLanes];  // two rows' in turn, so that one barrier is enough
  const int thread = static_cast<int>(threadIdx.x % kThreads),
            team = static_cast<int>(threadIdx.x / kThreads);
  const int64_t cols = op.cols;
  const bool layer = Known::layer(op);
  const int64_t begin = blockIdx.x * op.rows_of_block;
  const int64_t end = min(begin + op.rows_of_block, op.rows);
  float* sums = op.partials + static_cast<int64_t>(blockIdx.x) * 2 * cols;
  const auto each = [&](auto&& f) { each_group<kThreads, kGroups, kForm>(cols, thread, f); };

  // Row `turn` of this team, if there is one; a group of copies in any case.
  const auto copy_row = [&](int64_t row, int turn) {
    if (row < end) {
      each([&](int g, int64_t col, int n) {
        if (n == 0) return;
        const int at = turn % Ahead::kRows;
        ptx::async_copy16(Ahead::place(ring, 0, at, g), at_column(op.x, row, col));
        ptx::async_copy16(Ahead::place(ring, 1, at, g), at_column(op.dy, row, col));
        if (op.has_dsum) ptx::async_copy16(Ahead::place(ring, 2, at, g), at_column(op.dsum, row, col));
      });
    }
    ptx::async_commit();
  };
  if constexpr (kRing) {
    for (int turn = 0; turn < Ahead::kRows - 1; ++turn) copy_row(begin + team + turn * kRowsAtOnce, turn);
  }
  Raw8 weight[kKept];
  if constexpr (kGroups > 0) {  // of the same columns for every row
    each([&](int g, int64_t col, int n) {
      if (op.has_weight) weight[g] = load8<kForm>(op.weight, 0, col, n);
    });
  }

  Values8 dweight[kKept] = {}, dbias[kKept] = {};
  int turn = 0;
  for (int64_t row = begin + team; row < end; row += kRowsAtOnce, ++turn) {
    const RowStatistics of{layer ? op.mean[row] : 0.0f, op.rstd[row]};
    Raw8 x[kKept], dy[kKept], dsum[kKept];
    const auto read = [&](int g, int64_t col, int n) {
      if constexpr (kRing) {
        const int at = turn % Ahead::kRows;
        x[g] = dy[g] = dsum[g] = Raw8{};
        if (n == 0) return;
        x[g].a = *Ahead::place(ring, 0, at, g);
        dy[g].a = *Ahead::place(ring, 1, at, g);
        if (op.has_dsum) dsum[g].a = *Ahead::place(ring, 2, at, g);
      } else {
        x[g] = load8<kForm>(op.x, row, col, n);
        dy[g] = load8<kForm>(op.dy, row, col, n);
        if (op.has_dsum) dsum[g] = load8<kForm>(op.dsum, row, col, n);
        if constexpr (kGroups == 0) {
          if (op.has_weight) weight[g] = load8<kForm>(op.weight, 0, col, n);
        }
      }
    };
    if constexpr (kRing) {
      // The place that is written next is the one whose row was read in the turn before.
      copy_row(row + (Ahead::kRows - 1) * kRowsAtOnce, turn + Ahead::kRows - 1);
      ptx::async_wait<Ahead::kRows - 1>();
    }
    if constexpr (kGroups > 0) each(read);
    float sum_gn = 0.0f, sum_g = 0.0f;
    each([&](int g, int64_t col, int n) {
      if constexpr (kGroups == 0) read(g, col, n);
      const Terms t = terms_of<Known>(op, x[g], dy[g], weight[g], of, n);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        sum_gn = fmaf(t.g.v[i], t.n.v[i], sum_gn);
        if (layer) sum_g += t.g.v[i];
      }
    });
    sum_gn = warp_sum(sum_gn);
    if (layer) sum_g = warp_sum(sum_g);
    if constexpr (kThreads > kWarpLanes) {
      float(&of_warps)[2][kThreads / kWarpLanes] = partial[turn % 2];
      if (threadIdx.x % kWarpLanes == 0) {
        of_warps[0][threadIdx.x / kWarpLanes] = sum_gn;
        of_warps[1][threadIdx.x / kWarpLanes] = sum_g;
      }
      __syncthreads();  // all warps' sums are there; those of the row before are not written over yet
      sum_gn = sum_g = 0.0f;
#pragma unroll
      for (int i = 0; i < kThreads / kWarpLanes; ++i) {
        sum_gn += of_warps[0][i];
        if (layer) sum_g += of_warps[1][i];
      }
    }
    const float mean_gn = sum_gn * op.by_cols, mean_g = sum_g * op.by_cols;
    each([&](int g, int64_t col, int n) {
      if constexpr (kGroups == 0) read(g, col, n);
      const Terms t = terms_of<Known>(op, x[g], dy[g], weight[g], of, n);
      Values8 dx;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float g_off = layer ? t.g.v[i] - mean_g : t.g.v[i];
        dx.v[i] = fmaf(-t.n.v[i], mean_gn, g_off) * of.rstd;
      }
      if (op.has_dsum) {
        const Values8 more = to_float<kForm>(op.dsum, dsum[g]);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dx.v[i] += more.v[i];
      }
      store8<kForm>(op.dx, row, col, n, dx);
      if constexpr (kGroups == 0) {  // this thread alone has these columns
        if (!op.wants_sums) return;
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
          if (layer) dbias[g].v[i] += t.dy.v[i];
        }
      }
    });
  }
  if constexpr (kGroups > 0) {
    if (op.wants_sums) leave_sums<Team>(op, sums, dweight, dbias, layer, thread, team);
  }
}

constexpr int kReduceWarps = 32;

// dweight and dbias from [blocks][2][cols]: warp w adds blocks w, w + 32, .. of 32 columns, then the warps'
// sums are added in order.
__global__ void __launch_bounds__(kReduceWarps* kWarpLanes)
    norm_sums_kernel(const float* partials, int64_t blocks, int64_t cols, Rows dweight, Rows dbias) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ float of_warp[kReduceWarps][kWarpLanes];
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes, which = blockIdx.y;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kWarpLanes + lane;
  const Rows& to = which == 0 ? dweight : dbias;
  if (to.data == nullptr) return;
  float sum = 0.0f;
  if (col < cols) {
    const float* from = partials + (int64_t{warp} * 2 + which) * cols + col;
#pragma unroll 8
    for (int64_t b = warp; b < blocks; b += kReduceWarps, from += 2 * kReduceWarps * cols) sum += *from;
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
  if (cols <= Team<512, 1>::kCols) return f(Team<512, 1>{});
  if (cols <= Team<512, 2>::kCols) return f(Team<512, 2>{});
  return f(Team<512, 0>{});
}

template <class F>
void with_known(const NormBackwardParams& op, F&& f) {
  bool plain = op.cols % kColumns == 0;
  for (const Rows& rows : {op.x, op.dy, op.dsum, op.dx, op.weight}) plain = plain && is_plain_bf16(rows);
  if (!plain) return f(AnyNorm{});
  return op.layer ? f(PlainNorm<true>{}) : f(PlainNorm<false>{});
}

template <class Team, class Known>
void launch_rows(const NormBackwardParams& op, unsigned blocks, const Launch& at) {
  const auto kernel = norm_backward_kernel<Team, Known>;
  size_t bytes = 0;
  if constexpr (Known::kForm == Form::kBf16 && Team::kGroups > 0) bytes = RowsAhead<Team>::bytes(op.has_dsum);
  allow_shared_memory(kernel, bytes);
  launch_overlapping("norm_backward_kernel", 1, kernel, dim3(blocks), team_cta_threads<Team>(), bytes, at,
                     op);
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
      .by_cols = 1.0f / static_cast<float>(args.cols),
      .mean = args.mean,
      .rstd = args.rstd,
      .partials = partials,
      .rows = args.rows,
      .cols = args.cols,
      .rows_of_block = rows_of_block(args.rows),
  };
  if (blocks > 0) {
    with_backward_team(args.cols, [&](auto team) {
      with_known(op, [&](auto known) {
        launch_rows<decltype(team), decltype(known)>(op, static_cast<unsigned>(blocks), at);
      });
    });
  }
  if (!wants_sums) return;
  const dim3 grid(static_cast<unsigned>((args.cols + kWarpLanes - 1) / kWarpLanes), 2);
  launch_overlapping("norm_sums_kernel", 1, norm_sums_kernel, grid, kReduceWarps * kWarpLanes, 0, at,
                     partials, blocks, args.cols, rows_of(args.dweight), rows_of(args.dbias));
}

}  // namespace millrace::cuda
