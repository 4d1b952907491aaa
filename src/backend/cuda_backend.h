// The CUDA backend's factory. cuda/ implements it when the build has nvcc, no_cuda/ when it has not, so that
// no caller needs to know.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace millrace {

// In place of a GPU's number: ranks of a host take its GPUs in turn (BackendOptions::local_rank).
inline constexpr int kGpuOfRank = -1;

// Throws Error{kDevice} when there is no usable GPU, Error{kUnsupported} in a build without CUDA.
std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options, int gpu);

}  // namespace millrace
