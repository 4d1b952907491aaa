// The chosen experts' gated feed-forward blocks. Tokens are sorted by expert, each expert's gate, up and down
// run over its tokens together, cut into chunks of rows so that a popular expert is shared by all threads;
// the experts of a token are then combined in slot order.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "kernels/cpu/matmul/gate_up.h"
#include "kernels/cpu/moe/route.h"

namespace millrace::cpu {

// For experts of which others compute the other rows of every matrix: between up and down everybody gets
// everybody's.
struct InnerExchange {
  float* mine;  // [rows * k][gate's rows], in sorted order
  std::function<void(int64_t rows)>
      to_whole;  // `mine` and the others' become MoeWorkspace::inner, [rows][down's columns]
};

// What adapters add to the products of experts (low_rank.h): to those rows that have one.
struct ExpertUpdates {
  struct Pair {
    const WeightMatrix *a = nullptr,
                       *b = nullptr;  // [experts, rank, in], [experts, out, rank]; absent: nothing
  };
  struct Product {
    std::span<const Pair> pairs;    // [adapters]
    std::vector<LowRankRun>* runs;  // room for [rows * k]
    float* inner;                   // room for [rows * k][largest rank]
  };
  std::span<const int32_t> adapters;  // [rows]; -1: none
  Product gate, up, down;             // without a gate, as in GateUp, up's is the first
};

struct MoeExperts {
  GateUp gate_up;          // [experts][inner][hidden] twice
  LinearWeights down;      // [experts][hidden][inner]
  int64_t k;               // experts of a token
  const int32_t* chosen;   // [rows][k]; -1: none
  const float* weights;    // [rows][k]
  const float* x;          // [rows][hidden]
  ActivationFormats made;  // formats of x that the workspace's input has already
  float* y;                // [rows][hidden]: added to
  int64_t rows;
  bool weigh_input =
      false;             // a weight multiplies what goes into an expert instead of what comes out (no biases)
  int64_t y_stride = 0;  // of y; 0: down's rows
  const InnerExchange* exchange = nullptr;  // absent: the matrices are whole
  bool keep_inner = false;                  // the workspace's inner has float32, sorted by expert, afterwards
  // y is left alone: the workspace's order and expert_out tell what to add (expert_outputs.h).
  bool leave_outputs = false;
  const ExpertUpdates* updates = nullptr;  // not with leave_outputs
};

struct MoeShape {
  int64_t rows, hidden, inner, experts, k;
};

struct MoeWorkspace {
  ExpertOrder order;
  QuantizedActivations input;  // of rows, and as tiles of sorted rows
  float* inner;                // [rows * k][inner]
  QuantizedActivations inner_quantized;
  float* expert_out;           // [rows * k][hidden], in sorted order
  float* row_scale = nullptr;  // [rows * k]: for weigh_input
};
MoeWorkspace take_moe_workspace(Arena& arena, const MoeShape& shape, bool with_bf16_tiles);

void moe_experts(const Context& ctx, const MoeExperts& op, MoeWorkspace& workspace);

}  // namespace millrace::cpu
