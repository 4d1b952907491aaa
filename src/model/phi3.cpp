// Phi-3 and Phi-4 (mini and 14B): llama with q, k and v in one matrix and gate and up in another; part of a
// head may be rotated, by angles with divisors of their own (LongRoPE). Abdin et al. 2024; Ding et al. 2024.
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_config.h"
#include "model/decoder_weights.h"
#include "model/dense_decoder.h"

namespace millrace {
namespace {

class Phi3 final : public DenseDecoder {
 public:
  std::string_view name() const override { return "phi3"; }
  std::vector<std::string_view> model_types() const override { return {"phi3"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
      "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5})";
  }

  // LongRoPE was called "su" and "yarn" before it had a name.
  void settle_hf(nlohmann::json& config) const override {
    for (const char* field : {"rope_scaling", "rope_parameters"}) {
      const auto object = config.find(field);
      if (object == config.end() || !object->is_object()) continue;
      for (const char* name : {"rope_type", "type"}) {
        const auto type = object->find(name);
        if (type != object->end() && (*type == "su" || *type == "yarn")) *type = "longrope";
      }
      if (object->contains("partial_rotary_factor"))
        config["partial_rotary_factor"] = (*object)["partial_rotary_factor"];
    }
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override {
    std::vector<WeightSpec> weights = DenseDecoder::layer_weights(config, layer);
    const int64_t q = int64_t{config.heads} * config.head_dim,
                  kv = int64_t{config.kv_heads} * config.head_dim;
    const auto in_qkv = [&](int64_t first) {
      return PartOf{"attn_qkv.weight", "self_attn.qkv_proj.weight", first, q + 2 * kv};
    };
    const auto in_gate_up = [&](int64_t first) {
      return PartOf{"ffn_up.weight", "mlp.gate_up_proj.weight", first, int64_t{2} * config.ffn};
    };
    for (WeightSpec& spec : weights) {
      if (spec.role == "attn_q.weight") spec.part_of = in_qkv(0);
      if (spec.role == "attn_k.weight") spec.part_of = in_qkv(q);
      if (spec.role == "attn_v.weight") spec.part_of = in_qkv(q + kv);
      if (spec.role == "ffn_gate.weight") spec.part_of = in_gate_up(0);
      if (spec.role == "ffn_up.weight") spec.part_of = in_gate_up(config.ffn);
    }
    return weights;
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"phi-4-mini", R"({"model_type": "phi3", "num_hidden_layers": 32, "hidden_size": 3072,
      "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
      "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
      "tie_word_embeddings": true})"},
            {"tiny-phi3", R"({"model_type": "phi3", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640,
      "max_position_embeddings": 4096, "original_max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
      "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "sliding_window": 48, "tie_word_embeddings": false,
      "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7],
      "long_factor": [2.0, 3.0, 4.0, 5.0]}})"}};
  }

 protected:
  void read_own(const ConfigReader& reader, ModelConfig& config) const override {
    if (reader.is_gguf()) return read_gguf_windows(reader, config, every_layer);
    config.layer_windows.assign(config.layers, hf_window(reader));
    const double part = reader.real_or("", "partial_rotary_factor", 1.0);
    if (!(part > 0 && part <= 1))
      reader.fail("config.json: partial_rotary_factor", fmt::format("{}", part), "above 0, up to 1");
    config.rotary_dims = static_cast<int32_t>(config.head_dim * part);
  }
  void write_own(GgufKeys& keys) const override { write_windows(keys, every_layer); }

 private:
  static bool every_layer(int32_t) { return true; }
};

const Phi3 kPhi3Object{};

}  // namespace

const Architecture& kPhi3 = kPhi3Object;

}  // namespace millrace
