// Attention over tensors on threads: what millrace/kernels/flash_attention.h says, by the kernels of a table
// (flash_forward.h, flash_backward.h). Arguments were checked, the lists of the problem too (check_flash).
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/flash_attention.h"

namespace millrace::cpu {

// The lists that a problem points to: lengths, pages, blocks. Error{kBadInput} names the one that is wrong.
void check_flash(const mr_flash_problem& problem);

struct FlashTensors {
  mr_flash_tensor q, k, v, out;
  float* lse;                                 // forward: or null
  const mr_flash_gradients* grads = nullptr;  // backward
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

}  // namespace millrace::cpu
