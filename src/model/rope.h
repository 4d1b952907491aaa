// The angles of rotary position embedding, with the scalings that stretch a model's context.
#pragma once

#include <string>
#include <vector>

#include "model/config.h"
#include "model/config_reader.h"
#include "model/gguf_keys.h"

namespace millrace {

// [dims / 2] angles without scaling.
std::vector<float> plain_angles(double theta, int32_t dims);

// A GGUF file's tensor of divisors, one per angle; empty when it has none of that name.
std::vector<double> gguf_divisors(const ConfigReader& reader, const std::string& name, size_t count);

// Fills config.rope_* from the checkpoint: theta, dims (where config.json cannot say
// them: config.rotary_dims if that is set, else all), scaling, the final inv_freq and magnitude.
// truncate_yarn_range: whether GGUF files of the architecture, which cannot say, mean that YaRN's correction
// range is rounded to whole dimensions.
void read_rope(const ConfigReader& reader, ModelConfig& config, bool truncate_yarn_range = true);

// config.json of classes whose layers with and without a window have rope_parameters of their own (Gemma 3,
// Olmo 3), or rope_theta, rope_scaling and rope_local_base_freq: leaves the older keys, and rope_window_type.
void settle_rope_of_layers(nlohmann::json& config);
// Refuses scaled angles of layers with a window.
void expect_plain_windows(const ConfigReader& reader);

// What YaRN with mscale_all_dim (DeepSeek) multiplies queries and keys by, all of their dimensions: scores
// have its square.
double yarn_score_scale(const ConfigReader& reader);

// config.json's partial_rotary_factor of a head, in rope_parameters or beside them.
int32_t hf_rotary_dims(const ConfigReader& reader, int32_t head_dim);

// Queries that grow with their position (llama_4_scaling_beta, per original context): Ministral 3, Mistral 4.
// In config.own as "growth" and "growth_every".
void read_query_growth(const ConfigReader& reader, ModelConfig& config);
void write_query_growth(GgufKeys& keys);
QueryGrowth query_growth(const ModelConfig& config);

// A config.json's base and scaling as GGUF keys; with config.rope_as_tensor, as far as keys can say it.
void write_rope(GgufKeys& keys);

}  // namespace millrace
