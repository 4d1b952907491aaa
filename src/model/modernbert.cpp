// ModernBERT: an encoder with rotary positions, norms before each block, GELU with a gate, and layers that
// see a window to both sides. Warner et al. 2024.
#include <algorithm>
#include <cmath>
#include <variant>

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

constexpr std::string_view kLocalTheta = "local rope theta";
constexpr std::string_view kActivation = "hidden_activation";  // GGUF's key

class ModernBert final : public Architecture {
 public:
  std::string_view name() const override { return "modern-bert"; }
  std::vector<std::string_view> model_types() const override { return {"modernbert"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12,
      "max_position_embeddings": 8192, "norm_eps": 1e-5, "hidden_activation": "gelu", "local_attention": 128,
      "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
      "tie_word_embeddings": true})";
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_sizes(reader, config);
    config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
    read_layer_norm(reader, config, "norm_eps");
    read_activation(reader, config, "hidden_activation", gguf_activation(reader));
    read_encoder(reader, config);
    read_classifier(reader, config);
    // Half of it lies on either side; a token sees itself too.
    const int32_t around = reader.integer("attention.sliding_window", "local_attention", 1, 1 << 28);
    read_windows(reader, config, around / 2 + 1);
    config.rotary_dims = config.head_dim;
    config.rope_theta = theta(reader, "rope.freq_base", "global_rope_theta", "full_attention", 160000);
    const double local = theta(reader, "rope.freq_base_swa", "local_rope_theta", "sliding_attention", 10000);
    config.own.emplace(kLocalTheta, static_cast<float>(local));
    config.rope_inv_freq = angles(reader, config, config.rope_theta);
    config.rope_window_inv_freq = angles(reader, config, local);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& config = keys.config();
    write_sizes(keys, config.ffn);
    write_layer_norm(keys);
    write_encoder(keys);
    keys.real("rope.freq_base", config.rope_theta);
    keys.real("rope.freq_base_swa", config.own.at(std::string(kLocalTheta)));
    const int32_t window = *std::max_element(config.layer_windows.begin(), config.layer_windows.end());
    keys.size("attention.sliding_window", std::max(1, 2 * (window - 1)));
    std::vector<bool> slides;
    for (const int32_t w : config.layer_windows) slides.push_back(w > 0);
    keys.flags("attention.sliding_window_pattern", slides);
    if (config.ffn_activation == Activation::kSilu) keys.text(kActivation, "silu");
  }

  HfNames hf_names() const override {
    return {.embedding = "embeddings.tok_embeddings.weight",
            .output_norm = "final_norm.weight",
            .output = "",
            .layers = "layers.",
            .prefix = "model."};
  }

  std::vector<WeightSpec> outer_weights(const ModelConfig& c) const override {
    using M = ModelWeights;
    std::vector<WeightSpec> to = {outer_vector("token_embd_norm.weight", "embeddings.norm.weight", c.hidden,
                                               &M::embedding_norm, Presence::kRequired, 0.0),
                                  outer_vector("token_embd_norm.bias", "embeddings.norm.bias", c.hidden,
                                               &M::embedding_norm_bias, Presence::kRare, kBiasSpread),
                                  outer_vector("output_norm.bias", "final_norm.bias", c.hidden,
                                               &M::output_norm_bias, Presence::kRare, kBiasSpread)};
    add_head(to, c,
             {.dense = "head.dense.weight",
              .dense_bias = "head.dense.bias",
              .has_dense_bias = Presence::kRare,
              .norm = "head.norm.weight",
              .norm_bias = "head.norm.bias"});
    return to;
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int layer) const override {
    using W = LayerWeights;
    const Presence rare = Presence::kRare;
    const int64_t n = c.hidden;
    std::vector<WeightSpec> to;
    const auto part = [&](WeightSpec spec, std::string_view gguf, std::string_view hf, int64_t which) {
      const int64_t rows = spec.shape[0], parts = gguf.starts_with("attn") ? 3 : 2;
      to.push_back(part_of(std::move(spec), {gguf, hf, which * rows, parts * rows}));
    };
    if (layer > 0) {  // the first reads what the embedding's norm gives
      add_layer_norm(to, {"attn_norm.weight", "attn_norm.bias", "attn_norm.weight", "attn_norm.bias"}, n,
                     &W::attn_norm, &W::attn_norm_bias, rare);
    }
    part(matrix_weight("attn_q.weight", "", n, n, &W::attn_q), "attn_qkv.weight", "attn.Wqkv.weight", 0);
    part(matrix_weight("attn_k.weight", "", n, n, &W::attn_k), "attn_qkv.weight", "attn.Wqkv.weight", 1);
    part(matrix_weight("attn_v.weight", "", n, n, &W::attn_v), "attn_qkv.weight", "attn.Wqkv.weight", 2);
    part(bias_weight("attn_q.bias", "", {n}, &W::attn_q_bias, rare), "attn_qkv.bias", "attn.Wqkv.bias", 0);
    part(bias_weight("attn_k.bias", "", {n}, &W::attn_k_bias, rare), "attn_qkv.bias", "attn.Wqkv.bias", 1);
    part(bias_weight("attn_v.bias", "", {n}, &W::attn_v_bias, rare), "attn_qkv.bias", "attn.Wqkv.bias", 2);
    to.push_back(matrix_weight("attn_output.weight", "attn.Wo.weight", n, n, &W::attn_output));
    to.push_back(bias_weight("attn_output.bias", "attn.Wo.bias", {n}, &W::attn_output_bias, rare));
    add_layer_norm(to, {"ffn_norm.weight", "ffn_norm.bias", "mlp_norm.weight", "mlp_norm.bias"}, n,
                   &W::ffn_norm, &W::ffn_norm_bias, rare);
    // One matrix for both, the gate first; GGUF calls it ffn_up. Files of our own have them apart.
    part(matrix_weight("ffn_gate.weight", "", c.ffn, n, &W::ffn_gate), "ffn_up.weight", "mlp.Wi.weight", 0);
    part(matrix_weight("ffn_up.weight", "", c.ffn, n, &W::ffn_up), "ffn_up.weight", "mlp.Wi.weight", 1);
    part(bias_weight("ffn_gate.bias", "", {c.ffn}, &W::ffn_gate_bias, rare), "ffn_up.bias", "mlp.Wi.bias", 0);
    part(bias_weight("ffn_up.bias", "", {c.ffn}, &W::ffn_up_bias, rare), "ffn_up.bias", "mlp.Wi.bias", 1);
    to.push_back(matrix_weight("ffn_down.weight", "mlp.Wo.weight", n, c.ffn, &W::ffn_down));
    to.push_back(bias_weight("ffn_down.bias", "mlp.Wo.bias", {n}, &W::ffn_down_bias, rare));
    return to;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));
    x.rope_append_kv(rope_of(config, index));
    x.attend(attend_both_ways(w, config, index));
    x.project_add(project_of(w, config));
    x.ffn_add(ffn_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"modernbert-base", R"({"model_type": "modernbert", "vocab_size": 50368})"},
            {"tiny-modernbert", R"({"model_type": "modernbert", "num_hidden_layers": 4, "hidden_size": 64,
      "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 640, "max_position_embeddings": 512,
      "local_attention": 32})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("gpt-2", vocab);
  }

 private:
  static void read_classifier(const ConfigReader& reader, ModelConfig& config) {
    config.head.activation = ModelConfig::Head::Activation::kGelu;
    if (config.head.labels == 0 || reader.is_gguf()) return;
    const std::string pooling = reader.hf().value("classifier_pooling", "cls");
    if (pooling != "cls" && pooling != "mean")
      reader.fail("config.json: classifier_pooling", pooling, "cls or mean");
    if (pooling == "mean") config.pooling = ModelConfig::Pooling::kMean;
    const std::string activation = reader.hf().value("classifier_activation", "gelu");
    if (activation != "gelu") reader.fail("config.json: classifier_activation", activation, "gelu");
  }

  // llama.cpp's names; it takes others for GELU.
  static Activation gguf_activation(const ConfigReader& reader) {
    if (!reader.is_gguf()) return Activation::kGelu;
    const std::string key = fmt::format("modern-bert.{}", kActivation);
    const std::string_view name = reader.checkpoint().gguf->get_string(key, "gelu");
    if (name == "silu" || name == "swish" || name == "swiglu") return Activation::kSilu;
    if (name == "gelu" || name == "geglu") return Activation::kGelu;
    reader.fail(key, std::string(name), "gelu or silu");
  }

  // Every so many layers one sees everything, the first of them; or as layer_types has it.
  static void read_windows(const ConfigReader& reader, ModelConfig& config, int32_t window) {
    const auto slides_every = [](int32_t every) { return [every](int32_t l) { return l % every != 0; }; };
    if (!reader.is_gguf()) {
      const int32_t every = reader.integer_or("", "global_attn_every_n_layers", 1, 1024, 3);
      return read_hf_windows(reader, config, window, slides_every(every));
    }
    const std::string key = config.architecture + ".attention.sliding_window_pattern";
    const auto& keys = reader.checkpoint().gguf->metadata();
    const auto pattern = keys.find(key);  // one flag per layer, or how often one does not slide
    const io::GgufArray* flags =
        pattern == keys.end() ? nullptr : std::get_if<io::GgufArray>(&pattern->second);
    if (flags != nullptr && flags->integers.size() != static_cast<size_t>(config.layers))
      reader.fail(key, fmt::format("{} entries", flags->integers.size()), fmt::format("{}", config.layers));
    const int32_t every =
        flags != nullptr ? 1 : reader.integer_or("attention.sliding_window_pattern", "", 1, 1024, 3);
    const auto by_rule = slides_every(every);
    for (int32_t l = 0; l < config.layers; ++l) {
      if (flags != nullptr ? flags->integers[static_cast<size_t>(l)] != 0 : by_rule(l))
        config.layer_windows[l] = window;
    }
  }

  // rope_parameters of the kind of layer (newer), or a field of its own; GGUF's key.
  static double theta(const ConfigReader& reader, std::string_view gguf, std::string_view hf,
                      std::string_view layers, double in_gguf) {
    double value = reader.real_or(gguf, hf, in_gguf);
    if (!reader.is_gguf()) {
      const auto all = reader.hf().find("rope_parameters");
      if (all != reader.hf().end() && all->is_object() && all->contains(layers) &&
          (*all)[layers].is_object()) {
        const nlohmann::json& own = (*all)[layers];
        if (own.value("rope_type", "default") != "default")
          throw_error(ErrorCode::kUnsupported, "{}: config.json: rope_type: found {}, expected default",
                      reader.checkpoint().path(), own["rope_type"].dump());
        value = reader.hf_real_or(own, "rope_theta", value);
      }
      const auto scaling = reader.hf().find("rope_scaling");
      if (scaling != reader.hf().end() && scaling->is_object() && !scaling->empty())
        throw_error(ErrorCode::kUnsupported, "{}: config.json: rope_scaling: found {}, expected none",
                    reader.checkpoint().path(), scaling->dump());
    }
    if (!(value > 1)) reader.fail("rope theta", fmt::format("{}", value), "above 1");
    return value;
  }

  static std::vector<float> angles(const ConfigReader& reader, const ModelConfig& config, double theta) {
    if (config.head_dim % 2 != 0)
      reader.fail("rotary dimensions", fmt::format("{}", config.head_dim), "an even number");
    std::vector<float> out;
    for (int32_t i = 0; i < config.head_dim; i += 2)
      out.push_back(static_cast<float>(std::pow(theta, -static_cast<double>(i) / config.head_dim)));
    return out;
  }
};

const ModernBert kModernBertObject{};

}  // namespace

const Architecture& kModernBert = kModernBertObject;

}  // namespace millrace
