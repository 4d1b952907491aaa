// A step as the executor records it: the operations a model named, in order, before anything is launched.
// Knowing them all, the executor fuses across operations and replays a step it has seen as a CUDA graph.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "backend/backend.h"
#include "kernels/cuda/attention/attention.h"

namespace millrace::cuda {

struct RopeOp {
  int layer = 0;
  size_t table = 0;  // of the angle tables
  RopeParams params;
  QueryGrowth growth;  // scale 0: queries do not grow
  bool appends = true;
};
struct NormResidualOp {
  Norm norm;
};
// For experts of another device (backend/mixed_part.h): the choice, where nobody has made it yet, is made.
struct ChooseOp {};
// Expert e of the choice is number local[e] of the weights there are, count of them; -1: weighed with zero.
struct KeepExpertsOp {
  const int32_t* local;  // [experts], on the device
  int32_t count;
};
// Rows of Batch::given, their values [1 + layer] added behind that layer (-1: in place of the embedding's).
struct GivenOp {
  int layer = -1;
};
struct AddRowsOp {};  // residual += rows that came from the host
struct ArgmaxOp {};
struct SampleOp {};  // the rows' parameters lie in a buffer of the executor's

using StepOp = std::variant<Embed, NormQkv, RopeOp, Attend, Projection, Ffn, Route, Experts, NormResidualOp,
                            Logits, ArgmaxOp, SampleOp, ChooseOp, KeepExpertsOp, AddRowsOp, NormMix, StateMix,
                            NormLatentQkv, LayerInputs, EndLayer, GivenOp, TimeMix, ChannelMix>;

// What the launches depend on beside the operations.
struct StepPlan {
  int64_t rows = 0, logit_rows = 0;
  bool single_tokens = false;  // every sequence has one token in this step
  int32_t last_position = -1;  // the largest of any row
  bool sparse = false;         // some sequence has sparse attention, or an indexer that chooses
  int32_t last_read = -1;      // the largest position of any row in what it reads (BatchArrays)
  // Rows one after another of prompts that FP8 products compute, and of others, to the last; empty: no row is
  // of the first kind.
  struct Run {
    int64_t first = 0, count = 0;
    bool fp8 = false;
  };
  std::vector<Run> runs;
  bool takes_sampled = false;  // some tokens are those that the step before picked
  // Batch::given on the device: numbers of rows, and values [given_rows][1 + given_further][hidden].
  int64_t given_rows = 0;
  int32_t given_further = 0;
  const int32_t* given_numbers = nullptr;
  const float* given_values = nullptr;
  const int32_t* rope_positions = nullptr;  // [rows, 3] on the device, or null: by `positions`
  const float* rows_in = nullptr;           // AddRowsOp's, [rows, hidden] on the device
  const void* sampling = nullptr;           // SampleParams and what they point to, on the device
  const AdapterTable* adapters = nullptr;   // of which some row has one
  // Of the last route: experts may be flushed later than it.
  bool softmax_over_all = false;
  bool chosen = false;  // it has chosen experts and weights itself; else who multiplies does, from the scores
};

// Everything that decides which kernels run with which parameters: two steps with equal signatures differ in
// the contents of device buffers only.
std::vector<uint64_t> signature_of(const std::vector<StepOp>& ops, const StepPlan& plan);

}  // namespace millrace::cuda
