// The CUDA executor: backend.h's operations, recorded and launched together on one stream. Activations are
// float32 on the device; only token ids and block tables go in, and only logits or greedy tokens come out.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {

size_t executor_workspace_bytes(const ExecutorSpec& spec, const Device& device);
// The device must outlive the executor.
std::unique_ptr<Executor> make_cuda_executor(const ExecutorSpec& spec, const Device& device);

}  // namespace millrace::cuda
