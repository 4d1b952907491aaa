// Attention over tensors on threads: what millrace/kernels/flash_attention.h says, by the kernels of a table
// (flash_forward.h, flash_backward.h). Arguments were checked, the lists of the problem too (check_flash).
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/flash_attention.h"
#include "millrace/kernels/flash_partial.h"

namespace millrace::cpu {

// The lists that a problem points to: lengths, pages, blocks. Error{kBadInput} names the one that is wrong.
void check_flash(const mr_flash_problem& problem);

struct FlashTensors {
  mr_flash_tensor q, k, v, out;
  float* lse;                                 // forward: or null
  const mr_flash_gradients* grads = nullptr;  // backward
  // A partial (millrace/kernels/flash_partial.h), whose results are float32: the positions of query 0 and key
  // 0, [batch].
  const int32_t* q_first = nullptr;
  const int32_t* k_first = nullptr;
  bool partial() const { return k_first != nullptr; }
};

// Where each thread works, and delta.
struct FlashWorkspace {
  float* scratch;          // [threads][scratch_floats]
  int64_t scratch_floats;  // flash_scratch_floats(), whole cache lines
  float* delta;            // backward: [batch][heads][max_q]
};
FlashWorkspace take_flash_workspace(Arena& arena, const mr_flash_problem& problem, int threads,
                                    bool backward);

void flash_forward(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                   const FlashWorkspace& workspace);
void flash_backward(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                    const FlashWorkspace& workspace);

// Of flash_partial.h. Backward and delta: workspace.delta is the caller's.
void flash_partial_backward(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                            const FlashWorkspace& workspace);
void flash_delta(const Context& ctx, const mr_flash_problem& problem, const FlashTensors& tensors,
                 const FlashWorkspace& workspace);
void flash_merge(const Context& ctx, const mr_flash_merge_args& args);
void flash_finish(const Context& ctx, const mr_flash_finish_args& args);
// The part that rows of one chunk have in a sink's gradient.
double flash_sink_gradient(double sink, const float* lse, const float* delta, int64_t rows);

}  // namespace millrace::cpu
