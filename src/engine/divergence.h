// Divergence: how far a model's predictions are from a baseline's, token by token: the Kullback-Leibler
// divergence KL(baseline || model) in nats, and how often both find the same token likeliest.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/runtime.h"

namespace millrace {

struct Divergence {
  double mean = 0.0, p99 = 0.0, max = 0.0;  // of KL; p99: the value that 99% of tokens do not pass
  double top1_agreement = 0.0;              // share of tokens
  double perplexity_ratio = 0.0;  // model / baseline, over tokens whose successor is known; 0: none is
  int64_t tokens = 0;
};

class DivergenceMeter {
 public:
  // Rows of logits [rows, vocab] of both, and per row the token that follows, or -1. Rows are shared among
  // the backend's threads.
  void add(Backend& backend, std::span<const float> baseline, std::span<const float> model, int64_t vocab,
           std::span<const int32_t> next);
  Divergence result() const;

 private:
  std::vector<double> kl_;
  int64_t agreed_ = 0, scored_ = 0;
  double excess_nll_ = 0.0;
};

// Logits of every token of `tokens`, [tokens, vocab], from an empty cache.
std::vector<float> all_logits(Runtime& runtime, std::span<const int32_t> tokens);

}  // namespace millrace
