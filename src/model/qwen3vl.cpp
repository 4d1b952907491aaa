// Qwen 3 VL, dense and with experts: Qwen 3 with three positions a token, its own of time, height and width
// (interleaved M-RoPE), which differ within images alone, and rows of an image's vision tower that are added
// behind the first layers (DeepStack). Bai et al. 2025.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {
namespace {

using Sections = std::array<int32_t, 3>;  // pairs that turn by time, height and width

Sections checked_sections(const ConfigReader& reader, const std::vector<int64_t>& found) {
  Sections out{};
  if (found.size() < out.size() ||
      !std::all_of(found.begin(), found.end(), [](int64_t n) { return n >= 0 && n <= 1 << 20; })) {
    reader.fail("rope sections", fmt::format("[{}]", fmt::join(found, ", ")), "three whole numbers");
  }
  std::copy_n(found.begin(), out.size(), out.begin());
  return out;
}

Sections sections_of(const ConfigReader& reader, std::string_view architecture) {
  if (reader.is_gguf()) {
    const std::string key = fmt::format("{}.rope.dimension_sections", architecture);
    const io::GgufArray* found = reader.checkpoint().gguf->get_array(key);
    if (found == nullptr) reader.fail(key, "nothing", "three whole numbers");
    return checked_sections(reader, found->integers);
  }
  for (const char* field : {"rope_scaling", "rope_parameters"}) {
    const auto object = reader.hf().find(field);
    if (object == reader.hf().end() || !object->is_object()) continue;
    const auto found = object->find("mrope_section");
    if (found == object->end()) continue;
    const bool numbers =
        found->is_array() && std::all_of(found->begin(), found->end(),
                                         [](const nlohmann::json& v) { return v.is_number_integer(); });
    if (!numbers) reader.fail("config.json: mrope_section", found->dump(), "three whole numbers");
    return checked_sections(reader, found->get<std::vector<int64_t>>());
  }
  return {24, 20, 20};  // the class's
}

// Time, height and width in turn, as long as each has pairs left; the rest is time's.
std::vector<uint8_t> interleaved_axes(const Sections& sections, size_t pairs) {
  std::vector<uint8_t> axes(pairs, 0);
  for (uint8_t axis = 1; axis < 3; ++axis) {
    const size_t end = std::min(pairs, 3 * static_cast<size_t>(sections[axis]));
    for (size_t i = axis; i < end; i += 3) axes[i] = axis;
  }
  return axes;
}

class Qwen3Vl : public Architecture {
 public:
  std::string_view name() const override { return "qwen3vl"; }
  std::vector<std::string_view> model_types() const override { return {"qwen3_vl", "qwen3_vl_text"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
      "rope_theta": 500000.0})";
  }

  void read_config(const ConfigReader& reader, ModelConfig& config) const override {
    read_decoder(reader, config);
    read_feed_forward(reader, config);
    read_rope(reader, config);
    config.rope_axes = interleaved_axes(sections_of(reader, name()), config.rope_inv_freq.size());
  }

  void write_keys(GgufKeys& keys) const override {
    write_feed_forward(keys);
    write_norm(keys);
    write_rope(keys);
    const Sections sections = sections_of(keys.reader(), name());
    keys.sizes("rope.dimension_sections", {sections[0], sections[1], sections[2], 0});
    const nlohmann::json& hf = keys.reader().hf();
    const auto vision = hf.find("vision_config");
    size_t deep = 3;  // the class's
    if (vision != hf.end() && vision->is_object() && vision->contains("deepstack_visual_indexes"))
      deep = (*vision)["deepstack_visual_indexes"].size();
    keys.size("n_deepstack_layers", static_cast<int64_t>(deep));
  }

  std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const override {
    std::vector<WeightSpec> weights;
    add_attention(weights, config, {.qk_norm = true});
    weights.push_back(ffn_norm_weight(config));
    if (has_experts(config, layer)) {
      add_experts(weights, config, usual_experts(config));
    } else {
      add_feed_forward(weights, config);
    }
    return weights;
  }

  void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const override {
    x.norm_qkv(qkv_of(w, config));  // with q_norm and k_norm
    x.rope_append_kv(rope_of(config, index));
    x.attend(attend_of(w, config, index));
    x.project_add(project_of(w, config));
    if (has_experts(config, index)) {
      x.route(route_of(w, config));
      x.experts_add(experts_of(w, config));
    } else {
      x.ffn_add(ffn_of(w, config));
    }
    x.add_given(index);
  }

  std::optional<ImageText> image_text() const override {
    return ImageText{.token = "<|vision_start|>",
                     .written = "<|vision_start|><|image_pad|><|vision_end|>",
                     .expanded = "<|vision_start|><|vision_end|>",
                     .projector = "qwen3vl_merger",
                     .both_ways = false};
  }

  std::vector<SyntheticPreset> presets() const override {
    return {{"qwen3-vl-8b", R"({"model_type": "qwen3_vl_text", "num_hidden_layers": 36, "hidden_size": 4096,
      "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
      "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}, "tie_word_embeddings": false})"},
            {"tiny-qwen3vl", R"({"model_type": "qwen3_vl_text", "num_hidden_layers": 2, "hidden_size": 64,
      "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
      "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}, "tie_word_embeddings": false})"}};
  }
  SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const override {
    return chatml_tokenizer("qwen2", vocab);
  }

 protected:
  virtual void read_feed_forward(const ConfigReader& reader, ModelConfig& config) const {
    config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
  }
  virtual void write_feed_forward(GgufKeys& keys) const { write_sizes(keys, keys.config().ffn); }

 private:
  static bool has_experts(const ModelConfig& config, int layer) {
    return config.experts > 0 && !config.is_dense(layer);
  }
};

// With experts of Qwen 3's kind, whose weights always add up to one.
class Qwen3VlMoe final : public Qwen3Vl {
 public:
  std::string_view name() const override { return "qwen3vlmoe"; }
  std::vector<std::string_view> model_types() const override { return {"qwen3_vl_moe", "qwen3_vl_moe_text"}; }

  std::string_view hf_defaults(std::string_view) const override {
    return R"({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
      "num_key_value_heads": 16, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
      "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60})";
  }
  std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const override {
    return {{"num_local_experts", "num_experts"}};
  }

  std::vector<SyntheticPreset> presets() const override {
    return {
        {"qwen3-vl-30b-a3b",
         R"({"model_type": "qwen3_vl_moe_text", "num_hidden_layers": 48, "num_experts": 128,
      "num_experts_per_tok": 8, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
      "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
      "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}, "tie_word_embeddings": false})"},
        {"tiny-qwen3vlmoe", R"({"model_type": "qwen3_vl_moe_text", "num_hidden_layers": 2, "num_experts": 8,
      "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
      "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}, "tie_word_embeddings": false})"}};
  }

 protected:
  void read_feed_forward(const ConfigReader& reader, ModelConfig& config) const override {
    read_expert_sizes(reader, config, "num_experts");
    config.expert_weighting = Route::Weighting::kSoftmaxAllRenormalized;
    read_qwen_expert_layers(reader, config);
  }
  void write_feed_forward(GgufKeys& keys) const override {
    write_sizes(keys, keys.reader().integer("", "intermediate_size", 1, 1 << 20));  // of dense layers
    write_experts(keys);
  }
};

const Qwen3Vl kQwen3VlObject{};
const Qwen3VlMoe kQwen3VlMoeObject{};

}  // namespace

const Architecture& kQwen3Vl = kQwen3VlObject;
const Architecture& kQwen3VlMoe = kQwen3VlMoeObject;

}  // namespace millrace
