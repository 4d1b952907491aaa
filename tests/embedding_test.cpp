// Embeddings through the engine against transformers' last hidden state: tiny models of every architecture
// in both file formats, and SmolLM2 on the same dequantized weights. (src/engine/same_bits_test.cpp has
// chunks, neighbours and preemption.)
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "golden_reader.h"
#include "io/checkpoint.h"
#include "io/hf_directory.h"
#include "millrace/engine.h"
#include "model/config.h"

namespace millrace {
namespace {

struct Recorded {
  std::vector<int32_t> tokens;
  std::vector<float> mean, last;  // [hidden]
};

std::vector<Recorded> recorded(const std::string& name) {
  const nlohmann::json json = golden::read_json(golden::kRoot + "embeddings.json").at(name);
  const std::vector<float> all = golden::read_floats(golden::kRoot + "embeddings.f32");
  const auto hidden = json.at("hidden").get<ptrdiff_t>();
  std::vector<Recorded> out;
  for (const auto& prompt : json.at("prompts")) {
    const auto at = all.begin() + prompt.at("offset").get<ptrdiff_t>();
    out.push_back(
        {prompt.at("tokens").get<std::vector<int32_t>>(), {at, at + hidden}, {at + hidden, at + 2 * hidden}});
  }
  return out;
}

std::unique_ptr<Engine> open(const std::string& model, const std::string& device) {
  EngineOptions options;
  options.model = model;
  options.device = device;
  options.threads = 2;
  options.context = 512;
  options.kv_tokens = 2048;
  options.kv_type = "f32";
  options.max_running = 4;
  options.step_tokens = 64;  // so that the longer prompts come in pieces
  return Engine::create(options);
}

Event last_event(Engine& engine, const Request& request) {
  EventStream stream = engine.submit(request);
  std::optional<Event> event = stream.next();
  EXPECT_TRUE(event && event->kind != Event::Kind::kToken && !stream.next()) << "one event, and no more";
  return event.value_or(Event{});
}

// The worst over all prompts and both kinds of pooling.
double worst_error(Engine& engine, const std::vector<Recorded>& prompts) {
  double worst = 0;
  for (const Recorded& prompt : prompts) {
    for (const Pooling pooling : {Pooling::kMean, Pooling::kLast}) {
      const Event event = last_event(engine, {.tokens = prompt.tokens, .embedding = pooling});
      EXPECT_EQ(event.finish, FinishReason::kEmbedded) << event.error;
      EXPECT_EQ(event.usage.prompt_tokens, static_cast<int32_t>(prompt.tokens.size()));
      EXPECT_EQ(event.usage.generated_tokens, 0);
      worst = std::max(worst, golden::relative_error(event.embedding,
                                                     pooling == Pooling::kMean ? prompt.mean : prompt.last));
    }
  }
  return worst;
}

// Or what becomes blocks when it is loaded.
bool has_blocks(const io::Checkpoint& checkpoint) {
  if (checkpoint.hf && checkpoint.hf->config.contains("quantization_config")) return true;
  return std::any_of(checkpoint.tensors().begin(), checkpoint.tensors().end(), [](const TensorView& t) {
    return info(t.type).block_elements > 1 || t.name.ends_with("_blocks");
  });
}

TEST(Embedding, TinyModelsAgreeWithTransformers) {
  for (const std::string& name : golden::model_names()) {
    const std::vector<Recorded> prompts = recorded(name);
    for (const std::string& path : golden::load_model(name).paths) {
      SCOPED_TRACE(path);
      const io::Checkpoint checkpoint = io::Checkpoint::open(path);
      EXPECT_LT(worst_error(*open(path, "reference"), prompts), 1e-4);
      // As in golden_test.cpp: 8-bit activations cost 0.5% a product, of which a layer has 5; a token near a
      // tie of two experts may go elsewhere. A GPU rounds activations of every product to bf16, 0.2%.
      for (const std::string& device : golden::device_names()) {
        std::unique_ptr<Engine> engine;
        try {
          engine = open(path, device);
        } catch (const Error& error) {  // what a device refuses it names; the CPU refuses nothing
          ASSERT_TRUE(device != "cpu" && error.code() == ErrorCode::kUnsupported) << error.what();
          EXPECT_NE(std::string_view(error.what()).find("does not do yet: "), std::string_view::npos)
              << error.what();
          std::printf("[  figure  ] %s\n", error.what());
          continue;
        }
        const bool experts = read_config(checkpoint).experts > 0;
        const double exact = device.starts_with("cuda") ? (experts ? 0.5 : 0.03) : (experts ? 1e-3 : 1e-4);
        EXPECT_LT(worst_error(*engine, prompts), has_blocks(checkpoint) ? (experts ? 0.5 : 0.1) : exact)
            << device;
      }
    }
  }
}

TEST(Embedding, SmolLm2AgreesWithTransformers) {
  const std::string path = "build/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there; `python3 tools/fetch_model.py smollm2` fetches it";
  }
  const std::vector<Recorded> prompts = recorded("smollm2");
  const double cpu = worst_error(*open(path, "cpu"), prompts);
  const double reference = worst_error(*open(path, "reference"), {prompts.front()});
  std::printf("[  figure  ] relative error: cpu %.1e, reference %.1e\n", cpu, reference);
  EXPECT_LT(reference, 1e-4);
  EXPECT_LT(cpu, 0.1);
}

// The mean needs every token and takes nothing from the cache; the last token alone does.
TEST(Embedding, PrefixHits) {
  const auto engine = open(golden::kRoot + "models/llama3/model.gguf", "cpu");
  const Recorded prompt = recorded("llama3").back();
  const Request mean{.tokens = prompt.tokens, .embedding = Pooling::kMean};
  const Request last{.tokens = prompt.tokens, .embedding = Pooling::kLast};
  const Event first = last_event(*engine, mean), again = last_event(*engine, mean);
  EXPECT_EQ(again.usage.cached_tokens, 0);
  EXPECT_EQ(again.embedding, first.embedding);
  const Event found = last_event(*engine, last);  // what the mean has computed is remembered, by whole blocks
  EXPECT_EQ(found.usage.cached_tokens, static_cast<int32_t>(prompt.tokens.size()) / 16 * 16);
  EXPECT_LT(golden::relative_error(found.embedding, prompt.last), 0.1);
}

TEST(Embedding, WhatMakesNoSenseIsRefused) {
  const auto engine = open(golden::kRoot + "models/llama3/model.gguf", "cpu");
  EXPECT_EQ(engine->model().embedding_size, 96);
  Request request{.tokens = {1, 2}, .embedding = Pooling::kMean, .samples = 2};
  EXPECT_THROW(engine->submit(request), Error);
  request.samples = 1;
  request.stop = {"x"};
  EXPECT_THROW(engine->submit(request), Error);
  request.stop.clear();
  EXPECT_EQ(last_event(*engine, request).finish, FinishReason::kEmbedded);
}

}  // namespace
}  // namespace millrace
