// The CUDA backend's factory. cuda/ implements it when the build has nvcc, no_cuda/ when it has not, so that
// no caller needs to know.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace millrace {

// Throws Error{kDevice} when there is no usable GPU, Error{kUnsupported} in a build without CUDA.
std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options, int gpu);

}  // namespace millrace
