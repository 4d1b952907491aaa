// Mamba-2 by itself: layers of one mixer each, no attention and no feed-forward layer. Dao and Gu 2024.
#include <fmt/format.h>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/mamba_layer.h"

namespace millrace {
namespace {

constexpr int32_t kMamba2Context = 1 << 20;  // what GGUF files say of it, and no config.json does
constexpr int32_t kMamba2HeadDim = 32;       // of the attention that no layer has

constexpr MambaFields kMamba2Fields = {.groups = "n_groups",
                                       .heads = "num_heads",
                                       .states = "state_size",
                                       .taps = "conv_kernel",
                                       .head_dim = "head_dim",
                                       .expand = "expand"};

class Mamba2 final : public Architecture {
 public:
  std::string_view name() const override { return "mamba2"; }
  std::vector<std::string_view> model_types() const override { return {"mamba2"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"num_heads": 128, "head_dim": 64, "hidden_size": 4096, "state_size": 128, "num_hidden_layers": 64,
      "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "n_groups": 8, "hidden_act": "silu"})";
  }
  HfNames hf_names() const override {
    return {.embedding = "backbone.embeddings.weight",
            .output_norm = "backbone.norm_f.weight",
            .layers = "backbone.layers."};
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    config.hidden = reader.integer("embedding_length", "hidden_size", 1, 1 << 17);
    config.layers = reader.integer("block_count", "num_hidden_layers", 1, 1024);
    config.context_length = reader.integer_or("context_length", "", 1, 1 << 28, kMamba2Context);
    config.heads = config.kv_heads = 1;
    config.head_dim = kMamba2HeadDim;
    config.layer_windows.assign(static_cast<size_t>(config.layers), 0);
    config.state_layers.assign(static_cast<size_t>(config.layers), true);
    read_norm_eps(reader, config, "layer_norm_epsilon");
    expect_silu(reader);
    read_mamba(reader, kMamba2Fields, /*hf_norm_groups=*/false, config);
  }

  void write_keys(GgufKeys& keys) const override {
    const ModelConfig& c = keys.config();
    keys.size("block_count", c.layers);
    keys.size("context_length", c.context_length);
    keys.size("embedding_length", c.hidden);
    keys.size("feed_forward_length", 0);
    keys.size("attention.head_count", 0);
    keys.size("vocab_size", c.vocab);
    write_norm(keys);
    write_mamba(keys);
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int) const override {
    std::vector<WeightSpec> weights;
    add_mamba(weights, config, kMixerNames);
    return weights;
  }
  std::unique_ptr<LayerWeights> new_layer() const override { return std::make_unique<StateLayerWeights>(); }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    mamba_layer(x, static_cast<const StateLayerWeights&>(w), config, index);
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"mamba2-130m", R"({"model_type": "mamba2", "num_hidden_layers": 24, "hidden_size": 768,
      "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1, "vocab_size": 50288,
      "tie_word_embeddings": true})"},
            {"mamba2-2.7b", R"({"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 2560,
      "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "vocab_size": 50288,
      "tie_word_embeddings": true})"},
            {"tiny-mamba2", R"({"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64,
      "num_heads": 4, "head_dim": 32, "state_size": 32, "n_groups": 1, "vocab_size": 640,
      "tie_word_embeddings": true})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("olmo", vocab);
  }
};

const Mamba2 kMamba2Object{};

}  // namespace

const Architecture& kMamba2 = kMamba2Object;

}  // namespace millrace
