// What a device gets of a call of millrace/kernels/flash_attention.h once it was checked: pointers, strides,
// sizes and combinations are right, scale 0 has been replaced, the workspace is large enough. What lies in
// device memory (cu_q, pages, columns ...) was not looked at.
#pragma once

#include <cstddef>

#include "millrace/kernels/flash_attention.h"
#include "millrace/kernels/flash_partial.h"

namespace millrace::api {

struct FlashForward {
  const mr_flash_problem& problem;
  mr_flash_tensor q, k, v, out;
  float* lse;  // or null
  void* workspace;
  size_t workspace_bytes;
  mr_stream stream;
};

struct FlashBackward {
  const mr_flash_problem& problem;
  mr_flash_tensor q, k, v, out;
  const float* lse;
  const mr_flash_gradients& gradients;
  void* workspace;
  size_t workspace_bytes;
  mr_stream stream;
};

// Of millrace/kernels/flash_partial.h: positions are right too. A partial's results are float32.
struct FlashPartialForward {
  const mr_flash_problem& problem;
  mr_flash_span span;
  mr_flash_tensor q, k, v, out;
  float* lse;
  void* workspace;
};

struct FlashDelta {
  const mr_flash_problem& problem;
  mr_flash_tensor out, d_out;
  float* delta;
  void* workspace;
};

struct FlashPartialBackward {
  const mr_flash_problem& problem;
  mr_flash_span span;
  mr_flash_tensor q, k, v;
  const mr_flash_partial_gradients& gradients;
  void* workspace;
};

}  // namespace millrace::api
