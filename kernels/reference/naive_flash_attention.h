// Attention over tensors as millrace/kernels/flash_attention.h defines it, plainly and in double: every
// layout, mask and type, forward and backward. The oracle of the devices' kernels; finite differences are the
// oracle of its gradients.
#pragma once

#include <vector>

#include "millrace/kernels/flash_attention.h"

namespace millrace::reference {

// Host memory. The problem and its tensors are as the C API has checked them; scale 0 is 1 / sqrt(head_dim).
struct FlashInputs {
  const mr_flash_problem& problem;
  mr_flash_tensor q, k, v;
};

// Rows of all sequences one after the other: row n is query n - first_query(b) of its sequence.
struct FlashOutputs {
  std::vector<double> out;  // [rows][heads][value_dim]
  std::vector<double> lse;  // [rows][heads]; -infinity where a row sees nothing
};
FlashOutputs flash_forward(const FlashInputs& in);

struct FlashGradients {
  std::vector<double> d_q;       // [rows][heads][head_dim]
  std::vector<double> d_k, d_v;  // [key rows][kv_heads][head_dim or value_dim]
  std::vector<double> d_sinks;   // [heads]; empty where there are none
};
// d_out: [rows][heads][value_dim]. Not paged.
FlashGradients flash_backward(const FlashInputs& in, const std::vector<double>& d_out);

// Two partials of one row (millrace/kernels/flash_partial.h): outputs [dims] and log-sum-exps; the second
// into the first.
void flash_merge(std::vector<double>& out, double& lse, const std::vector<double>& other, double other_lse);

// Whether query i of head h in sequence b sees key j: the mask of positions, and the list of blocks.
bool flash_sees(const mr_flash_problem& problem, int32_t b, int32_t h, int32_t i, int32_t j);

// The first row of sequence b and, with b = batch, how many there are.
int64_t flash_query_row(const mr_flash_problem& problem, int32_t b);
int64_t flash_key_row(const mr_flash_problem& problem, int32_t b);
int32_t flash_query_length(const mr_flash_problem& problem, int32_t b);
int32_t flash_key_length(const mr_flash_problem& problem, int32_t b);

}  // namespace millrace::reference
