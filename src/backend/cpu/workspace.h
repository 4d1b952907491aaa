// Everything an executor writes besides the KV pools, laid out once from the spec; no step allocates.
#pragma once

#include <array>
#include <optional>

#include "backend/backend.h"
#include "kernels/cpu/attention/attention_plan.h"
#include "kernels/cpu/attention/indexed_attention.h"
#include "kernels/cpu/attention/sparse_attention.h"
#include "kernels/cpu/matmul/gemm_heads.h"
#include "kernels/cpu/moe/experts.h"
#include "kernels/cpu/sample/argmax.h"
#include "kernels/cpu/state/state_mix.h"
#include "kernels/cpu/state/time_mix.h"

namespace millrace::cpu {

struct Workspace {
  // attended_cols: of the heads of all ranks, where those of `spec` are a rank's; else as many.
  Workspace(const ExecutorSpec& spec, int64_t attended_cols, int threads, bool with_bf16_tiles, Arena& arena);

  int64_t query_cols, attended_cols, kv_cols;

  float *residual, *normed;  // [tokens][hidden]
  float* query;              // [tokens][heads * head_dim]
  float* attention;          // the same, or values of layers with a state
  float* attended;           // [tokens][attended_cols]: `attention` of all ranks
  float *key, *value;        // [tokens][kv_heads * head_dim]
  // Latent attention: queries before k_b, or values behind head_values, [tokens][heads][nope + rope or
  // value]; and what q_a or kv_a makes, [tokens][q_rank or rank + rope].
  float *head_rows = nullptr, *compressed = nullptr;
  QuantizedActivations head_quantized = {};
  float* logits;  // [logit rows][vocab]
  // The input of a product, [tokens][max(hidden, attended_cols)]. Its blocks also are the rotated queries
  // of an int8 cache: after the product that made them, before the one that reads what they attended to.
  QuantizedActivations input;
  float* inner;  // [tokens][ffn] or [tokens * chosen][expert_ffn]
  QuantizedActivations inner_quantized;
  float *cosines, *sines;                // [tokens][head_dim / 2]
  float* query_scale;                    // [tokens]
  AttentionSequence* sequences;          // [tokens]
  const int32_t** tables[kMaxKvGroups];  // [groups][tokens]: the sequences' block tables
  AttentionPlan attention_plan;
  // Of groups whose heads are of another number or size than the spec's (Gemma 4).
  std::array<std::optional<AttentionPlan>, kMaxKvGroups> group_plans;
  AttentionPlan& plan_of(int group) {
    std::optional<AttentionPlan>& own = group_plans[static_cast<size_t>(group)];
    return own ? *own : attention_plan;
  }

  // Inputs of layers: [tokens][layer_input_cols], of all layers side by side, and what a product makes of
  // them or of one layer's, of the same size.
  int64_t layer_input_cols = 0;
  float *layer_inputs, *layer_products;
  std::optional<SparsePlan> sparse_plan;    // where there are page summaries
  std::optional<IndexedPlan> indexed_plan;  // where an indexer may leave tokens out
  // An indexer's queries [tokens][index heads][index dim], keys [tokens][index dim] and weights of heads
  // [tokens][index heads].
  float *index_query = nullptr, *index_key = nullptr, *index_weight = nullptr;

  // Layers with a state, and gated attention.
  float* projected;       // [tokens][projected]: products side by side; queries and their gates
  float* mix;             // [tokens][mix columns]
  float* attention_gate;  // [tokens][heads * head_dim]
  StateWorkspace state;
  TimeMixWorkspace time_mix;  // RWKV 7

  // Experts.
  float* router_scores;  // [tokens][experts]
  int32_t* chosen;       // [tokens][chosen]
  float* chosen_weight;  // [tokens][chosen]
  ExpertOrder expert_order;
  float* expert_out;  // [tokens * chosen][hidden], sorted by expert
  float* row_scale;   // [tokens * chosen], sorted by expert
  // Of experts with norms of their own, [tokens][hidden]: what the shared one made, and the others in sum.
  float *expert_sum, *expert_total;

  // Adapters: A x of up to three products of the same input, [3][tokens, logit rows or
  // tokens * chosen][adapter_rank].
  float* low_rank[3];

  ArgmaxPiece* argmax;   // of [logit rows][vocab]
  GemmScratch* scratch;  // [threads]
};

// with_bf16_tiles: for a table that has them.
size_t workspace_bytes(const ExecutorSpec& spec, int64_t attended_cols, int threads, bool with_bf16_tiles);

}  // namespace millrace::cpu
