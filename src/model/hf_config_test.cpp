// config.json means here what it means to transformers: every case of tests/golden/configs.json, which
// tests/golden/make_config_golden.py made with transformers' own classes, gives the same sizes, windows and
// rotary angles.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/architecture.h"

namespace millrace {
namespace {

using nlohmann::json;

ModelConfig read_fields(const json& fields) {
  io::Checkpoint checkpoint;
  checkpoint.hf = std::make_shared<io::HfDirectory>();
  checkpoint.hf->path = "case";
  checkpoint.hf->config = fields;
  const Architecture& architecture = find_architecture(checkpoint);
  ModelConfig config;
  config.architecture = architecture.name();
  config.vocab = 64;
  architecture.read_config(ConfigReader(checkpoint, architecture), config);
  return config;
}

// What is found, under the names of configs.json, as far as the case names it.
json facts_of(const ModelConfig& c, const json& expected) {
  json dense = json::array();
  json stateful = json::array();
  json unrotated = json::array(), kv_heads = json::array(), head_dims = json::array(), source = json::array();
  for (int l = 0; l < c.layers; ++l) {
    dense.push_back(c.is_dense(l));
    stateful.push_back(c.has_state(l));
    unrotated.push_back(!c.is_rotated(l));
    kv_heads.push_back(c.heads_of(l).kv_heads);
    head_dims.push_back(c.heads_of(l).head_dim);
    source.push_back(c.kv_source.empty() ? l : c.kv_source[static_cast<size_t>(l)]);
  }
  const json all = {
      {"layers", c.layers},
      {"hidden", c.hidden},
      {"heads", c.heads},
      {"kv_heads", c.kv_heads},
      {"head_dim", c.head_dim},
      {"ffn", c.ffn},
      {"windows", c.layer_windows},
      {"dense", dense},
      {"experts", c.experts},
      {"experts_per_token", c.experts_per_token},
      {"expert_ffn", c.expert_ffn},
      {"renormalize", c.expert_weighting == Route::Weighting::kSoftmaxAllRenormalized ||
                          c.expert_weighting == Route::Weighting::kSigmoidRenormalized},
      {"shared_ffn", c.shared_ffn},
      {"groups", {c.expert_groups, c.expert_groups_chosen}},
      {"expert_scale", c.expert_scale},
      {"qk_norm", c.own.contains("qk_norm") && c.own.at("qk_norm") != 0.0f &&
                      std::count(c.unrotated_layers.begin(), c.unrotated_layers.end(), false) > 0},
      {"norm_eps", c.norm_eps},
      {"angles", c.rope_inv_freq},
      {"magnitude", c.rope_magnitude},
      {"swiglu", {c.swiglu_alpha, c.swiglu_limit}},
      {"window_angles", c.rope_window_inv_freq},
      {"embedding_scale", c.embedding_scale},
      {"residual_scale", c.residual_scale},
      {"logit_scale", c.logit_scale},
      {"attention_scale", c.attention_scale},
      {"attention_softcap", c.attention_softcap},
      {"logit_softcap", c.logit_softcap},
      {"unrotated", unrotated},
      {"context", c.context_length},
      {"layer_kv_heads", kv_heads},
      {"layer_head_dims", head_dims},
      {"kv_source", source},
      {"layer_input", c.layer_input},
      {"latent", {c.latent.rank, c.latent.q_rank, c.latent.rope, c.latent.nope, c.latent.value}},
      {"indexer", {c.latent.index_heads, c.latent.index_dim, c.latent.index_top}},
      {"state", {c.state.key_heads, c.state.key_dim, c.state.value_heads, c.state.value_dim, c.state.taps}},
      {"taps", c.state.taps},
      {"stateful", stateful},
      {"tanh", c.ffn_activation == Activation::kGeluTanh},
      {"scale", c.attention_scale != 0 ? c.attention_scale : 1 / std::sqrt(double(c.head_dim))}};
  json out;
  for (const auto& [name, value] : expected.items()) out[name] = all.at(name);
  return out;
}

// Within float32's rounding of what transformers computes in it.
bool near(const json& a, const json& b) {
  if (a.is_array() && b.is_array()) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), near);
  }
  if (a.is_number() && b.is_number()) {
    const double x = a.get<double>(), y = b.get<double>();
    return std::abs(x - y) <= 2e-6 * std::abs(y);
  }
  return a == b;
}

// The number of cases compared.
int compare_class(const std::string& path, const std::string& model_type) {
  std::ifstream file(path);
  const json golden = json::parse(file).at("classes").at(model_type);
  const json& base = golden.at("base");
  int compared = 0;
  for (const json& one : golden.at("cases")) {
    if (one.contains("refused")) continue;
    json fields = base;
    fields["model_type"] = model_type;
    fields.update(one.at("set"));
    for (const json& key : one.at("drop")) fields.erase(key.get<std::string>());
    json expected = golden.at("facts");
    expected.update(one.at("facts"));
    try {
      const json found = facts_of(read_fields(fields), expected);
      for (const auto& [name, value] : expected.items()) {
        // A case says nothing of dense layers where there is no layer but them, and nothing of their size
        // where there is none.
        const bool said = one.at("facts").contains(name);
        if (!said && name == "ffn" && found[name] == 0) continue;
        if (!said && name == "dense" && found[name] == json(std::vector<bool>(found[name].size(), true)))
          continue;
        EXPECT_TRUE(near(found[name], value)) << one["set"] << " without " << one["drop"] << ": " << name
                                              << " is " << found[name] << ", expected " << value;
      }
    } catch (const Error& error) {
      // Heads of which a single dimension rotates: transformers goes on, no model has them.
      if (std::string(error.what()).find("rotary dimensions: found 1,") != std::string::npos) continue;
      // More experts a token than the groups chosen have, or groups of a softmax by their two largest.
      if (std::string(error.what()).find("with enough in those chosen") != std::string::npos) continue;
      if (std::string(error.what()).find("experts chosen by softmax") != std::string::npos) continue;
      ADD_FAILURE() << one["set"] << " without " << one["drop"] << ": " << error.what();
    }
    ++compared;
  }
  return compared;
}

class HfConfig : public testing::TestWithParam<const char*> {};

TEST_P(HfConfig, MeansWhatItMeansToTransformers) {
  EXPECT_GT(compare_class("tests/golden/configs.json", GetParam()), 50);
}

class LayerNormConfig : public testing::TestWithParam<const char*> {};

TEST_P(LayerNormConfig, MeansWhatItMeansToTransformers) {
  EXPECT_GT(compare_class("tests/golden/layer_norm_configs.json", GetParam()), 25);
}

INSTANTIATE_TEST_SUITE_P(Classes, LayerNormConfig, testing::Values("gpt2", "phi", "bert", "modernbert"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST(Gemma4Config, MeansWhatItMeansToTransformers) {
  EXPECT_GT(compare_class("tests/golden/gemma4_configs.json", "gemma4_text"), 45);
}

class MixerConfig : public testing::TestWithParam<const char*> {};

TEST_P(MixerConfig, MeansWhatItMeansToTransformers) {
  EXPECT_GT(compare_class("tests/golden/mixer_configs.json", GetParam()), 15);
}

INSTANTIATE_TEST_SUITE_P(Classes, MixerConfig,
                         testing::Values("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32",
                                         "mistral4", "ministral3", "qwen3_next", "qwen3_5_text",
                                         "qwen3_5_moe_text", "lfm2", "lfm2_moe", "granitemoehybrid", "mamba2",
                                         "nemotron_h", "falcon_h1"),
                         [](const auto& tested) { return std::string(tested.param); });

INSTANTIATE_TEST_SUITE_P(Classes, HfConfig,
                         testing::Values("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss",
                                         "gemma3_text", "gemma2", "phi3", "granite", "olmo2", "smollm3",
                                         "seed_oss", "ernie4_5", "ministral", "mixtral", "qwen2_moe",
                                         "glm4_moe", "llama4_text"),
                         [](const auto& tested) { return std::string(tested.param); });

}  // namespace
}  // namespace millrace
