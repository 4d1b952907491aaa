// Architecture: what one file of this folder provides. A new one is a new file and a line in
// architecture.cpp.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "model/config_reader.h"
#include "model/model.h"

namespace millrace {

struct Architecture {
  std::string_view name;                          // GGUF's general.architecture
  std::span<const std::string_view> model_types;  // config.json's model_type
  void (*configure)(const ConfigReader& reader, ModelConfig& config);
  std::unique_ptr<Model> (*make)();
};

std::span<const Architecture> architectures();
// Throws Error{kUnsupported} listing those known.
const Architecture& find_architecture(const io::Checkpoint& checkpoint);

// What all decoders share: sizes, heads, norm, windows of the whole model; fills layer_windows with zeros.
void read_common(const ConfigReader& reader, ModelConfig& config);
// config.json's layer_types / sliding_window; false when it has no layer_types.
bool read_hf_layer_types(const ConfigReader& reader, ModelConfig& config);

// The pieces from which layers are written.
NormQkv qkv_of(const LayerWeights& w, const ModelConfig& config);
Rope rope_of(const ModelConfig& config, int layer);
Attend attend_of(const LayerWeights& w, const ModelConfig& config, int layer);
Ffn ffn_of(const LayerWeights& w, const ModelConfig& config);
Route route_of(const LayerWeights& w, const ModelConfig& config);
Experts experts_of(const LayerWeights& w, const ModelConfig& config);

extern const Architecture kLlama, kQwen2, kQwen3, kQwen3Moe, kGptOss;

}  // namespace millrace
