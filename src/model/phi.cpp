// Phi 1, 1.5 and 2: attention and feed-forward layer side by side behind one LayerNorm, biases everywhere,
// the first part of each head rotated. Li et al. 2023.
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/layer_norm.h"
#include "model/rope.h"

namespace millrace {
namespace {

class Phi final : public Architecture {
 public:
  std::string_view name() const override { return "phi2"; }
  std::vector<std::string_view> model_types() const override { return {"phi"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
      "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new",
      "partial_rotary_factor": 0.5})";
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_sizes(reader, config);
    config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
    read_layer_norm(reader, config, "layer_norm_eps");
    read_activation(reader, config, "hidden_act", Activation::kGeluTanh);
    if (!reader.is_gguf()) {
      config.rotary_dims = static_cast<int32_t>(config.head_dim * rotated_part(reader));
      if (reader.flag_or("", "qk_layernorm", false))
        throw_error(ErrorCode::kUnsupported, "{}: config.json: qk_layernorm: found true, expected false",
                    reader.checkpoint().path());
    }
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.config().ffn);
    keys.size("rope.dimension_count", keys.config().rotary_dims);
    write_layer_norm(keys);
    write_rope(keys);
  }

  HfNames hf_names() const override { return {.output_norm = "model.final_layernorm.weight"}; }

  std::vector<WeightSpec> outer_weights(const ModelConfig& c) const override {
    using M = ModelWeights;
    return {outer_vector("output_norm.bias", "model.final_layernorm.bias", c.hidden, &M::output_norm_bias,
                         Presence::kRequired, kBiasSpread),
            outer_vector("output.bias", "lm_head.bias", c.vocab, &M::output_bias, Presence::kRequired,
                         kBiasSpread)};
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int) const override {
    using W = LayerWeights;
    const Presence biases = Presence::kRequired;
    const int64_t q = int64_t{c.heads} * c.head_dim, kv = int64_t{c.kv_heads} * c.head_dim;
    std::vector<WeightSpec> to;
    // Published files have three matrices, early GGUF files one.
    const auto fused = [&](WeightSpec spec, int64_t first) {
      const std::string_view whole = spec.shape.size() == 1 ? "attn_qkv.bias" : "attn_qkv.weight";
      to.push_back(part_of(std::move(spec), {whole, "", first, q + 2 * kv}));
    };
    add_layer_norm(to,
                   {"attn_norm.weight", "attn_norm.bias", "input_layernorm.weight", "input_layernorm.bias"},
                   c.hidden, &W::attn_norm, &W::attn_norm_bias, biases);
    fused(matrix_weight("attn_q.weight", "self_attn.q_proj.weight", q, c.hidden, &W::attn_q), 0);
    fused(matrix_weight("attn_k.weight", "self_attn.k_proj.weight", kv, c.hidden, &W::attn_k), q);
    fused(matrix_weight("attn_v.weight", "self_attn.v_proj.weight", kv, c.hidden, &W::attn_v), q + kv);
    fused(bias_weight("attn_q.bias", "self_attn.q_proj.bias", {q}, &W::attn_q_bias, biases), 0);
    fused(bias_weight("attn_k.bias", "self_attn.k_proj.bias", {kv}, &W::attn_k_bias, biases), q);
    fused(bias_weight("attn_v.bias", "self_attn.v_proj.bias", {kv}, &W::attn_v_bias, biases), q + kv);
    to.push_back(matrix_weight("attn_output.weight", "self_attn.dense.weight", c.hidden, q, &W::attn_output));
    to.push_back(
        bias_weight("attn_output.bias", "self_attn.dense.bias", {c.hidden}, &W::attn_output_bias, biases));
    to.push_back(matrix_weight("ffn_up.weight", "mlp.fc1.weight", c.ffn, c.hidden, &W::ffn_up));
    to.push_back(bias_weight("ffn_up.bias", "mlp.fc1.bias", {c.ffn}, &W::ffn_up_bias, biases));
    to.push_back(matrix_weight("ffn_down.weight", "mlp.fc2.weight", c.hidden, c.ffn, &W::ffn_down));
    to.push_back(bias_weight("ffn_down.bias", "mlp.fc2.bias", {c.hidden}, &W::ffn_down_bias, biases));
    return to;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));
    x.rope_append_kv(rope_of(config, index));
    x.attend(attend_of(w, config, index));
    Ffn ffn = ffn_of(w, config);
    ffn.norm = norm_of(config, w.attn_norm, w.attn_norm_bias);
    x.ffn_add(ffn);  // reads what attention has read: before attention's output is added
    x.project_add(project_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"phi-2", R"({"model_type": "phi", "num_hidden_layers": 32, "hidden_size": 2560,
      "intermediate_size": 10240, "num_attention_heads": 32, "partial_rotary_factor": 0.4, "vocab_size": 51200,
      "max_position_embeddings": 2048})"},
            {"tiny-phi", R"({"model_type": "phi", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
      "vocab_size": 640, "max_position_embeddings": 512})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("gpt-2", vocab);
  }

 private:
  // partial_rotary_factor, in rope_scaling, rope_parameters where that is not there, or beside them.
  static double rotated_part(const ConfigReader& reader) {
    const double beside = reader.hf_real(reader.hf(), "partial_rotary_factor");
    for (const char* field : {"rope_scaling", "rope_parameters"}) {
      const auto object = reader.hf().find(field);
      if (object != reader.hf().end() && object->is_object() && !object->empty())
        return reader.hf_real_or(*object, "partial_rotary_factor", beside);
    }
    return beside;
  }
};

const Phi kPhiObject{};

}  // namespace

const Architecture& kPhi = kPhiObject;

}  // namespace millrace
