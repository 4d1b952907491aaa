// What read_config and the weight source say of wrong files. The golden models are the right ones; each test
// breaks one thing in a copy. That right files give right numbers is tests/golden_test.cpp's business.
#include "model/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "model/model.h"

namespace millrace {
namespace {

namespace fs = std::filesystem;

// A copy of a golden Hugging Face directory with its config.json edited.
class BrokenModel {
 public:
  BrokenModel(const std::string& golden, const std::function<void(nlohmann::json&)>& edit)
      : path_(fs::path(testing::TempDir()) / fmt::format("broken_{}_{}", golden, ::getpid())) {
    fs::remove_all(path_);
    fs::copy("tests/golden/models/" + golden + "/hf", path_);
    nlohmann::json config;
    std::ifstream(path_ / "config.json") >> config;
    edit(config);
    std::ofstream(path_ / "config.json") << config;
  }
  ~BrokenModel() { fs::remove_all(path_); }
  std::string path() const { return path_.string(); }

  // The message of the Error that loading throws; empty when it does not.
  std::string error() const {
    try {
      const io::Checkpoint checkpoint = io::Checkpoint::open(path());
      const auto backend = make_backend("reference", {});
      Model::load(checkpoint, *backend);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }

 private:
  fs::path path_;
};

void expect_error(const std::string& golden, const std::function<void(nlohmann::json&)>& edit,
                  const std::vector<std::string>& parts) {
  const BrokenModel model(golden, edit);
  const std::string error = model.error();
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  EXPECT_NE(error.find(model.path()), std::string::npos) << "names the file: " << error;
  for (const std::string& part : parts)
    EXPECT_NE(error.find(part), std::string::npos) << part << " in: " << error;
}

TEST(Config, UnchangedCopyLoads) {
  EXPECT_EQ(BrokenModel("llama2", [](auto&) {}).error(), "");
}

TEST(Config, UnknownArchitectureListsTheKnown) {
  expect_error("llama2", [](auto& c) { c["model_type"] = "mamba"; },
               {"model_type", "\"mamba\"", "llama", "gpt_oss", "qwen3_moe"});
}

TEST(Config, MissingAndOddSizes) {
  // As in the published class, it is 32 then.
  expect_error("llama2", [](auto& c) { c.erase("num_hidden_layers"); }, {"model.layers.2.", "found nothing"});
  expect_error("llama2", [](auto& c) { c["num_hidden_layers"] = 2.5; }, {"num_hidden_layers", "2.5"});
  expect_error("llama2", [](auto& c) { c["num_hidden_layers"] = "two"; }, {"num_hidden_layers", "string"});
  expect_error("llama2", [](auto& c) { c["hidden_size"] = -64; }, {"hidden_size", "-64"});
  expect_error("llama2", [](auto& c) { c["num_key_value_heads"] = 3; }, {"multiple of 3"});
  expect_error("llama2", [](auto& c) { c["rms_norm_eps"] = 0; }, {"epsilon"});
  for (const char* model : {"llama2", "granitehybrid", "granitehybrid-moe", "mamba2", "deepseek-v3"}) {
    expect_error(model, [](auto& c) { c["hidden_act"] = "gelu"; }, {"hidden_act", "gelu", "silu"});
  }
}

TEST(Config, PartsOfRotatedHeads) {
  expect_error("glm4-moe-lite", [](auto& c) { c["partial_rotary_factor"] = 0.25; },
               {"partial_rotary_factor", "all of qk_rope_head_dim"});
}

// transformers lets every token of such a model see all others.
TEST(Config, TokensThatSeeLaterOnes) {
  for (const char* model : {"llama2", "qwen3", "gemma2"})
    expect_error(model, [](auto& c) { c["is_causal"] = false; }, {"is_causal: found false", "expected true"});
}

// Keys of single layers, which transformers takes in place of the model's.
TEST(Config, KeysOfSingleLayers) {
  expect_error("mistral",
               [](auto& c) {
                 c["per_layer_config"] = {{"1", {{"sliding_window", 3}}}};
               },
               {"per_layer_config of layer 1: found sliding_window", "expected none"});
  for (const nlohmann::json& sizes : {nlohmann::json(), nlohmann::json{{"1", {{"head_dim", 16}}}}}) {
    const BrokenModel model("mistral", [&](auto& c) { c["per_layer_config"] = sizes; });
    EXPECT_EQ(model.error(), "");
  }
}

TEST(Config, LayersThatAreNotThere) {
  expect_error("llama2", [](auto& c) { c["num_hidden_layers"] = 40; }, {"model.layers.", "found nothing"});
}

TEST(Config, ShapesThatContradictTheConfig) {
  expect_error("llama2", [](auto& c) { c["intermediate_size"] = 32; },
               {"mlp.gate_proj.weight", "expected [32, "});
}

TEST(Config, RopeScalingErrors) {
  const auto scaling = [](const nlohmann::json& value) {
    return [value](nlohmann::json& c) {
      c.erase("rope_parameters");
      c["rope_scaling"] = value;
    };
  };
  expect_error("llama3", scaling({{"rope_type", "spiral"}, {"factor", 4}}),
               {"rope scaling", "spiral", "longrope"});
  expect_error("llama3", scaling({{"rope_type", "longrope"}, {"factor", 4}}), {"short_factor"});
  expect_error("llama3", scaling({{"rope_type", "llama3"}}), {"factor"});
  expect_error("llama3", scaling({{"rope_type", "yarn"}, {"factor", 4}, {"attention_factor", -1}}),
               {"attention_factor"});
  expect_error("llama3", scaling({{"rope_type", "linear"}, {"factor", 0}}), {"factor", "above 0"});
}

TEST(Config, DenseLayersAmongExpertsNeedTheirWeights) {
  expect_error("qwen3moe", [](auto& c) { c["mlp_only_layers"] = {0}; }, {"mlp.gate_proj.weight"});
}

TEST(Config, LinearScalingDividesEveryAngle) {
  const auto angles = [](double factor) {
    const BrokenModel model("llama2", [&](nlohmann::json& c) {
      c.erase("rope_parameters");
      c["rope_scaling"] = {{"rope_type", "linear"}, {"factor", factor}};
    });
    return read_config(io::Checkpoint::open(model.path())).rope_inv_freq;
  };
  const auto plain = angles(1), slow = angles(4);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_FLOAT_EQ(plain[i], 4 * slow[i]);
}

// The published gpt-oss magnitudes: 0.1 ln(32) + 1.
TEST(Config, YarnMagnitude) {
  const ModelConfig config = read_config(io::Checkpoint::open("tests/golden/models/gpt-oss-w128/hf"));
  EXPECT_NEAR(config.rope_magnitude, 0.1 * std::log(32.0) + 1.0, 1e-6);
}

TEST(Config, SamplingAdviceComesFromGenerationConfig) {
  const BrokenModel model("llama2", [](nlohmann::json&) {});
  std::ofstream(model.path() + "/generation_config.json")
      << R"({"temperature": 0.6, "top_k": 20, "top_p": 7.5, "min_p": "x", "do_sample": true})";
  const ModelConfig::Sampling sampling = read_config(io::Checkpoint::open(model.path())).sampling;
  EXPECT_EQ(sampling.temperature, 0.6f);
  EXPECT_EQ(sampling.top_k, 20);
  EXPECT_FALSE(sampling.top_p) << "no probability";
  EXPECT_FALSE(sampling.min_p) << "no number";
  EXPECT_FALSE(sampling.repetition_penalty);
}

TEST(ExecutorSpec, WindowGroupsAreSizedByTheirWindow) {
  const ModelConfig config = read_config(io::Checkpoint::open("tests/golden/models/gpt-oss-w32/hf"));
  const ExecutorSpec spec = make_executor_spec(
      config, {.max_tokens = 64, .max_logit_rows = 1, .max_context = 100000, .sequences = 3});
  ASSERT_EQ(spec.kv_groups.size(), 2u);
  EXPECT_EQ(spec.kv_groups[0].window, 32);
  EXPECT_EQ(spec.kv_groups[0].num_blocks, 3 * blocks_for(32 + 64 + 32));
  EXPECT_EQ(spec.kv_groups[1].window, 0);
  EXPECT_EQ(spec.kv_groups[1].num_blocks, 3 * blocks_for(100000));
  EXPECT_EQ(spec.layers[0].group, 0);
  EXPECT_EQ(spec.layers[1].group, 1);
}

// So far apart that they take no more room than the keys and values of the same tokens, or as the option
// says.
TEST(ExecutorSpec, StatesAreKeptAsFarApartAsKeysAndValuesAllow) {
  for (const char* name :
       {"qwen3next", "kimi-linear", "granitehybrid", "falcon-h1", "nemotron-h", "lfm2", "mamba2"}) {
    const ModelConfig config =
        read_config(io::Checkpoint::open(fmt::format("tests/golden/models/{}/model.gguf", name)));
    const ExecutorSpec spec = make_executor_spec(config, {});
    int64_t states = 0, keys = 0;
    int32_t apart = 0;
    for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
      const auto bytes = static_cast<int64_t>(spec.kv_block_bytes(static_cast<int>(g)));
      (spec.kv_groups[g].state ? states : keys) += bytes;
      if (spec.kv_groups[g].state) apart = spec.kv_groups[g].states_apart;
    }
    EXPECT_GE(apart, 512) << name;
    EXPECT_LE(apart, 8192) << name;
    if (keys > 0 && apart < 8192) {
      EXPECT_LE(states, apart * keys / kBlockTokens) << name;
    }
    if (keys > 0 && apart > 512) {
      EXPECT_GT(states, (apart - 512) * keys / kBlockTokens) << name;
    }
    if (keys == 0) {
      EXPECT_EQ(apart, 2048) << name;
    }
    for (const KvGroupSpec& group : make_executor_spec(config, {.states_apart = 48}).kv_groups)
      EXPECT_EQ(group.states_apart, group.state ? 48 : 0) << name;
  }
}

}  // namespace
}  // namespace millrace
