// The gated activations of feed-forward blocks, as a parameter.
#pragma once

namespace millrace::cuda {

// silu(gate) * up, or gpt-oss's clamped form.
struct Activation {
  bool clamped = false;
  float alpha = 1.702f, limit = 7.0f;
};

}  // namespace millrace::cuda
