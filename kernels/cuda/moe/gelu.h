// Activations that no product has in its epilogue: GELU, squared ReLU, and those of feed-forward layers
// without a gate.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

enum class ActivationKind : int32_t { kSilu, kGelu, kGeluTanh, kReluSquared };  // GELU by erf, by tanh

// gate[i] = act(gate[i]) * up[i], up null: without a factor. Device memory; asynchronous on the stream.
// Floor: 12 size / B, 8 without up.
void launch_gelu(ActivationKind kind, int64_t size, float* gate, const float* up, const Launch& at);

}  // namespace millrace::cuda
