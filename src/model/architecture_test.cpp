// What must hold for every architecture of the list, those to come included: names that are its own, weights
// that can be told apart, and GGUF keys that say all that config.json said.
#include "model/architecture.h"

#include <gtest/gtest.h>

#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "io/gguf_writer.h"
#include "io/hf_directory.h"

namespace millrace {
namespace {

struct Shape {
  const Architecture* architecture = nullptr;
  std::string name;
  io::Checkpoint checkpoint;  // config.json alone
  ModelConfig config;
};

std::vector<Shape> all_presets() {
  std::vector<Shape> shapes;
  for (const Architecture* architecture : architectures()) {
    for (const SyntheticPreset& preset : architecture->presets()) {
      Shape& shape = shapes.emplace_back();
      shape.architecture = architecture;
      shape.name = preset.name;
      shape.checkpoint.hf = std::make_shared<io::HfDirectory>();
      shape.checkpoint.hf->path = preset.name;
      shape.checkpoint.hf->config = nlohmann::json::parse(preset.config);
      shape.config.architecture = architecture->name();
      shape.config.vocab = shape.checkpoint.hf->config["vocab_size"];
      architecture->read_config(ConfigReader(shape.checkpoint, *architecture), shape.config);
    }
  }
  return shapes;
}

TEST(Architectures, NamesAreTheirOwn) {
  std::set<std::string_view> names, model_types, presets;
  for (const Architecture* architecture : architectures()) {
    EXPECT_TRUE(names.insert(architecture->name()).second) << architecture->name();
    // Two may share a type where its configuration says whose it is.
    for (const std::string_view type : architecture->model_types())
      EXPECT_TRUE(model_types.insert(type).second || !architecture->claims(nlohmann::json::object())) << type;
    EXPECT_FALSE(architecture->presets().empty()) << architecture->name();
    for (const SyntheticPreset& preset : architecture->presets())
      EXPECT_TRUE(presets.insert(preset.name).second) << preset.name;
  }
}

TEST(Architectures, PresetsAreFoundByTheirModelType) {
  for (const Shape& shape : all_presets()) {
    EXPECT_EQ(&find_architecture(shape.checkpoint), shape.architecture) << shape.name;
    EXPECT_EQ(&architecture_of(shape.config), shape.architecture) << shape.name;
  }
}

TEST(Architectures, WeightsOfALayerCanBeToldApart) {
  for (const Shape& shape : all_presets()) {
    const auto layer = shape.architecture->new_layer();
    for (int l = 0; l < shape.config.layers; ++l) {
      std::set<std::string_view> roles;
      std::set<const WeightPtr*> members;
      for (const WeightSpec& spec : shape.architecture->layer_weights(shape.config, l)) {
        EXPECT_TRUE(roles.insert(spec.role).second) << shape.name << " " << spec.role;
        ASSERT_NE(spec.to, nullptr) << shape.name << " " << spec.role;
        EXPECT_TRUE(members.insert(&((*layer).*spec.to)).second) << shape.name << " " << spec.role;
        for (const int64_t size : spec.shape) EXPECT_GT(size, 0) << shape.name << " " << spec.role;
        const bool named = !spec.hf.empty() || spec.experts || (spec.part_of && !spec.part_of->hf.empty()) ||
                           (spec.heads_of && !spec.heads_of->hf.empty());
        EXPECT_TRUE(named || spec.presence == Presence::kRare) << shape.name << " " << spec.role;
      }
    }
  }
}

TEST(Architectures, KeysSayWhatConfigJsonSaid) {
  for (const Shape& shape : all_presets()) {
    SCOPED_TRACE(shape.name);
    const ModelConfig& config = shape.config;
    io::GgufWriter writer("/dev/null");
    writer.set_string("general.architecture", config.architecture);
    write_config_keys(shape.checkpoint, config, writer);
    writer.add_tensor("token_embd.weight", DType::kF32, std::array<int64_t, 2>{config.vocab, 1});
    std::string bytes = writer.header();
    bytes.resize(writer.file_bytes());
    io::Checkpoint gguf;
    gguf.gguf = io::Gguf::parse(std::as_bytes(std::span(bytes)), shape.name);
    const ModelConfig read = read_config(gguf);
    EXPECT_EQ(read.architecture, config.architecture);
    EXPECT_EQ(
        std::tie(read.layers, read.hidden, read.heads, read.kv_heads, read.head_dim, read.vocab),
        std::tie(config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim, config.vocab));
    EXPECT_EQ(std::tie(read.ffn, read.experts, read.experts_per_token, read.expert_ffn, read.context_length),
              std::tie(config.ffn, config.experts, config.experts_per_token, config.expert_ffn,
                       config.context_length));
    EXPECT_EQ(read.norm_eps, config.norm_eps);
    EXPECT_EQ(read.layer_windows, config.layer_windows);
    EXPECT_EQ(read.expert_weighting, config.expert_weighting);
    EXPECT_EQ(read.expert_activation, config.expert_activation);
    EXPECT_EQ(read.own, config.own);
    EXPECT_EQ(read.ffn_activation, config.ffn_activation);
    EXPECT_EQ(read.embedding_scale, config.embedding_scale);
    EXPECT_EQ(read.residual_scale, config.residual_scale);
    EXPECT_EQ(read.logit_scale, config.logit_scale);
    EXPECT_EQ(read.attention_scale, config.attention_scale);
    EXPECT_EQ(read.attention_softcap, config.attention_softcap);
    EXPECT_EQ(read.logit_softcap, config.logit_softcap);
    EXPECT_EQ(read.unrotated_layers, config.unrotated_layers);
    EXPECT_EQ(read.rope_window_inv_freq, config.rope_window_inv_freq);
    EXPECT_EQ(read.rotary_dims, config.rotary_dims);
    EXPECT_EQ(read.rope_magnitude, config.rope_magnitude);
    if (config.rope_as_tensor) continue;  // travels as a tensor
    EXPECT_EQ(read.rope_inv_freq, config.rope_inv_freq);
  }
}

TEST(Architectures, SyntheticTokenizersFitTheirVocabulary) {
  for (const Shape& shape : all_presets()) {
    const SyntheticTokenizer tokenizer = shape.architecture->synthetic_tokenizer(shape.config.vocab);
    for (const int32_t id : {tokenizer.bos, tokenizer.eos, tokenizer.pad})
      EXPECT_TRUE(tokenizer.specials.contains(id)) << shape.name << " " << id;
    EXPECT_GE(tokenizer.specials.begin()->first, 0) << shape.name;
    EXPECT_LT(tokenizer.specials.rbegin()->first, shape.config.vocab) << shape.name;
  }
}

}  // namespace
}  // namespace millrace
