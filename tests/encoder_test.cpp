// Text encoders through the engine against transformers' last hidden states, from Hugging Face directories
// and GGUF files: whole, among others, whatever the budget of a step; and all-MiniLM-L6-v2 against
// sentence-transformers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "golden_reader.h"
#include "io/checkpoint.h"
#include "millrace/engine.h"

namespace millrace {
namespace {

struct EncodedText {
  std::vector<int32_t> tokens;
  std::vector<float> mean, first, last;  // [hidden]
  const std::vector<float>& of(Pooling pooling) const {
    return pooling == Pooling::kMean ? mean : pooling == Pooling::kFirst ? first : last;
  }
};

struct Encoder {
  std::string folder;
  nlohmann::json golden;
  std::vector<EncodedText> texts;
  std::vector<std::string> paths() const { return {folder + "hf", folder + "model.gguf"}; }
};

Encoder load_encoder(const std::string& name) {
  Encoder out;
  out.folder = golden::kRoot + "encoders/" + name + "/";
  out.golden = golden::read_json(out.folder + "golden.json");
  const std::vector<float> all = golden::read_floats(out.folder + "golden.f32");
  const auto hidden = out.golden.at("hidden").get<ptrdiff_t>();
  for (const auto& prompt : out.golden.at("prompts")) {
    const auto at = all.begin() + prompt.at("offset").get<ptrdiff_t>();
    out.texts.push_back({prompt.at("tokens").get<std::vector<int32_t>>(),
                         {at, at + hidden},
                         {at + hidden, at + 2 * hidden},
                         {at + 2 * hidden, at + 3 * hidden}});
  }
  return out;
}

EngineOptions options_for(const std::string& model, const std::string& device, const std::string& kv_type) {
  EngineOptions options;
  options.model = model;
  options.device = device;
  options.threads = 2;
  options.kv_tokens = 2048;
  options.kv_type = kv_type;
  options.max_running = 4;
  return options;
}

bool holds_blocks(const std::string& path) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  return std::any_of(checkpoint.tensors().begin(), checkpoint.tensors().end(),
                     [](const TensorView& t) { return info(t.type).block_elements > 1; });
}

std::vector<float> embedding_of(Engine& engine, const std::vector<int32_t>& tokens, Pooling pooling) {
  EventStream stream = engine.submit({.tokens = tokens, .embedding = pooling});
  const std::optional<Event> event = stream.next();
  EXPECT_TRUE(event && event->finish == FinishReason::kEmbedded) << (event ? event->error : "nothing");
  EXPECT_EQ(event ? event->usage.cached_tokens : 1, 0);
  return event ? event->embedding : std::vector<float>();
}

double worst_of_encoder(Engine& engine, const Encoder& encoder) {
  double worst = 0;
  for (const EncodedText& text : encoder.texts) {
    for (const Pooling pooling : {Pooling::kMean, Pooling::kFirst, Pooling::kLast}) {
      worst = std::max(worst,
                       golden::relative_error(embedding_of(engine, text.tokens, pooling), text.of(pooling)));
    }
  }
  return worst;
}

class Encoders : public testing::TestWithParam<std::string> {};

TEST_P(Encoders, AgreeWithTransformers) {
  const Encoder encoder = load_encoder(GetParam());
  for (const std::string& path : encoder.paths()) {
    SCOPED_TRACE(path);
    std::vector<std::string> devices = golden::device_names();
    devices.insert(devices.begin(), "reference");
    for (const std::string& device : devices) {
      const auto engine = Engine::create(options_for(path, device, "f32"));
      EXPECT_EQ(engine->model().architecture, encoder.golden.at("architecture").get<std::string>());
      EXPECT_TRUE(engine->model().encoder);
      EXPECT_EQ(engine->model().pooling,
                encoder.golden.at("pooling") == "cls" ? Pooling::kFirst : Pooling::kMean);
      const double worst = worst_of_encoder(*engine, encoder);
      std::printf("[  figure  ] %-9s %s: %.1e\n", device.c_str(), path.c_str(), worst);
      // 8-bit activations cost 0.5% a product, a GPU's bf16 0.2% (golden_test.cpp).
      const double exact = device.starts_with("cuda") ? 0.03 : 1e-4;
      EXPECT_LT(worst, device != "reference" && holds_blocks(path) ? 0.1 : exact) << device;
    }
  }
}

// A text is never cut: not by the budget of a step, not by others in it, not by what is remembered.
void expect_same_bits(const Encoder& encoder, const std::string& device) {
  EngineOptions options = options_for(encoder.paths().back(), device, "bf16");
  const auto engine = Engine::create(options);
  std::vector<std::vector<float>> alone;
  for (const EncodedText& text : encoder.texts)
    alone.push_back(embedding_of(*engine, text.tokens, Pooling::kMean));
  options.step_tokens = 16;  // raised to the context
  options.threads = 3;
  const auto other = Engine::create(options);
  std::vector<EventStream> streams;
  for (int round = 0; round < 3; ++round) {
    for (const EncodedText& text : encoder.texts) {
      streams.push_back(other->submit({.tokens = text.tokens, .embedding = Pooling::kMean}));
    }
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const std::optional<Event> event = streams[i].next();
    ASSERT_TRUE(event && event->finish == FinishReason::kEmbedded) << (event ? event->error : "nothing");
    EXPECT_EQ(event->embedding, alone[i % alone.size()]) << "text " << i;
    EXPECT_EQ(event->usage.cached_tokens, 0);
  }
}

TEST_P(Encoders, SameBitsInAnyCompany) {
  const Encoder encoder = load_encoder(GetParam());
  for (const std::string& device : golden::device_names()) {
    SCOPED_TRACE(device);
    expect_same_bits(encoder, device);
  }
}

TEST_P(Encoders, RefuseWhatTheyAreNotFor) {
  const Encoder encoder = load_encoder(GetParam());
  const auto engine = Engine::create(options_for(encoder.paths().front(), "cpu", "f32"));
  try {
    engine->submit({.tokens = {1, 2, 3}});
    ADD_FAILURE() << "an encoder wrote text";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("is a text encoder"), std::string::npos) << error.what();
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
  const std::vector<int32_t> longer(static_cast<size_t>(engine->model().context) + 1, 1);
  EXPECT_THROW(engine->submit({.tokens = longer, .embedding = Pooling::kMean}), PromptTooLong);
}

INSTANTIATE_TEST_SUITE_P(Models, Encoders,
                         testing::Values("bert", "bert-cls", "modernbert", "modernbert-odd"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(LearnedPositions, EndTheContext) {
  for (const std::string& path :
       std::vector<std::string>{"encoders/bert/model.gguf", "models/gpt2/model.gguf"}) {
    EngineOptions options = options_for(golden::kRoot + path, "cpu", "f32");
    options.context = 1024;
    try {
      Engine::create(options);
      ADD_FAILURE() << path;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("positions"), std::string::npos) << error.what();
    }
  }
}

TEST(MiniLm, AgreesWithSentenceTransformers) {
  const std::string path = "build/models/all-MiniLM-L6-v2";
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there; `python3 tools/fetch_model.py minilm` fetches it";
  }
  const auto engine = Engine::create(options_for(path, "cpu", "f32"));
  EXPECT_EQ(engine->model().pooling, Pooling::kMean);
  for (const auto& sentence : golden::read_json(golden::kRoot + "encoders/minilm.json")) {
    const auto tokens = sentence.at("tokens").get<std::vector<int32_t>>();
    const std::vector<float> found = embedding_of(*engine, tokens, engine->model().pooling);
    const auto expected = sentence.at("vector").get<std::vector<float>>();
    ASSERT_EQ(found.size(), expected.size());
    double dot = 0, squares = 0, wanted = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      dot += double{found[i]} * expected[i];
      squares += double{found[i]} * found[i];
      wanted += double{expected[i]} * expected[i];
    }
    EXPECT_LT(1 - dot / std::sqrt(squares * wanted), 1e-6) << sentence.at("text");
  }
}

}  // namespace
}  // namespace millrace
