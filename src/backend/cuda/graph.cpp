#include "backend/cuda/graph.h"

namespace millrace::cuda {

void Graph::begin_capture(const Stream& stream) {
  MILLRACE_CUDA_TRY(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
}

void Graph::abandon_capture(const Stream& stream) noexcept {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream.get(), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
}

void Graph::end_capture(const Stream& stream) {
  cudaGraph_t graph = nullptr;
  MILLRACE_CUDA_TRY(cudaStreamEndCapture(stream.get(), &graph));
  const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
  cudaGraphDestroy(graph);
  check_call(status, "cudaGraphInstantiate");
}

Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
}

void Graph::launch(const Stream& stream) const {
  MILLRACE_CUDA_TRY(cudaGraphLaunch(executable_, stream.get()));
}

}  // namespace millrace::cuda
