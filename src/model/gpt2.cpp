// GPT-2: LayerNorm, learned positions, one matrix for q, k and v, GELU without a gate. Radford et al. 2019.
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/layer_norm.h"

namespace millrace {
namespace {

// Scores of layer l are divided by l + 1 as well: scale_attn_by_inverse_layer_idx, which GGUF cannot say.
constexpr std::string_view kScaledByLayer = "scale_attn_by_inverse_layer_idx";

class Gpt2 final : public Architecture {
 public:
  std::string_view name() const override { return "gpt2"; }
  std::vector<std::string_view> model_types() const override { return {"gpt2"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
      "max_position_embeddings": 1024, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
      "tie_word_embeddings": true})";
  }
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"n_embd", "hidden_size"},
            {"n_layer", "num_hidden_layers"},
            {"n_head", "num_attention_heads"},
            {"n_positions", "max_position_embeddings"}};
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_sizes(reader, config);
    config.learned_positions = true;
    config.head_dim = config.hidden / config.heads;
    config.kv_heads = config.heads;
    if (config.head_dim * config.heads != config.hidden)
      reader.fail("hidden size", fmt::format("{}", config.hidden),
                  fmt::format("a multiple of {} heads", config.heads));
    config.ffn = reader.integer_or("feed_forward_length", "n_inner", 1, 1 << 20, 4 * int64_t{config.hidden});
    read_layer_norm(reader, config, "layer_norm_epsilon");
    read_activation(reader, config, "activation_function", Activation::kGeluTanh);
    read_attention_scale(reader, config);
    if (reader.is_gguf()) return;
    if (!reader.flag_or("", "scale_attn_weights", true)) config.attention_scale = 1.0f;
    if (reader.flag_or("", kScaledByLayer, false)) config.own.emplace(kScaledByLayer, 1.0f);
    if (reader.flag_or("", "add_cross_attention", false))
      throw_error(ErrorCode::kUnsupported,
                  "{}: config.json: add_cross_attention: found true, expected a decoder of its own",
                  reader.checkpoint().path());
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.config().ffn);
    write_layer_norm(keys);
    write_attention_scale(keys);
  }

  HfNames hf_names() const override {
    return {
        .embedding = "wte.weight", .output_norm = "ln_f.weight", .layers = "h.", .prefix = "transformer."};
  }

  std::vector<WeightSpec> outer_weights(const ModelConfig& c) const override {
    using M = ModelWeights;
    return {outer_table("position_embd.weight", "wpe.weight", c.context_length, c.hidden, &M::positions),
            outer_vector("output_norm.bias", "ln_f.bias", c.hidden, &M::output_norm_bias, Presence::kRequired,
                         kBiasSpread)};
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int) const override {
    using W = LayerWeights;
    const Presence biases = Presence::kRequired;
    std::vector<WeightSpec> to;
    const auto matrix = [&](std::string_view role, std::string_view hf, int64_t rows, int64_t cols,
                            WeightMember member) {
      to.push_back(matrix_weight(role, hf, rows, cols, member));
      to.back().hf_transposed = true;
    };
    const auto fused = [&](const WeightSpec& weight, const WeightSpec& bias, int64_t which) {
      const int64_t first = which * c.hidden, all = 3 * int64_t{c.hidden};
      to.push_back(part_of(weight, {"attn_qkv.weight", "attn.c_attn.weight", first, all}, true));
      to.push_back(part_of(bias, {"attn_qkv.bias", "attn.c_attn.bias", first, all}));
    };
    add_layer_norm(to, {"attn_norm.weight", "attn_norm.bias", "ln_1.weight", "ln_1.bias"}, c.hidden,
                   &W::attn_norm, &W::attn_norm_bias, biases);
    fused(matrix_weight("attn_q.weight", "", c.hidden, c.hidden, &W::attn_q),
          bias_weight("attn_q.bias", "", {c.hidden}, &W::attn_q_bias, biases), 0);
    fused(matrix_weight("attn_k.weight", "", c.hidden, c.hidden, &W::attn_k),
          bias_weight("attn_k.bias", "", {c.hidden}, &W::attn_k_bias, biases), 1);
    fused(matrix_weight("attn_v.weight", "", c.hidden, c.hidden, &W::attn_v),
          bias_weight("attn_v.bias", "", {c.hidden}, &W::attn_v_bias, biases), 2);
    matrix("attn_output.weight", "attn.c_proj.weight", c.hidden, c.hidden, &W::attn_output);
    to.push_back(
        bias_weight("attn_output.bias", "attn.c_proj.bias", {c.hidden}, &W::attn_output_bias, biases));
    add_layer_norm(to, {"ffn_norm.weight", "ffn_norm.bias", "ln_2.weight", "ln_2.bias"}, c.hidden,
                   &W::ffn_norm, &W::ffn_norm_bias, biases);
    matrix("ffn_up.weight", "mlp.c_fc.weight", c.ffn, c.hidden, &W::ffn_up);
    to.push_back(bias_weight("ffn_up.bias", "mlp.c_fc.bias", {c.ffn}, &W::ffn_up_bias, biases));
    matrix("ffn_down.weight", "mlp.c_proj.weight", c.hidden, c.ffn, &W::ffn_down);
    to.push_back(bias_weight("ffn_down.bias", "mlp.c_proj.bias", {c.hidden}, &W::ffn_down_bias, biases));
    return to;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));
    x.rope_append_kv(rope_of(config, index));  // no angles: positions are in the embedding
    Attend attend = attend_of(w, config, index);
    if (config.own.contains(kScaledByLayer)) attend.scale /= static_cast<float>(index + 1);
    x.attend(attend);
    x.project_add(project_of(w, config));
    x.ffn_add(ffn_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {
        {"gpt2", R"({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
      "vocab_size": 50257})"},
        {"tiny-gpt2", R"({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 512,
      "n_inner": 96, "vocab_size": 640})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("gpt-2", vocab);
  }
};

const Gpt2 kGpt2Object{};

}  // namespace

const Architecture& kGpt2 = kGpt2Object;

}  // namespace millrace
