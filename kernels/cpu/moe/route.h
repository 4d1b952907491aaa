// Top-k routing: which experts a token goes to, with which weights.
#pragma once

#include "kernels/cpu/matmul/gemm.h"
#include "kernels/cpu/norm/norm.h"

namespace millrace::cpu {

struct TopK {
  int64_t experts, k;
  // Softmax over the chosen scores, or over all of them; over all, renormalized, is over the chosen.
  enum class SoftmaxOver { kChosen, kAll } softmax_over;
  const float* scores;                // [rows][experts]
  int32_t* chosen;                    // [rows][k]
  float* weights;                     // [rows][k]
  int groups = 1, groups_chosen = 1;  // only groups of the largest score are looked at (DeepSeek V2)
};

// The k largest scores of a token, ties and NaN to the lower index, and their softmax. By the calling thread.
void route_top_k(const KernelTable& kernels, const TopK& op, int64_t token);
void route_top_k_rows(const Context& ctx, const TopK& op, int64_t rows);

// The sigmoid of each score is its weight; those of the largest weight + bias are chosen (DeepSeek V3).
struct SigmoidTopK {
  int64_t experts, k;
  const float* bias;          // [experts], or absent
  int groups, groups_chosen;  // only groups of the largest two (weight + bias) in sum are looked at
  bool renormalize;           // weights are divided by their sum
  float* scores;              // [rows][experts]; overwritten
  int32_t* chosen;            // [rows][k]
  float* weights;             // [rows][k]
};
void route_sigmoid_rows(const Context& ctx, const SigmoidTopK& op, int64_t rows);

// The norm before the router, the router's product, and top k.
struct RouteTokens {
  NormRows norm;         // of all rows
  LinearWeights router;  // [experts, cols]
  float* scores;         // [rows][experts]
  TopK top_k;            // of `scores`
  QuantizedActivations normed;
};

// Returns the formats that `normed` has afterwards.
ActivationFormats route_tokens(const Context& ctx, const RouteTokens& op);

// (token, slot) pairs sorted by expert, stably: rows [start[e], start[e + 1]) of the sorted order are expert
// e's. Pairs of expert -1 are none.
struct ExpertOrder {
  int32_t* start;       // [experts + 1]
  int32_t* active;      // [experts]: those with rows, the most rows first
  int32_t* token_of;    // [rows * k]: token of a sorted row
  int32_t* sorted_row;  // [rows * k]: sorted row of (token, slot), or -1
  int64_t num_active;

  int64_t rows_of(int32_t expert) const { return start[expert + 1] - start[expert]; }
};
ExpertOrder take_expert_order(Arena& arena, int64_t experts, int64_t rows, int64_t k);
void sort_by_expert(const int32_t* chosen, int64_t rows, int64_t k, int64_t experts, ExpertOrder& order);

}  // namespace millrace::cpu
