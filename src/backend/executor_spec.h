// ExecutorSpec: everything an executor sizes its memory by, and how a block of its KV pools is laid out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/paging.h"
#include "base/state_block.h"
#include "kernels/quant/kv_types.h"
#include "tensor/dtype.h"

namespace millrace {

struct KvGroupSpec {
  int32_t window = 0;      // 0: full attention
  int32_t num_layers = 0;  // how many layers live in this group
  int32_t num_blocks = 0;  // pool size
  bool state = false;      // of layers with a state; the window is kStateWindow
  // Of its layers' heads, where groups differ in them (Gemma 4); 0: ExecutorSpec's.
  int32_t kv_heads = 0, head_dim = 0;
  // Ranks that the blocks are spread over (base/paging.h), num_blocks of all of them together; a group that
  // is not spread is whole on every rank.
  int32_t shelves = 1;
  int32_t states_apart = 0;  // of a state group: tokens between the states that the prefix cache keeps
  int32_t blocks_here() const { return num_blocks / shelves; }  // of each rank
};

// Of latent attention (NormLatentQkv); rank 0: a model has none.
struct LatentShape {
  int32_t rank = 0, rope = 0, nope = 0, value = 0;
  int32_t q_rank = 0;  // 0: queries are not compressed
  // Of the indexer, and how many tokens it chooses; 0: there is none.
  int32_t index_heads = 0, index_dim = 0, index_top = 0;
};

// Everything an executor sizes its memory by.
struct ExecutorSpec {
  int32_t max_tokens = 0;  // rows per step
  int32_t max_logit_rows = 0;
  int32_t max_context = 0;  // longest sequence
  int32_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  int32_t ffn = 0;  // dense intermediate size, or a shared expert's; 0 without
  int32_t experts = 0, experts_per_token = 0, expert_ffn = 0;  // 0 without experts
  LatentShape latent = {};   // where there is any: kv_heads is 1, head_dim rope + rank
  int32_t adapter_rank = 0;  // the largest of any adapter; 0: no step has adapters
  DType kv_type = DType::kF32;
  std::vector<KvGroupSpec> kv_groups;
  // Where layer l's keys and values live, or its state; group -1: it keeps nothing. Layers that read another
  // one's keys and values have its place.
  struct LayerPlace {
    int32_t group = 0, index = 0;
  };
  std::vector<LayerPlace> layers;
  // Where the states of layers live that have keys and values too (Falcon H1), [layers]; empty: none has
  // both.
  std::vector<LayerPlace> beside;
  LayerPlace state_place(int layer) const {
    return (beside.empty() ? layers : beside)[static_cast<size_t>(layer)];
  }

  StateShape state = {};         // of the layers of a state group
  bool gated_attention = false;  // NormQkv::gated
  int32_t layer_input = 0;       // columns of a layer's input (LayerInputs); 0: there are none
  bool expert_norms = false;     // Experts::norm
  bool page_summaries = false;   // SequenceSlice::sparse_pages may be above 0

  // Key/value heads of a group's layers and their size. Those of the spec itself are the largest.
  int32_t kv_heads_of(int group) const {
    const int32_t own = kv_groups[static_cast<size_t>(group)].kv_heads;
    return own > 0 ? own : kv_heads;
  }
  int32_t head_dim_of(int group) const {
    const int32_t own = kv_groups[static_cast<size_t>(group)].head_dim;
    return own > 0 ? own : head_dim;
  }
  // Of a latent cache values are the keys.
  int32_t kv_parts() const { return latent.rank > 0 ? 1 : 2; }
  // A layer's part of a block of group g: [key, value][kv_heads][16][head_dim]; of a latent cache without the
  // values, and with an indexer's keys [16][index_dim] behind; of a state group a StateBlock, in float32.
  size_t kv_layer_bytes(int group) const {
    if (kv_groups[static_cast<size_t>(group)].state)
      return static_cast<size_t>(StateBlock(state).floats) * sizeof(float);
    const size_t index = latent.index_dim > 0 ? kv_head_bytes(kv_type, latent.index_dim) : 0;
    return kBlockTokens * (static_cast<size_t>(kv_parts()) * static_cast<size_t>(kv_heads_of(group)) *
                               kv_head_bytes(kv_type, head_dim_of(group)) +
                           index);
  }
  // One block of group g: [layers in group], contiguous.
  size_t kv_block_bytes(int group) const {
    return static_cast<size_t>(kv_groups[static_cast<size_t>(group)].num_layers) * kv_layer_bytes(group);
  }
  // Bounds of a block's keys beside it, for sparse attention: [layers in group][kv_heads][least, largest]
  // [head_dim in whole sixteens] in bf16, of groups with full attention. They follow from the block's bytes:
  // who copies or restores a block need not know of them.
  size_t page_summary_bytes(int group) const {
    const KvGroupSpec& g = kv_groups[static_cast<size_t>(group)];
    if (!page_summaries || g.state || g.window > 0) return 0;
    return static_cast<size_t>(g.num_layers) * static_cast<size_t>(kv_heads) * 2 *
           ((static_cast<size_t>(head_dim) + 15) / 16 * 16) * sizeof(uint16_t);
  }
  // What a block of the pool takes in all.
  size_t pool_block_bytes(int group) const { return kv_block_bytes(group) + page_summary_bytes(group); }
};

}  // namespace millrace
