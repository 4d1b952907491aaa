// How long a recorded step takes on the GPU: what the kernels' benches share.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "backend/cuda/graph.h"

namespace millrace::cuda {

// The median of `times` replays of what `record` launches, in microseconds, after `warm` that do not count.
inline double median_us(const Stream& stream, int warm, int times, const std::function<void()>& record) {
  const Graph graph(stream, record);
  cudaEvent_t begin, end;
  MILLRACE_CUDA_TRY(cudaEventCreate(&begin));
  MILLRACE_CUDA_TRY(cudaEventCreate(&end));
  std::vector<float> all;
  for (int i = 0; i < warm + times; ++i) {
    MILLRACE_CUDA_TRY(cudaEventRecord(begin, stream.get()));
    graph.launch(stream);
    MILLRACE_CUDA_TRY(cudaEventRecord(end, stream.get()));
    stream.synchronize();
    float ms = 0;
    MILLRACE_CUDA_TRY(cudaEventElapsedTime(&ms, begin, end));
    if (i >= warm) all.push_back(ms * 1e3f);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

}  // namespace millrace::cuda
