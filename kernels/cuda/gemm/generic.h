// The generic products: right for every type and shape, and the order of their sums depends on the shape of
// one row only, so that a row's bits do not depend on the batch. Parameters are plain structs; pointers are
// device memory unless they say otherwise. Launches are asynchronous on the stream, take counts of zero, and
// throw Error{kDevice} when refused. B = 4.3 TB/s, the measured copy of an H200: a floor is what a kernel
// could reach.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/quant/device_matrix.h"

namespace millrace::cuda {

// y[t, r] = sum_c w[r, c] x[t, c] + bias[r], added to y when `add`. x [count, cols], y [count, rows]; bias or
// null. Floor for few tokens: the weight's bytes / B. This kernel reads the weight once per 8 tokens (from L2
// where it fits), decodes it each time and multiplies without tensor cores: at most 67 TFLOP/s and far under
// that.
void launch_linear(const DeviceMatrix& w, const float* bias, const float* x, int64_t count, bool add,
                   float* y, const Launch& at);

// The same for (token, slot) pairs, each with the expert of its own: y[p, r] from expert chosen[p] and
// x[p / pairs_per_x_row, :]. bias [experts, rows] or null. Floor: the chosen experts' bytes / B; a weight is
// read once per pair.
void launch_expert_linear(const DeviceMatrix& w, const float* bias, const float* x, int64_t pairs_per_x_row,
                          const int32_t* chosen, int64_t pairs, float* y, const Launch& at);

}  // namespace millrace::cuda
