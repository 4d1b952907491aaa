// Picking tokens on the device: what a row of logits is told, what comes back. The rule is the host
// sampler's, bit by bit (base/sampling_math.h).
#pragma once

#include "kernels/cuda/device.h"

#include <cstddef>
#include <cstdint>

namespace millrace::cuda {

// One row's parameters. Lists lie behind the rows' parameters in the same buffer; offsets are in 8 bytes from
// the buffer's begin.
struct SampleParams {
  enum Mode : int32_t { kSkip, kGreedy, kDraw } mode = kSkip;
  float scale = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
  float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;
  double uniform = 0.0;
  int32_t counted = 0, num_counted = 0;  // TokenCount
  int32_t bias = 0, num_bias = 0;        // TokenBias
  int32_t allowed = -1;                  // words of 64 tokens; -1: every token is
  int32_t logprobs = -1;
};

inline constexpr int kMaxTopLogits = 20;

// For rows with logprobs >= 0.
struct SampleDetails {
  float chosen = 0.0f, largest = 0.0f;
  uint64_t units = 0;
  int32_t num_top = 0, unused = 0;
  struct Top {
    int32_t token;
    float logit;
  } top[kMaxTopLogits];
};

bool supports_sampling(int64_t vocab, const Device& device);

// tokens[r]: the token picked from logits[r, :], or SampledRow's numbers below 0; details[r] where
// its logprobs are wanted. params: [rows] and what they point to. Floor: 4 vocab * rows / B.
void launch_sample(const float* logits, int64_t rows, int64_t vocab, const SampleParams* params,
                   int32_t* tokens, SampleDetails* details, const Launch& at);

// tokens[i] = sampled[rows[i]] where rows[i] >= 0; what is no token becomes token 0.
void launch_take_sampled(const int32_t* sampled, const int32_t* rows, int64_t count, int32_t* tokens,
                         const Launch& at);

}  // namespace millrace::cuda
