// Architecture: what one file of this folder provides, all that is particular to a family of models.
// Everybody else asks it, and nobody compares names. A new one is a file and a line in architecture_list.h:
// docs/adding_an_architecture.md.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "model/config_reader.h"
#include "model/gguf_keys.h"
#include "model/synthetic.h"
#include "model/weight_spec.h"

namespace millrace {

// Hugging Face names of the weights outside the layers, and what stands before a layer's number. GGUF has the
// same for all: token_embd.weight, output_norm.weight, output.weight, "blk.".
struct HfNames {
  std::string_view embedding = "model.embed_tokens.weight";
  std::string_view output_norm = "model.norm.weight";
  std::string_view output = "lm_head.weight";
  std::string_view layers = "model.layers.";
  bool has_output_norm = true;
  float norm_offset = 0.0f;                                  // WeightSpec::hf_offset of the output norm
  std::string_view gguf_output_norm = "output_norm.weight";  // where GGUF has another name for it
  std::string_view prefix = {};  // what some files have before every name: "transformer."
};

class Architecture {
 public:
  virtual ~Architecture() = default;

  // What files call it: GGUF's general.architecture, and every model_type of config.json.
  virtual std::string_view name() const = 0;
  virtual std::vector<std::string_view> model_types() const = 0;

  // Of several with one model_type: is this config.json one of its own?
  virtual bool claims(const nlohmann::json& /*config*/) const { return true; }

  // What the published configuration class of a model_type assumes for keys that config.json leaves out, as
  // JSON: ConfigReader::hf() has them. A key that is null in the file stays null.
  virtual std::string_view hf_defaults(std::string_view model_type) const = 0;
  // Other spellings of config.json's keys: found, meant.
  virtual std::vector<std::pair<std::string_view, std::string_view>> hf_aliases() const { return {}; }

  // What else its configuration class makes of config.json, with defaults and spellings settled.
  virtual void settle_hf(nlohmann::json& /*config*/) const {}

  // Fills `config` from GGUF keys or config.json; its architecture, name, vocabulary and sampling are set
  // already.
  virtual void read_config(const ConfigReader& reader, ModelConfig& config) const = 0;
  // The keys of a GGUF file from which read_config reads the same again.
  virtual void write_keys(GgufKeys& keys) const = 0;

  // What a GGUF file that is written of a Hugging Face directory has otherwise than that.
  virtual void settle_written(ModelConfig& /*config*/) const {}

  virtual HfNames hf_names() const { return {}; }
  // The weights of a layer, in the order they are loaded and written.
  virtual std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) const = 0;
  virtual std::unique_ptr<LayerWeights> new_layer() const { return std::make_unique<LayerWeights>(); }

  // Weights outside the layers beside token embedding, output norm and output matrix (WeightSpec::outer).
  virtual std::vector<WeightSpec> outer_weights(const ModelConfig& config) const;

  // What comes before the layers and behind them.
  virtual Embed embedding(const ModelWeights& w, const ModelConfig& config) const;
  virtual Logits logits(const ModelWeights& w, const ModelConfig& config) const;
  // Behind the embedding, of a model with inputs of layers (ModelConfig::layer_input).
  virtual LayerInputs layer_inputs(const ModelWeights&, const ModelConfig&) const { return {}; }
  // The layer, as the paper has it.
  virtual void layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const = 0;

  // Of a model that is trained to read images: what its chat template writes for one, and what belongs in
  // place of that, with `token` once, behind which the image's rows stand (vision_tower.h).
  struct ImageText {
    std::string_view token, written, expanded;
    std::string_view projector;  // what GGUF calls its vision tower's kind (clip.projector_type)
    bool both_ways = true;       // an image's tokens see one another, not only those before them
  };
  virtual std::optional<ImageText> image_text() const { return std::nullopt; }

  // `millrace synth`: shapes with names, a tokenizer for so many tokens, and the type experts are published
  // in (none: that of the other matrices).
  virtual std::vector<SyntheticPreset> presets() const = 0;
  virtual SyntheticTokenizer synthetic_tokenizer(int32_t vocab) const = 0;
  virtual std::optional<DType> expert_type() const { return std::nullopt; }
};

// Those of architecture_list.h, in its order.
std::span<const Architecture* const> architectures();
// The one that a checkpoint names. Throws Error{kUnsupported} listing those known.
const Architecture& find_architecture(const io::Checkpoint& checkpoint);
// The one whose read_config made this.
const Architecture& architecture_of(const ModelConfig& config);

}  // namespace millrace
