// A real model: Gemma 3 270M, Q4_K_M, against transformers on the same dequantized weights
// (golden/make_gemma3.py): the largest logits behind some prompts, and how they go on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "engine/runtime.h"
#include "golden_reader.h"

namespace millrace {
namespace {

constexpr const char* kGemma3 = "build/models/gemma-3-270m.Q4_K_M.gguf";

std::unique_ptr<Runtime> open_gemma3(const char* device) {
  if (!std::filesystem::exists(kGemma3)) return nullptr;
  return Runtime::open({.model = kGemma3, .device = device, .context = 256, .step_tokens = 16},
                       {.logit_rows = 1});
}

// The largest difference from a recorded logit, of those that are largest.
double worst_of_top(Runtime& runtime, const nlohmann::json& prompt) {
  const auto tokens = prompt.at("prompt").get<std::vector<int32_t>>();
  kv::Sequence sequence = runtime.make_sequence();
  const std::span<const float> logits = runtime.prefill(sequence, tokens);
  double worst = 0;
  for (const auto& [token, logit] : prompt.at("top").get<std::vector<std::pair<size_t, double>>>()) {
    worst = std::max(worst, std::abs(logits[token] - logit));
  }
  return worst;
}

TEST(Gemma3, LogitsAreThoseOfTransformers) {
  const auto reference = open_gemma3("reference"), cpu = open_gemma3("cpu");
  if (!cpu) GTEST_SKIP() << kGemma3 << " is not there; `python3 tools/fetch_model.py gemma3` fetches it";
  for (const auto& prompt : golden::read_json(golden::kRoot + "gemma3.json")) {
    const double exact = worst_of_top(*reference, prompt), rounded = worst_of_top(*cpu, prompt);
    std::printf("[  figure  ] largest difference of the largest logits: reference %.1e, cpu %.1e\n", exact,
                rounded);
    EXPECT_LT(exact, 2e-3);   // of logits around 20
    EXPECT_LT(rounded, 1.0);  // activations in 8 bits through 18 layers
  }
}

// Each token of transformers' is the likeliest behind those before it, or within kNearTie of it: activations
// in 8 bits move these logits by half of one, and of two tokens 0.014 apart either may be picked.
TEST(Gemma3, CpuGoesOnAsTransformersDoes) {
  constexpr float kNearTie = 0.25f;
  const auto runtime = open_gemma3("cpu");
  if (!runtime) GTEST_SKIP() << kGemma3 << " is not there; `python3 tools/fetch_model.py gemma3` fetches it";
  const auto first = golden::read_json(golden::kRoot + "gemma3.json").at(0);
  const auto greedy = first.at("greedy").get<std::vector<int32_t>>();
  const auto prompt = first.at("prompt").get<std::vector<int32_t>>();
  EXPECT_EQ(runtime->tokenizer().encode("The capital of France is", {.add_special = true}), prompt);
  kv::Sequence sequence = runtime->make_sequence();
  std::span<const float> logits = runtime->prefill(sequence, prompt);
  size_t likeliest = 0;
  for (const int32_t& token : greedy) {
    const float best = *std::max_element(logits.begin(), logits.end()),
                its = logits[static_cast<size_t>(token)];
    EXPECT_LT(best - its, kNearTie) << "token " << &token - greedy.data();
    likeliest += best == its ? 1 : 0;
    logits = runtime->prefill(sequence, std::span(&token, 1));
  }
  EXPECT_GE(likeliest, greedy.size() - 2);
}

}  // namespace
}  // namespace millrace
