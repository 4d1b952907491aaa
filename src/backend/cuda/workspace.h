// An executor's buffers on the device, and how large they are.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "kernels/cuda/attention/indexed.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {

// Products of a layer with a state begin at multiples of so many floats in Workspace::projected.
inline constexpr int64_t kProductAlignment = 64;
inline constexpr size_t kStateProducts = 8;  // of one layer, at most
inline constexpr int64_t kTimeMixParts = 7;  // r, k, v, decay, rate, mixed, gate

struct Workspace {
  // Zeros where kernels count on them, in order on the stream that steps run on.
  // attended_cols: what attention's output matrix multiplies, where that is more than this executor's heads.
  Workspace(const ExecutorSpec& spec, const Launch& at, int64_t attended_cols = 0);

  DeviceBuffer residual, normed;                 // [tokens, hidden]
  DeviceBuffer query, attention;                 // [tokens, heads, head_dim]; of a state its values too
  DeviceBuffer key, value;                       // [tokens, kv_heads, head_dim]
  DeviceBuffer gate, up;                         // [tokens, ffn] or [tokens, slots, expert_ffn]
  DeviceBuffer down;                             // [tokens, slots, hidden]
  DeviceBuffer scores, chosen, chosen_weight;    // [tokens, experts], [tokens, slots] twice
  DeviceBuffer normed_logit_rows, logits, best;  // [logit rows, hidden], [logit rows, vocab], [logit rows]
  DeviceBuffer x_bf16;                           // the normed rows as bf16, for GEMVs of experts
  DeviceBuffer moe_sync;                         // PersistentMoeSync (moe/moe.h)
  DeviceBuffer bf16_rows, act_rows;  // operands of GEMMs (gemm/round_rows.h), and of the experts' down
  DeviceBuffer split;                // GEMM tiles that are split along K (gemm/gemm.h)
  DeviceBuffer groups;               // pairs by expert (moe/group_experts.h)
  DeviceBuffer partial, arrived;     // attention: splits on CTAs of their own, and how many are done
  DeviceBuffer candidates;           // argmax
  DeviceBuffer sample_details;       // [logit rows]
  DeviceBuffer token_types;          // [tokens]: zeros, every token's row of the table of types
  DeviceBuffer mix;                  // [tokens]: what the shared expert's output is multiplied with
  DeviceBuffer compressed;           // [tokens, q_rank]: queries of latent attention
  DeviceBuffer low_rank;             // [tokens, pairs or logit rows, rank]: what adapters make of an input
  // Layers with a state, and gated attention.
  DeviceBuffer projected;       // [tokens, columns of the widest projections]: one product behind the other
  DeviceBuffer state_mix;       // [tokens, mix columns]
  DeviceBuffer convolved;       // [tokens, channels]
  DeviceBuffer decays, betas;   // [tokens, value heads]
  DeviceBuffer attention_gate;  // [tokens, heads, head_dim]
  // RWKV 7: a shifted input, the first layer's values, and products of a layer one behind the other, [tokens,
  // hidden] each.
  DeviceBuffer shifted, first_values, time_mix;
  // Gemma 4: inputs of layers [layers][tokens, size], and what they are made of, [tokens, layers * size]
  // each; what the shared expert and the others add up to, [tokens, hidden] each.
  DeviceBuffer layer_inputs, layer_table, layer_products;
  DeviceBuffer shared_sum, expert_sum;
  // Per group: [blocks][layers][key, value][kv_heads][16 x head_dim], of the group's own heads; of a state
  // group [blocks][layers] of StateBlock.
  std::vector<DeviceBuffer> pools;
  // Sparse attention. Per group: [layers][blocks][kv_heads][least, largest][padded head_dim] of bf16, empty
  // where no page is summarized; and what sparse_rows_of() rows choose at a time (attention/sparse.h).
  std::vector<DeviceBuffer> summaries;
  DeviceBuffer sparse_weights, sparse_tiles, sparse_chosen, sparse_tables, sparse_positions;
  // An indexer: [tokens, heads, dim], [tokens, dim], [tokens, heads]; and what indexed_rows_of() rows choose
  // at a time (attention/indexed.h).
  DeviceBuffer index_query, index_key, index_weights;
  DeviceBuffer indexed_scores, indexed_tokens, indexed_keys, indexed_blocks, indexed_tables,
      indexed_positions;
};

// Rows whose tokens an indexer chooses at a time; the sizes of their arrays.
int32_t indexed_rows_of(const ExecutorSpec& spec);
IndexedRows indexed_shape_of(const ExecutorSpec& spec);

// Rows that choose pages at a time, and the pages that a row's choice has room for.
int32_t sparse_rows_of(const ExecutorSpec& spec);
int32_t sparse_pages_of(const ExecutorSpec& spec);

// Bytes of all of it but the pools, and of what blocks need that leave them (block_copies.h).
size_t workspace_bytes_of(const ExecutorSpec& spec, const Device& device, int64_t attended_cols = 0);

// Of any group's, in bytes.
size_t largest_block_of(const ExecutorSpec& spec);

}  // namespace millrace::cuda
