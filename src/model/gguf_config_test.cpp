// GGUF keys mean here what they mean to llama.cpp, those included that our own files do not need: of older
// converters, of fine-tunes, of models whose layers are of other kinds than the published ones'.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "io/gguf_writer.h"
#include "io/hf_directory.h"
#include "model/architecture.h"

namespace millrace {
namespace {

using Edit = std::function<void(io::GgufWriter&)>;

// The header of a file with the keys that `add` writes.
std::string header_of(const std::string& architecture, int32_t vocab, const Edit& add) {
  io::GgufWriter writer("/dev/null");
  writer.set_string("general.architecture", architecture);
  add(writer);
  writer.add_tensor("token_embd.weight", DType::kF32, std::array<int64_t, 2>{vocab, 1});
  std::string bytes = writer.header();
  bytes.resize(writer.file_bytes());
  return bytes;
}

// What is read of a tiny preset's keys, without some of them (behind "<architecture>.") and with others.
ModelConfig read_keys(const std::string& preset, const std::set<std::string>& without, const Edit& add,
                      const nlohmann::json& fields = {}) {
  for (const Architecture* architecture : architectures()) {
    for (const SyntheticPreset& one : architecture->presets()) {
      if (one.name != preset) continue;
      io::Checkpoint hf;
      hf.hf = std::make_shared<io::HfDirectory>();
      hf.hf->path = preset;
      hf.hf->config = nlohmann::json::parse(one.config);
      if (fields.is_object()) hf.hf->config.update(fields);
      ModelConfig config;
      config.architecture = architecture->name();
      config.vocab = hf.hf->config["vocab_size"];
      architecture->read_config(ConfigReader(hf, *architecture), config);
      const std::string usual = header_of(config.architecture, config.vocab, [&](io::GgufWriter& writer) {
        write_config_keys(hf, config, writer);
      });
      const io::Gguf all = io::Gguf::parse(std::as_bytes(std::span(usual)), preset);
      const std::string bytes = header_of(config.architecture, config.vocab, [&](io::GgufWriter& writer) {
        for (const io::GgufRawValue& value : all.raw_metadata()) {
          const bool left = value.key != "general.architecture" &&
                            !without.contains(std::string(value.key.substr(value.key.find('.') + 1)));
          if (left) writer.copy_value(value.key, value.bytes);
        }
        add(writer);
      });
      io::Checkpoint gguf;
      gguf.gguf = io::Gguf::parse(std::as_bytes(std::span(bytes)), preset);
      return read_config(gguf);
    }
  }
  throw_error(ErrorCode::kBadInput, "no preset {}", preset);
}

void nothing(io::GgufWriter&) {}

TEST(GgufConfig, AFactorWithoutATypeIsLinear) {
  const std::set<std::string> scaling = {"rope.scaling.type", "rope.scaling.factor"};
  const auto plain = read_keys("tiny-olmo2", scaling, nothing).rope_inv_freq;
  for (const char* key : {"olmo2.rope.scaling.factor", "olmo2.rope.scale_linear"}) {
    const auto slow =
        read_keys("tiny-olmo2", scaling, [&](io::GgufWriter& w) { w.set_f32(key, 4.0f); }).rope_inv_freq;
    ASSERT_EQ(slow.size(), plain.size());
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_FLOAT_EQ(4 * slow[i], plain[i]) << key;
  }
  const auto none = read_keys("tiny-olmo2", scaling, [](io::GgufWriter& w) {
    w.set_string("olmo2.rope.scaling.type", "none");
    w.set_f32("olmo2.rope.scaling.factor", 4.0f);
  });
  EXPECT_EQ(none.rope_inv_freq, plain);
}

TEST(GgufConfig, YarnsAttentionFactorHasAKeyOfItsOwn) {
  const auto magnitude = [](bool named) {
    return read_keys("tiny-olmo2", {},
                     [named](io::GgufWriter& w) {
                       w.set_string("olmo2.rope.scaling.type", "yarn");
                       w.set_f32("olmo2.rope.scaling.factor", 4.0f);
                       w.set_u32("olmo2.rope.scaling.original_context_length", 64);
                       if (named) w.set_f32("olmo2.rope.scaling.yarn_attn_factor", 1.25f);
                     })
        .rope_magnitude;
  };
  EXPECT_FLOAT_EQ(magnitude(false), static_cast<float>(0.1 * std::log(4.0) + 1.0));
  EXPECT_FLOAT_EQ(magnitude(true), 1.25f);
}

TEST(GgufConfig, WindowsByHowOftenALayerHasNone) {
  const auto windows = [](const char* preset, const std::string& prefix, uint32_t every) {
    return read_keys(preset, {"attention.sliding_window_pattern", "attention.sliding_window"},
                     [&](io::GgufWriter& w) {
                       w.set_u32(prefix + ".attention.sliding_window", 9);
                       w.set_u32(prefix + ".attention.sliding_window_pattern", every);
                     })
        .layer_windows;
  };
  EXPECT_EQ(windows("tiny-gemma3", "gemma3", 2), (std::vector<int32_t>{9, 0, 9}));
  EXPECT_EQ(windows("tiny-gemma3", "gemma3", 3), (std::vector<int32_t>{9, 9, 0}));
  EXPECT_EQ(windows("tiny-gemma3", "gemma3", 1), (std::vector<int32_t>{0, 0, 0}));
  EXPECT_EQ(windows("tiny-gemma3", "gemma3", 0), (std::vector<int32_t>{9, 9, 9}));
}

// Files of Gemma 2 from before the key was there.
TEST(GgufConfig, Gemma2HasAWindowThatOlderFilesDoNotName) {
  const ModelConfig config = read_keys("tiny-gemma2", {"attention.sliding_window"}, nothing);
  EXPECT_EQ(config.layer_windows, (std::vector<int32_t>{4096, 0}));
}

// Olmo 3's files are olmo2's, with windows whose angles are not scaled.
TEST(GgufConfig, Olmo3IsOlmo2WithWindows) {
  const ModelConfig config = read_keys("tiny-olmo2", {}, [](io::GgufWriter& w) {
    w.set_u32("olmo2.attention.sliding_window", 32);
    w.set_string("olmo2.rope.scaling.type", "linear");
    w.set_f32("olmo2.rope.scaling.factor", 4.0f);
  });
  EXPECT_EQ(config.layer_windows, (std::vector<int32_t>{32, 32}));
  ASSERT_EQ(config.rope_window_inv_freq.size(), config.rope_inv_freq.size());
  for (size_t i = 0; i < config.rope_inv_freq.size(); ++i)
    EXPECT_FLOAT_EQ(config.rope_window_inv_freq[i], 4 * config.rope_inv_freq[i]);
  EXPECT_TRUE(read_keys("tiny-olmo2", {}, nothing).rope_window_inv_freq.empty());
}

// Granite 4 without states and without positions becomes a file of granite.
TEST(GgufConfig, GraniteWithoutPositions) {
  const ModelConfig config = read_keys(
      "tiny-granite", {}, [](io::GgufWriter& w) { w.set_bool("granite.rope.scaling.finetuned", false); });
  EXPECT_FALSE(config.is_rotated(0));
  EXPECT_FALSE(config.is_rotated(1));
  EXPECT_TRUE(read_keys("tiny-granite", {}, nothing).is_rotated(0));
}

TEST(GgufConfig, ModernBertNamesItsActivation) {
  const auto activation = [](const char* name) {
    return read_keys("tiny-modernbert", {},
                     [name](io::GgufWriter& w) { w.set_string("modern-bert.hidden_activation", name); })
        .ffn_activation;
  };
  EXPECT_EQ(activation("silu"), Activation::kSilu);
  EXPECT_EQ(activation("gelu"), Activation::kGelu);
  EXPECT_THROW(activation("relu"), Error);
  // And what a Hugging Face directory says is kept.
  EXPECT_EQ(read_keys("tiny-modernbert", {}, nothing, {{"hidden_activation", "silu"}}).ffn_activation,
            Activation::kSilu);
}

TEST(GgufConfig, TokensThatSeeLaterOnesAreRefused) {
  const auto says = [](const char* preset, const char* key) -> std::string {
    try {
      read_keys(preset, {}, [key](io::GgufWriter& w) { w.set_bool(key, false); });
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(says("tiny-llama", "llama.attention.causal").find("attention.causal: found false"),
            std::string::npos);
  EXPECT_NE(says("tiny-lfm2", "lfm2.attention.causal").find("attention.causal: found false"),
            std::string::npos);
}

// Layers with a state in any order: a flag for each, where it is not all but every fourth.
TEST(GgufConfig, StatesInAnyLayers) {
  const std::vector<std::string> kinds = {"full_attention", "linear_attention"};
  const ModelConfig config =
      read_keys("tiny-qwen35", {}, nothing, {{"num_hidden_layers", 2}, {"layer_types", kinds}});
  ASSERT_EQ(config.layers, 2);
  EXPECT_FALSE(config.has_state(0));
  EXPECT_TRUE(config.has_state(1));
}

}  // namespace
}  // namespace millrace
