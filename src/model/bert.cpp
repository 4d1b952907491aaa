// BERT: learned positions, norms behind each sum, tokens that see all others. Devlin et al. 2018. Its hidden
// states become embeddings; there is no output matrix.
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/classifier_head.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/layer_norm.h"
#include "model/text_encoder.h"

namespace millrace {
namespace {

class Bert final : public Architecture {
 public:
  std::string_view name() const override { return "bert"; }
  std::vector<std::string_view> model_types() const override { return {"bert"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
      "max_position_embeddings": 512, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "type_vocab_size": 2,
      "tie_word_embeddings": true})";
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_sizes(reader, config);
    config.learned_positions = true;
    config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
    read_layer_norm(reader, config, "layer_norm_eps");
    read_activation(reader, config, "hidden_act", Activation::kGelu);
    read_encoder(reader, config);
    config.own.emplace(kTypes, types_in(reader));
    config.head.pair_types = types_in(reader) > 1;
    if (reader.is_gguf()) return;
    const auto positions = reader.hf().find("position_embedding_type");
    if (positions != reader.hf().end() && *positions != "absolute")
      refuse(reader, "position_embedding_type", positions->dump(), "\"absolute\"");
    if (reader.flag_or("", "is_decoder", false)) refuse(reader, "is_decoder", "true", "an encoder");
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.config().ffn);
    keys.size("token_type_count", static_cast<int64_t>(keys.config().own.at(std::string(kTypes))));
    write_layer_norm(keys);
    write_encoder(keys);
  }

  HfNames hf_names() const override {
    return {.embedding = "embeddings.word_embeddings.weight",
            .output_norm = "",
            .output = "",
            .layers = "encoder.layer.",
            .has_output_norm = false,
            .prefix = "bert."};
  }

  std::vector<WeightSpec> outer_weights(const ModelConfig& c) const override {
    using M = ModelWeights;
    const auto types = static_cast<int64_t>(c.own.at(std::string(kTypes)));
    std::vector<WeightSpec> to = {outer_table("position_embd.weight", "embeddings.position_embeddings.weight",
                                              c.context_length, c.hidden, &M::positions),
                                  outer_table("token_types.weight", "embeddings.token_type_embeddings.weight",
                                              types, c.hidden, &M::token_types),
                                  outer_vector("token_embd_norm.weight", "embeddings.LayerNorm.weight",
                                               c.hidden, &M::embedding_norm, Presence::kRequired, 0.0),
                                  outer_vector("token_embd_norm.bias", "embeddings.LayerNorm.bias", c.hidden,
                                               &M::embedding_norm_bias, Presence::kRequired, kBiasSpread)};
    // The pooler, a tanh, and the labels' rows.
    add_head(to, c, {.dense = "pooler.dense.weight", .dense_bias = "pooler.dense.bias"});
    return to;
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int) const override {
    using W = LayerWeights;
    const Presence biases = Presence::kRequired;
    const int64_t n = c.hidden;
    std::vector<WeightSpec> to;
    const auto fused = [&](WeightSpec spec, int64_t which) {
      const std::string_view whole = spec.shape.size() == 1 ? "attn_qkv.bias" : "attn_qkv.weight";
      to.push_back(part_of(std::move(spec), {whole, "", which * n, 3 * n}));
    };
    const auto linear = [&](std::string_view weight, std::string_view bias, std::string_view hf_weight,
                            std::string_view hf_bias, int64_t rows, int64_t cols, WeightMember w,
                            WeightMember b) {
      to.push_back(matrix_weight(weight, hf_weight, rows, cols, w));
      to.push_back(bias_weight(bias, hf_bias, {rows}, b, biases));
    };
    fused(matrix_weight("attn_q.weight", "attention.self.query.weight", n, n, &W::attn_q), 0);
    fused(bias_weight("attn_q.bias", "attention.self.query.bias", {n}, &W::attn_q_bias, biases), 0);
    fused(matrix_weight("attn_k.weight", "attention.self.key.weight", n, n, &W::attn_k), 1);
    fused(bias_weight("attn_k.bias", "attention.self.key.bias", {n}, &W::attn_k_bias, biases), 1);
    fused(matrix_weight("attn_v.weight", "attention.self.value.weight", n, n, &W::attn_v), 2);
    fused(bias_weight("attn_v.bias", "attention.self.value.bias", {n}, &W::attn_v_bias, biases), 2);
    linear("attn_output.weight", "attn_output.bias", "attention.output.dense.weight",
           "attention.output.dense.bias", n, n, &W::attn_output, &W::attn_output_bias);
    add_layer_norm(to,
                   {"attn_output_norm.weight", "attn_output_norm.bias", "attention.output.LayerNorm.weight",
                    "attention.output.LayerNorm.bias"},
                   n, &W::attn_post_norm, &W::attn_post_norm_bias, biases);
    linear("ffn_up.weight", "ffn_up.bias", "intermediate.dense.weight", "intermediate.dense.bias", c.ffn, n,
           &W::ffn_up, &W::ffn_up_bias);
    linear("ffn_down.weight", "ffn_down.bias", "output.dense.weight", "output.dense.bias", n, c.ffn,
           &W::ffn_down, &W::ffn_down_bias);
    add_layer_norm(to,
                   {"layer_output_norm.weight", "layer_output_norm.bias", "output.LayerNorm.weight",
                    "output.LayerNorm.bias"},
                   n, &W::ffn_post_norm, &W::ffn_post_norm_bias, biases);
    return to;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));             // no norm before it
    x.rope_append_kv(rope_of(config, index));  // no angles
    x.attend(attend_both_ways(w, config, index));
    Projection projection = project_of(w, config);
    projection.norm_after = {};
    x.project_add(projection);
    x.norm_residual(norm_of(config, w.attn_post_norm, w.attn_post_norm_bias));
    Ffn ffn = ffn_of(w, config);
    ffn.norm_after = {};
    x.ffn_add(ffn);
    x.norm_residual(norm_of(config, w.ffn_post_norm, w.ffn_post_norm_bias));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"bert-base", R"({"model_type": "bert", "vocab_size": 30522})"},
            {"tiny-bert", R"({"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 640, "max_position_embeddings": 256})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("gpt-2", vocab);
  }

 private:
  static constexpr std::string_view kTypes = "token types";

  [[noreturn]] static void refuse(const ConfigReader& reader, std::string_view key, const std::string& found,
                                  std::string_view expected) {
    throw_error(ErrorCode::kUnsupported, "{}: config.json: {}: found {}, expected {}",
                reader.checkpoint().path(), key, found, expected);
  }
  // Rows of the table: a GGUF file need not say how many.
  static float types_in(const ConfigReader& reader) {
    int64_t rows = 2;
    if (reader.is_gguf()) {
      const TensorView* table = reader.checkpoint().find_tensor("token_types.weight");
      if (table != nullptr) rows = table->rank == 1 ? 1 : table->shape[0];
    }
    return static_cast<float>(reader.integer_or("token_type_count", "type_vocab_size", 1, 1 << 16, rows));
  }
};

const Bert kBertObject{};

}  // namespace

const Architecture& kBert = kBertObject;

}  // namespace millrace
