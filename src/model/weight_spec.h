// WeightSpec: what an architecture says of one weight of a layer: its name in both kinds of files, its shape,
// what it is for, where the layer finds it, and what a synthetic model has in its place. Loading, quantizing
// and `millrace synth` go by the same list of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace millrace {

// The weights of one layer. An architecture with weights that no other has derives from it and returns its
// own struct from Architecture::new_layer().
struct LayerWeights {
  virtual ~LayerWeights() = default;

  WeightPtr attn_norm, attn_q, attn_k, attn_v, attn_output;
  WeightPtr attn_q_bias, attn_k_bias, attn_v_bias, attn_output_bias;
  WeightPtr attn_q_norm, attn_k_norm, attn_sinks;
  WeightPtr attn_norm_bias, ffn_norm_bias;  // of LayerNorms
  WeightPtr attn_post_norm,
      attn_post_norm_bias;  // between attention and the residual stream, or (BERT) of both
  WeightPtr ffn_post_norm, ffn_post_norm_bias;
  WeightPtr ffn_norm, ffn_gate, ffn_up, ffn_down;  // dense
  WeightPtr ffn_gate_bias, ffn_up_bias, ffn_down_bias;
  WeightPtr router, router_bias;  // experts
  WeightPtr gate_experts, up_experts, down_experts, gate_experts_bias, up_experts_bias, down_experts_bias;
  WeightPtr choice_bias;                                      // Route::choice_bias
  WeightPtr shared_gate, shared_up, shared_down, shared_mix;  // Experts::Shared
};

// The weights outside the layers.
struct ModelWeights {
  WeightPtr token_embedding, output_norm, output;  // output is null when tied to token_embedding
  WeightPtr output_norm_bias, output_bias;
  WeightPtr positions, token_types, embedding_norm, embedding_norm_bias;  // Embed's
  WeightPtr layer_table, layer_projection, layer_projection_norm;         // LayerInputs'
  std::vector<std::unique_ptr<LayerWeights>> layers;
};

// Where a weight goes in its layer's struct; where one outside the layers goes.
using WeightMember = WeightPtr LayerWeights::*;
using OuterMember = WeightPtr ModelWeights::*;
// The same for a member of a struct derived from LayerWeights.
template <class Own>
WeightMember own_weight(WeightPtr Own::*member) {
  return static_cast<WeightMember>(member);
}

enum class Presence {
  kRequired,  // a file without it is refused
  kUsual,     // published models have it; loaded where it is there, and synthetic models have it too
  kRare,      // loaded where it is there; synthetic models do without
};

// How a Hugging Face directory stores weights of experts, [experts, rows, cols] or, biases, [experts, rows].
struct HfExperts {
  std::string_view single = {};  // "gate_proj": one tensor per expert, mlp.experts.E.gate_proj.weight
  // "gate_up_proj": one tensor for all, mlp.experts.gate_up_proj: as floats [experts, cols, rows], or as
  // MXFP4 in gate_up_proj_blocks and gate_up_proj_scales; its bias is gate_up_proj_bias.
  std::string_view fused = {};
  int64_t first_row = 0, row_step = 1;  // which rows of the fused tensor
  std::string_view before = "mlp.experts.";
  // "mlp.experts.gate_up_proj", looked for where `single` is not there or not named: one tensor for all, as
  // transformers 5 holds it, [experts, all rows, cols]. Of it and of `fused`, all rows are so many times this
  // one's.
  std::string_view stacked = {};
  int64_t parts = 1;
};

// Where a file holds a weight as rows [first_row, first_row + rows) of a larger one: q, k and v in one
// matrix.
struct PartOf {
  std::string_view gguf = {};  // "attn_qkv.weight", or empty: not in GGUF files
  std::string_view hf = {};    // "self_attn.qkv_proj.weight", or empty: not in Hugging Face's
  int64_t first_row = 0, all_rows = 0;
};

// Where a file holds a weight [heads, rows, cols] in a matrix [heads * head_rows, ...]: rows [first_row, ...)
// of each head's, or, turned, these transposed.
struct HeadsOf {
  std::string_view gguf = {}, hf = {};  // "attn_kv_b.weight", "self_attn.kv_b_proj.weight"
  int64_t first_row = 0, head_rows = 0;
  bool turned = false;
};

// Value heads of linear attention, of which a key head has several. Hugging Face files have those of a key
// head side by side; llama.cpp's files of some architectures have the first of every key head, then the
// second: rows from `first` on, `dim` of them a head, or columns.
struct HeadTiles {
  int64_t first = 0, key_heads = 1, per_key = 1, dim = 1;
  bool columns = false;
  // Where row or column i of the tiled order is in the other.
  int64_t source(int64_t i) const {
    if (i < first) return i;
    const int64_t head = (i - first) / dim, key = head % key_heads, of = head / key_heads;
    return first + (key * per_key + of) * dim + (i - first) % dim;
  }
};

struct WeightSpec {
  std::string_view role;       // "attn_q.weight": its GGUF name behind "blk.N."
  std::string_view hf = {};    // "self_attn.q_proj.weight": its Hugging Face name behind "model.layers.N."
  std::vector<int64_t> shape;  // slowest first; [out, in] or [experts, out, in] of matrices
  WeightUse use = WeightUse::kVector;
  WeightMember to = nullptr;
  Presence presence = Presence::kRequired;
  double spread = 0.0;  // of a synthetic model's random values; 0: ones

  std::optional<float> synthetic = {};  // what a synthetic model has in every place, instead of random values

  // What GGUF files may call it beside its role; where there are any, synthetic models take the first.
  std::vector<std::string_view> gguf = {};
  std::optional<HfExperts> experts = {};  // instead of `hf`
  // Looked for when the weight is not there under its own name.
  std::optional<PartOf> part_of = {};
  std::optional<HeadsOf> heads_of = {};
  // Outside the layers: where it goes, instead of `to`.
  OuterMember outer = nullptr;
  bool on_host = false;  // read by ClassifierHead alone: no device takes it in
  // What is added to a vector of a Hugging Face file: Gemma's norms are stored less one, but not in GGUF.
  float hf_offset = 0.0f;
  float hf_scale = 1.0f;  // what it is multiplied by, likewise
  // A Hugging Face file has the logarithm of the number less its sign: exp of it, negative, is the weight.
  bool hf_negative_log = false;
  std::optional<HeadTiles> hf_tiles = {};  // a Hugging Face file's heads are put in this order
  bool hf_transposed = false;              // Hugging Face stores [in, out] (GPT-2)
  // Looked for in a Hugging Face file where it is not there under its own name: its rows, a vector each.
  std::vector<std::string_view> hf_rows = {};
  // Hugging Face keeps the two halves of a rotated head apart; in GGUF files of this architecture their rows
  // alternate.
  bool interleaved_in_gguf = false;
};

}  // namespace millrace
