// Gated feed-forward blocks, top-k routing and experts, plainly: a token and an expert at a time.
#pragma once

#include <cstdint>
#include <functional>

#include "base/gated_activation.h"
#include "kernels/reference/naive_linear.h"

namespace millrace::reference {

struct FeedForward {
  LinearWeights gate, up, down;               // [.., inner, hidden] twice, [.., hidden, inner]
  Activation activation = Activation::kSilu;  // without `up`, u is 1
  float alpha = 1.702f, limit = 7.0f;
};

float activate(const FeedForward& op, float gate, float up);

// y = W_down act(W_gate x, W_up x), x, y: [count][hidden]
void feed_forward(const FeedForward& op, const float* x, int64_t count, float* y);

enum class SoftmaxOver { kChosen, kAll };

// The k largest of `experts` scores (ties and NaN to the lower index) and their weights. Of `groups` of
// experts only the groups_chosen with the largest scores are looked at (DeepSeek V2); 1: all are.
void route_top_k(const float* scores, int64_t experts, int64_t k, SoftmaxOver softmax_over, int32_t* chosen,
                 float* weights, int groups = 1, int groups_chosen = 1);

// The sigmoid of each score is its weight; those of the largest weight + bias are chosen (DeepSeek V3).
struct SigmoidRouting {
  const float* bias = nullptr;        // [experts], or absent
  int groups = 1, groups_chosen = 1;  // only groups of the largest two (weight + bias) in sum are looked at
  bool renormalize = false;           // weights are divided by their sum
};
void route_sigmoid(const float* scores, int64_t experts, int64_t k, const SigmoidRouting& op, int32_t* chosen,
                   float* weights);

// The products of an expert; called behind each with its input x and its output y, which may be added to.
// Without a gate, `FeedForward::gate` is up's.
enum class ExpertProduct { kGate, kUp, kDown };
using BehindExpertProduct =
    std::function<void(ExpertProduct product, int32_t expert, const float* x, float* y)>;

// One token: y += sum over slots of weight * expert(x); x, y: [hidden].
// weigh_input: the weight multiplies x instead. chosen -1: the slot has no expert.
void experts_add(const FeedForward& op, const int32_t* chosen, const float* weights, int64_t k,
                 const float* x, float* y, bool weigh_input = false, const BehindExpertProduct& behind = {});

}  // namespace millrace::reference
