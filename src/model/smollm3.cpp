// SmolLM3: llama of which every fourth layer knows no positions. Hugging Face 2025; Yang et al. 2025 (NoPE).
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/dense_decoder.h"

namespace millrace {
namespace {

class SmolLm3 final : public DenseDecoder {
 public:
  std::string_view name() const override { return "smollm3"; }
  std::vector<std::string_view> model_types() const override { return {"smollm3"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
      "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 2000000.0,
      "no_rope_layer_interval": 4})";
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"smollm3-3b", R"({"model_type": "smollm3", "num_hidden_layers": 36, "hidden_size": 2048,
      "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256,
      "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
      "tie_word_embeddings": true})"},
            {"tiny-smollm3", R"({"model_type": "smollm3", "num_hidden_layers": 4, "hidden_size": 64,
      "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
      "tie_word_embeddings": true})"}};
  }

 protected:
  bool interleaved_in_gguf() const override { return true; }

  void read_own(const ConfigReader& reader, ModelConfig& config) const override {
    const int32_t every = reader.integer_or("", "no_rope_layer_interval", 1, 1 << 20, kEvery);
    for (int32_t l = 0; l < config.layers; ++l) config.unrotated_layers.push_back((l + 1) % every == 0);
    if (reader.is_gguf()) {
      read_unrotated(reader, config);
      return read_gguf_windows(reader, config, no_layer);
    }
    read_rotated(reader, config);
    const bool slides = reader.flag_or("", "use_sliding_window", false);
    read_hf_windows(reader, config, hf_window(reader),
                    [&](int32_t l) { return slides && !config.is_rotated(l); });
  }

  void write_own(GgufKeys& keys) const override {
    const std::vector<bool>& unrotated = keys.config().unrotated_layers;
    for (size_t l = 0; l < unrotated.size(); ++l) {
      if (unrotated[l] == ((l + 1) % kEvery == 0)) continue;
      keys.flags(kUnrotated, unrotated);
      break;
    }
    write_windows(keys, no_layer);
  }

 private:
  static constexpr int32_t kEvery = 4;  // what GGUF files mean that do not say it
  static constexpr const char* kUnrotated = "rope.unrotated_layers";  // a key of ours
  static bool no_layer(int32_t) { return false; }

  static void read_unrotated(const ConfigReader& reader, ModelConfig& config) {
    const io::GgufArray* flags = reader.checkpoint().gguf->get_array(config.architecture + "." + kUnrotated);
    if (flags == nullptr) return;
    if (flags->integers.size() != config.unrotated_layers.size())
      reader.fail(kUnrotated, fmt::format("{} entries", flags->integers.size()),
                  fmt::format("{}", config.unrotated_layers.size()));
    for (size_t l = 0; l < flags->integers.size(); ++l) config.unrotated_layers[l] = flags->integers[l] != 0;
  }

  // no_rope_layers: 1 or 0 for each layer, 1 for those with rotary positions.
  static void read_rotated(const ConfigReader& reader, ModelConfig& config) {
    const auto listed = reader.hf().find("no_rope_layers");
    if (listed == reader.hf().end() || listed->is_null()) return;
    if (!listed->is_array() || listed->size() < static_cast<size_t>(config.layers))
      reader.fail("config.json: no_rope_layers", listed->dump(),
                  fmt::format("a list for {} layers", config.layers));
    for (size_t l = 0; l < config.unrotated_layers.size(); ++l) {
      const nlohmann::json& rotated = (*listed)[l];
      if (!rotated.is_number() && !rotated.is_boolean())
        reader.fail("config.json: no_rope_layers", rotated.dump(), "0 or 1");
      config.unrotated_layers[l] = rotated.is_boolean() ? !rotated.get<bool>() : rotated.get<double>() == 0;
    }
  }
};

const SmolLm3 kSmolLm3Object{};

}  // namespace

const Architecture& kSmolLm3 = kSmolLm3Object;

}  // namespace millrace
