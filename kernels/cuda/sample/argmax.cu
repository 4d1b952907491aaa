// The greedy token of each row of logits: kParts CTAs per row find their part's best, the last to arrive the
// row's.
#include "kernels/cuda/sample/argmax.h"
#include "kernels/cuda/sample/best.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 32;  // CTAs per row: some 6,000 logits each of a vocabulary of 200,000

struct Row {
  Best parts[kParts];
  int32_t arrived;  // zero before and after
};

__global__ void __launch_bounds__(kThreads)
    argmax_kernel(const float* logits, int64_t vocab, Row* rows, int32_t* best) {
  __shared__ Best found[kThreads / kWarpLanes];
  __shared__ bool last;
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t row = blockIdx.y, part = (vocab + kParts - 1) / kParts;
  const int64_t begin = blockIdx.x * part, end = min(begin + part, vocab);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  Best mine;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const float value = __ldcg(logits + row * vocab + i);
    mine = better(mine, {value, isnan(value) ? -1 : static_cast<int32_t>(i)});
  }
  mine = warp_best(mine);
  if (lane == 0) found[warp] = mine;
  __syncthreads();  // every warp's is there
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / kWarpLanes; ++w) mine = better(mine, found[w]);
    rows[row].parts[blockIdx.x] = mine;
    __threadfence();  // the candidate is visible before the count says so
    last = atomicAdd(&rows[row].arrived, 1) == kParts - 1;
    if (last) rows[row].arrived = 0;
  }
  __syncthreads();
  if (!last || warp != 0) return;
  __threadfence();
  const Best* all = rows[row].parts;
  mine = warp_best({__ldcg(&all[lane].value), __ldcg(&all[lane].index)});
  if (lane == 0) best[row] = mine.index >= 0 && mine.value == -INFINITY ? -2 : mine.index;
}

}  // namespace

size_t argmax_candidates_bytes(int64_t rows) { return static_cast<size_t>(rows) * sizeof(Row); }

void launch_argmax(const float* logits, int64_t rows, int64_t vocab, void* candidates, int32_t* best,
                   const Launch& at) {
  if (rows == 0) return;
  static_assert(kParts == kWarpLanes);
  launch_dependent("argmax_kernel", argmax_kernel, dim3(kParts, static_cast<unsigned>(rows)), kThreads, 0, at,
                   logits, vocab, static_cast<Row*>(candidates), best);
}

}  // namespace millrace::cuda
