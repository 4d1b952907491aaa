// The CUDA executor: backend.h's operations, recorded and launched together on one stream. Activations are
// float32 on the device; only token ids and block tables go in, and only logits or greedy tokens come out.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "dist/communicator.h"
#include "dist/shares.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {

size_t executor_workspace_bytes(const ExecutorSpec& spec, const Device& device);
// The device must outlive the executor.
std::unique_ptr<Executor> make_cuda_executor(const ExecutorSpec& spec, const Device& device);

// The same of a rank of a group: `whole` is the whole model's, weights, heads and KV blocks are this rank's
// part. All ranks make the same calls in the same order, also of logits() and greedy_tokens(), which only
// rank 0 gets.
size_t executor_workspace_bytes(const ExecutorSpec& whole, const Device& device, const dist::Shares& shares);
std::unique_ptr<Executor> make_cuda_executor(const ExecutorSpec& whole, const Device& device,
                                             dist::Communicator& group, const dist::Shares& shares);

}  // namespace millrace::cuda
