// A made-up architecture, as a contributor would add one: this file and a line in the list of architectures
// (registry.cpp beside it). A layer is a sandwich of attention between two feed-forward layers (after Lu et
// al. 2019), the scale of its scores is a hyperparameter, and its Hugging Face files have names of their own.
// tests/new_architecture_test.py runs it through the real binary.
#include <fmt/core.h>

#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

// The feed-forward layer before attention; the one behind it is where others have theirs.
struct MacaronWeights : LayerWeights {
  WeightPtr first_norm, first_gate, first_up, first_down;
};

class Macaron final : public Architecture {
 public:
  std::string_view name() const override { return "macaron"; }
  std::vector<std::string_view> model_types() const override { return {"macaron", "macaron_text"}; }
  std::string_view hf_defaults(std::string_view) const override { return R"({"rms_norm_eps": 1e-6})"; }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
    const double scale = reader.real_or("attention.scale", "attention_multiplier", 0.0);
    if (!(scale > 0)) reader.fail("attention_multiplier", fmt::format("{}", scale), "above 0");
    config.own["attention_scale"] = static_cast<float>(scale);
    config.rope_interleaved = reader.is_gguf();
    read_rope(reader, config);
  }

  void write_keys(GgufKeys& keys) const override {
    write_sizes(keys, keys.config().ffn);
    write_norm(keys);
    keys.real("attention.scale", keys.config().own.at("attention_scale"));
    write_rope(keys);
  }

  HfNames hf_names() const override {
    return {.embedding = "transformer.wte.weight",
            .output_norm = "transformer.ln_f.weight",
            .output = "head.weight",
            .layers = "transformer.h."};
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& c, int) const override {
    using W = MacaronWeights;
    std::vector<WeightSpec> weights = {
        norm_weight("ffn_first_norm.weight", "first.norm.weight", c.hidden, own_weight(&W::first_norm)),
        matrix_weight("ffn_first_gate.weight", "first.gate.weight", c.ffn, c.hidden,
                      own_weight(&W::first_gate)),
        matrix_weight("ffn_first_up.weight", "first.up.weight", c.ffn, c.hidden, own_weight(&W::first_up)),
        matrix_weight("ffn_first_down.weight", "first.down.weight", c.hidden, c.ffn,
                      own_weight(&W::first_down))};
    add_attention(weights, c, {.interleaved_in_gguf = true});
    weights.push_back(ffn_norm_weight(c));
    add_feed_forward(weights, c);
    return weights;
  }
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<MacaronWeights>(); }

  void layer(Executor& x, const LayerWeights& weights, const ModelConfig& config, int index) const override {
    const auto& w = static_cast<const MacaronWeights&>(weights);
    x.ffn_add({.norm = {w.first_norm.get(), config.norm_eps},
               .gate = {w.first_gate.get(), nullptr},
               .up = {w.first_up.get(), nullptr},
               .down = {w.first_down.get(), nullptr}});
    x.norm_qkv(qkv_of(w, config));
    x.rope_append_kv(rope_of(config, index));
    Attend attend = attend_of(w, config, index);
    attend.scale = config.own.at("attention_scale");
    x.attend(attend);
    x.project_add(project_of(w, config));
    x.ffn_add(ffn_of(w, config));
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"tiny-macaron", R"({"model_type": "macaron", "num_hidden_layers": 2, "hidden_size": 32,
      "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
      "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1000, "attention_multiplier": 0.6,
      "tie_word_embeddings": false})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("qwen2", vocab);
  }
};

const Macaron kMacaronObject{};

}  // namespace

const Architecture& kMacaron = kMacaronObject;

}  // namespace millrace
