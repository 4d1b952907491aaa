// What models with LayerNorm share (GPT-2, Phi, encoders): its epsilon, activations by name, and weights that
// are parts of a fused matrix.
#pragma once

#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/config_reader.h"
#include "model/gguf_keys.h"
#include "model/weight_spec.h"

namespace millrace {

// Norms of kind LayerNorm; `hf`: config.json's name of the epsilon.
void read_layer_norm(const ConfigReader& reader, ModelConfig& config, std::string_view hf);
void write_layer_norm(GgufKeys& keys);

// The activation that config.json names under `hf`. GGUF files do not say: theirs is `in_gguf`.
void read_activation(const ConfigReader& reader, ModelConfig& config, std::string_view hf,
                     Activation in_gguf);

// Scores are multiplied by attention.scale where a GGUF file has it; written where it is not the usual one.
void read_attention_scale(const ConfigReader& reader, ModelConfig& config);
void write_attention_scale(GgufKeys& keys);

// The names of a LayerNorm's weight and bias.
struct NormNames {
  std::string_view weight, bias;        // GGUF
  std::string_view hf_weight, hf_bias;  // Hugging Face
};
void add_layer_norm(std::vector<WeightSpec>& to, const NormNames& names, int64_t size, WeightMember weight,
                    WeightMember bias, Presence biases = Presence::kUsual);

// One of q, k and v where a file may have them as rows of one matrix.
WeightSpec part_of(WeightSpec spec, const PartOf& part, bool hf_transposed = false);

// Outside the layers: a table whose rows are looked up; a vector.
WeightSpec outer_table(std::string_view role, std::string_view hf, int64_t rows, int64_t cols,
                       OuterMember to);
WeightSpec outer_vector(std::string_view role, std::string_view hf, int64_t size, OuterMember to,
                        Presence presence, double spread);

}  // namespace millrace
