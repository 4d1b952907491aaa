// Attention over a context that is spread over ranks, exact: every rank brings the queries, keys and values
// of its own tokens and gets their outputs, or gradients, with the bits that one device gives
// (PartialOrder::kExact). Who computes what and what moves is plain data (context_plan.h); bytes go through a
// Communicator while tiles are computed.
//
//     const ContextLayout layout = zigzag_layout({tokens}, group.size());
//     ContextAttention attention(device, group, problem, layout, ring_schedule(layout));
//     // Of layout.rows(rank) tokens, in the order of layout.runs(rank):
//     attention.forward({q, k, v}, out, lse);
//
// All ranks make the same calls. A call that fails on one rank throws there; the others wait for it until its
// communicator is gone.
#pragma once

#include <functional>
#include <map>
#include <set>

#include "dist/communicator.h"
#include "dist/context_blocks.h"
#include "dist/context_forest.h"
#include "dist/context_plan.h"
#include "millrace/kernels/flash_partial.h"

namespace millrace::dist {

struct ContextProblem {
  mr_dtype type = MR_BF16;  // of q, k, v, out: MR_BF16, MR_F16, MR_F32
  int heads = 1, kv_heads = 1, head_dim = 8, value_dim = 8;
  float scale = 0, softcap = 0;  // as in mr_flash_problem
  ContextMask mask;
  const float* sinks = nullptr;  // [heads], or null
  ContextShape shape() const { return {heads, kv_heads, head_dim, value_dim, type == MR_F32 ? 4 : 2}; }
};

// Of this rank's tokens, dense: q [rows][heads][head_dim], k and v [rows][kv_heads][head_dim or value_dim];
// 16-byte aligned. May be null where there are no rows.
struct ContextInputs {
  const void *q, *k, *v;
};
// What backward needs beside them, as forward gave it; and the gradients, of the problem's type.
struct ContextGradients {
  const void* out;
  const float* lse;
  const void* d_out;
  void *d_q, *d_k, *d_v;
  float* d_sinks;  // [heads], the same on every rank; null: not wanted
};

class ContextAttention {
 public:
  ContextAttention(mr_device* device, Communicator& group, const ContextProblem& problem,
                   const ContextLayout& layout, const ContextSchedule& schedule,
                   PartialOrder order = PartialOrder::kExact);

  // lse: float32, of each of the rank's runs [heads][rows of the run], one run after the other.
  void forward(const ContextInputs& in, void* out, float* lse);
  void backward(const ContextInputs& in, const ContextGradients& gradients);

  // Called after each step: steps that are done, of how many.
  std::function<void(size_t, size_t)> on_step;

 private:
  using Owners = std::map<int, std::set<int>>;
  void run_steps(std::map<BlockId, Block>& blocks, const std::function<void(const ContextTile&)>& compute);
  void forward_tile(const Block& queries, const Block& keys, std::vector<Forest>& forests);
  void backward_tile(const ContextTile& tile, const Block& queries, const Block& keys);
  std::vector<Forest> query_forests(int owner, PartialKind kind) const;
  std::vector<Forest> key_forests(int owner) const;
  std::vector<std::vector<ChunkNode>> nodes_of_queries(int rank, int owner) const;
  std::vector<std::vector<ChunkNode>> nodes_of_keys(int rank, int owner) const;
  std::vector<std::vector<ChunkNode>> nodes_sent(PartialKind kind, int from, int to) const;
  void return_partials(PartialKind kind, std::map<int, std::vector<Forest>>& forests);
  std::map<int, std::vector<std::byte>> exchange_partials(PartialKind kind,
                                                          std::map<int, std::vector<Forest>>& forests);
  void merge_compact(PartialKind kind, const std::map<int, std::vector<std::byte>>& received,
                     std::vector<Forest>& own);
  Block own_block(BlockKind kind, const ContextInputs& in) const;
  std::vector<float> deltas(const ContextGradients& g);
  Block block_of_gradients(const ContextInputs& in, const ContextGradients& g,
                           const std::vector<float>& delta) const;
  void finish_gradients(const ContextGradients& g) const;
  void finish_sinks(const float* lse, const std::vector<float>& delta, float* d_sinks);

  PartialMath math_;
  Communicator& group_;
  ContextProblem problem_;
  ContextLayout layout_;
  ContextSchedule schedule_;
  PartialOrder order_;
  // Of every rank: whose queries it meets with whose keys, and the other way round.
  std::vector<Owners> keys_of_queries_, queries_of_keys_;
  std::map<int, std::vector<Forest>> d_queries_, d_keys_;  // by owner, of one run each
};

// One step of decoding with keys spread over ranks: `queries` tokens at the end of every sequence of the
// layout (1, or more where drafts are checked), q [sequences][queries][heads][head_dim] the same on every
// rank, k and v of this rank's tokens. Every rank attends over its own keys, partials are gathered, and all
// ranks get out [sequences][queries][heads][value_dim].
void context_decode(mr_device* device, Communicator& group, const ContextProblem& problem,
                    const ContextLayout& layout, int queries, const ContextInputs& in, void* out);
// Bytes that a step of decoding receives on a rank.
int64_t decode_bytes(const ContextLayout& layout, const ContextProblem& problem, int queries, int rank);

}  // namespace millrace::dist
