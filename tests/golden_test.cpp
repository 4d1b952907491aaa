// Every tiny golden model, in every file format it comes in, against what transformers recorded; and on the
// CPU the same bits however the prompt is cut and whatever shares the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "engine/runtime.h"
#include "golden_reader.h"
#include "prompt_logits.h"

namespace millrace {
namespace {

using golden::Prompt;

std::unique_ptr<Runtime> open(const std::string& path, const std::string& device, DType kv_type,
                              int threads = 2) {
  constexpr int32_t kRows = 1024;
  return Runtime::open({.model = path,
                        .device = device,
                        .threads = threads,
                        .context = 512,
                        .kv_type = std::string(kv_type_name(kv_type)),
                        .step_tokens = kRows},
                       {.sequences = 8, .logit_rows = kRows});
}

std::vector<double> row_errors(Runtime& runtime, const golden::Model& model) {
  std::vector<double> errors;
  const size_t vocab = static_cast<size_t>(model.vocab_size);
  for (const Prompt& prompt : model.prompts) {
    const std::vector<float> logits = all_logits(runtime, prompt.tokens, 1024);
    for (size_t i = 0; i < prompt.positions.size(); ++i) {
      errors.push_back(golden::relative_error(std::span(logits).subspan(prompt.positions[i] * vocab, vocab),
                                              prompt.row(i)));
    }
  }
  std::sort(errors.begin(), errors.end());
  return errors;
}

bool has_quantized_matrices(const io::Checkpoint& checkpoint) {
  return std::any_of(checkpoint.tensors().begin(), checkpoint.tensors().end(), [](const TensorView& t) {
    const bool packed =
        t.name.ends_with("_blocks") || t.name.ends_with(".qweight") || t.name.ends_with(".weight_packed");
    return packed || info(t.type).block_elements > 1;
  });
}

bool has_16_bit_matrices(const io::Checkpoint& checkpoint) {
  return std::any_of(checkpoint.tensors().begin(), checkpoint.tensors().end(),
                     [](const TensorView& t) { return t.rank > 1 && t.type != DType::kF32; });
}

bool has_states(const Runtime& runtime) {
  const std::vector<bool>& layers = runtime.config().state_layers;
  return std::find(layers.begin(), layers.end(), true) != layers.end();
}

// Relative error a device may make in a row of logits.
//   weights in blocks: activations are rounded to 8 bits per block of 32, a step of amax / 127. The largest
//   of 32
//     normal values is about 2.1 sigma, so the error is 2.1 / 127 / sqrt(12) = 0.5% of sigma per product;
//   a GPU multiplies bf16 by bf16: activations are rounded, 0.16% of a value on average, and so are weights
//     that no bf16 holds: 0.25% in all; blocks, whose scale is rounded too, are within the 0.5% above;
//   a GPU's layers with a state multiply in TF32, 11 bits of mantissa: 2^-12 / sqrt(3) of either factor,
//   0.02%; BF16 cache: 8 bits of mantissa, 2^-9 / sqrt(3) = 0.11% per key and value; fp8: 4 bits, 1.8%;
//   float32 sums of a few hundred terms: 1e-6.
// Errors of the 5 products of a layer add like noise; 3 sigma are allowed.
double bound(const Runtime& runtime, const std::string& device, DType kv_type) {
  double noise = 1e-6;
  if (has_quantized_matrices(runtime.checkpoint())) {
    noise += 0.005;
  } else if (device == "cuda" && has_16_bit_matrices(runtime.checkpoint())) {
    noise += 0.0025;
  }
  if (device == "cuda" && has_states(runtime)) noise += 0.0002;
  if (kv_type == DType::kBF16) noise += 0.0011;
  if (kv_type == DType::kF8E4M3) noise += 0.018;
  return 3 * noise * std::sqrt(5.0 * runtime.config().layers + 1);
}

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, ReferenceAgreesWithTransformers) {
  const golden::Model model = golden::load_model(GetParam());
  for (const std::string& path : model.paths) {
    SCOPED_TRACE(path);
    const auto runtime = open(path, "reference", DType::kF32);
    EXPECT_EQ(runtime->config().architecture, model.architecture);
    const std::vector<double> errors = row_errors(*runtime, model);
    EXPECT_LT(errors.back(), 1e-4);
    RecordProperty("worst", std::to_string(errors.back()));
  }
}

TEST_P(Golden, ReferenceContinuesAsTransformers) {
  const golden::Model model = golden::load_model(GetParam());
  const auto runtime = open(model.paths.front(), "reference", DType::kF32);
  kv::Sequence sequence = runtime->make_sequence();
  std::span<const float> logits = runtime->prefill(sequence, model.prompts[model.greedy.prompt].tokens);
  for (size_t i = 0; i < model.greedy.tokens.size(); ++i) {
    const auto best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    ASSERT_EQ(best, model.greedy.tokens[i]) << "token " << i << ", gap " << model.greedy.gaps[i];
    logits = runtime->prefill(sequence, std::span(&best, 1));
  }
}

TEST_P(Golden, TokenizerAndTemplateAgree) {
  const golden::Model model = golden::load_model(GetParam());
  for (const std::string& path : model.paths) {
    SCOPED_TRACE(path);
    const auto runtime = open(path, "reference", DType::kF32);
    for (const golden::Text& text : model.texts)
      EXPECT_EQ(runtime->tokenizer().encode(text.text), text.tokens) << text.text;
    ASSERT_NE(runtime->chat_template(), nullptr);
    const nlohmann::ordered_json messages = nlohmann::ordered_json::parse(model.chat.at("messages").dump());
    const auto token_text = [&](std::optional<TokenId> id) {
      return id ? runtime->tokenizer().token_bytes(*id, true) : std::string();
    };
    const auto ends = runtime->tokenizer().end_tokens();
    const std::string text = runtime->chat_template()->render(
        {{"messages", messages},
         {"add_generation_prompt", true},
         {"bos_token", token_text(runtime->tokenizer().bos())},
         {"eos_token", ends.empty() ? std::string() : token_text(ends.front())}});
    EXPECT_EQ(text, model.chat.at("text").get<std::string>());
  }
}

// The devices under test besides the reference: the CPU, and what MILLRACE_TEST_DEVICES adds ("cpu,cuda").
std::vector<std::string> devices() {
  const char* variable = std::getenv("MILLRACE_TEST_DEVICES");
  std::vector<std::string> list;
  std::string text = variable != nullptr ? variable : "cpu";
  for (size_t at = 0; at != std::string::npos;) {
    const size_t comma = text.find(',', at);
    list.push_back(text.substr(at, comma - at));
    at = comma == std::string::npos ? comma : comma + 1;
  }
  return list;
}

// A device may lack an operation of the model's: it then says which, before a weight is loaded. The CPU lacks
// none.
bool refuses(const std::string& device, const std::string& path) {
  if (device == "cpu") return false;
  try {
    open(path, device, DType::kF32);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    EXPECT_NE(std::string_view(error.what()).find("does not do yet: "), std::string_view::npos)
        << error.what();
    std::printf("[  figure  ] %s\n", error.what());
    return true;
  }
  return false;
}

TEST_P(Golden, DeviceAgreesWithTransformers) {
  const golden::Model model = golden::load_model(GetParam());
  for (const std::string& device : devices()) {
    if (refuses(device, model.paths.front())) continue;
    for (const std::string& path : model.paths) {
      for (const DType kv_type : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
        SCOPED_TRACE(device + " " + path + " kv " + std::string(info(kv_type).name));
        const auto runtime = open(path, device, kv_type);
        const std::vector<double> errors = row_errors(*runtime, model);
        const double allowed = bound(*runtime, device, kv_type);
        const double median = errors[errors.size() / 2];
        EXPECT_LT(median, allowed);
        // The worst of a hundred rows: one whose logits are small, or whose attention sits on few tokens, so
        // that their errors do not average. And rounding may send a token to another expert where two router
        // logits nearly tie; such a row, and those that attend to it, may differ by more than half.
        EXPECT_LT(errors.back(), runtime->config().experts > 0 ? std::max(0.6, 3 * allowed) : 3 * allowed);
        std::printf("[  figure  ] %-60s median %.1e worst %.1e allowed %.1e\n",
                    (device + " " + path + " kv " + std::string(info(kv_type).name)).c_str(), median,
                    errors.back(), allowed);
      }
    }
  }
}

// One piece, pieces of 1, 7, 16 and 33, one thread or three, alone or in a batch with everything else: same
// bits.
TEST_P(Golden, SameBitsHoweverCutAndBatched) {
  const golden::Model model = golden::load_model(GetParam());
  for (const std::string& device : devices()) {
    const std::string& path = model.paths.back();
    if (refuses(device, path)) continue;
    SCOPED_TRACE(device + " " + path);
    const auto runtime = open(path, device, DType::kBF16);
    std::vector<std::vector<float>> alone;
    for (const Prompt& prompt : model.prompts) alone.push_back(all_logits(*runtime, prompt.tokens, 1024));

    const Prompt& longest = model.prompts.front();
    for (const size_t chunk : {1, 7, 16, 33}) {
      EXPECT_EQ(all_logits(*runtime, longest.tokens, chunk), alone.front()) << "in pieces of " << chunk;
    }
    const auto other_threads = open(path, device, DType::kBF16, 3);
    EXPECT_EQ(all_logits(*other_threads, longest.tokens, 33), alone.front()) << "three threads";

    // All prompts together, each in its own rhythm.
    const std::vector<size_t> rhythm = {33, 1, 7, 5, 16, 150};
    std::vector<kv::Sequence> sequences;
    for (size_t i = 0; i < model.prompts.size(); ++i) sequences.push_back(runtime->make_sequence());
    std::vector<std::vector<float>> together(model.prompts.size());
    for (bool more = true; more;) {
      std::vector<StepInput> inputs;
      std::vector<size_t> who;
      for (size_t i = 0; i < model.prompts.size(); ++i) {
        const std::span<const int32_t> rest =
            std::span(model.prompts[i].tokens).subspan(sequences[i].length());
        if (rest.empty()) continue;
        inputs.push_back({&sequences[i], rest.first(std::min(rest.size(), rhythm[i % rhythm.size()])),
                          StepInput::Want::kAll});
        who.push_back(i);
      }
      more = !inputs.empty();
      if (!more) break;
      std::span<const float> logits = runtime->step(inputs);
      for (size_t j = 0; j < inputs.size(); ++j) {
        const size_t count = inputs[j].tokens.size() * static_cast<size_t>(model.vocab_size);
        together[who[j]].insert(together[who[j]].end(), logits.begin(),
                                logits.begin() + static_cast<ptrdiff_t>(count));
        logits = logits.subspan(count);
      }
    }
    for (size_t i = 0; i < alone.size(); ++i)
      EXPECT_EQ(together[i], alone[i]) << "prompt " << i << " in a batch";
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Golden, testing::ValuesIn(golden::model_names()), [](const auto& param) {
  std::string name = param.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace millrace
