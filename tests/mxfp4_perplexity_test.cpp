// What the AMX table's own rounding of MXFP4's activations costs: perplexity of a trained model whose weights
// are made MXFP4 as they are loaded, against `reference` on the same weights. (The other tables give one
// another's bits, and smollm2_test.cpp measures them.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "engine/runtime.h"
#include "golden_reader.h"
#include "quant/type_request.h"

namespace millrace {
namespace {

constexpr const char* kStories = "build/models/stories15M-F32.gguf";
constexpr const char* kStoriesText = "tests/golden/text/stories.txt";  // told by the model itself, in f32

std::unique_ptr<Runtime> open_mxfp4(const char* device) {
  constexpr int32_t kRows = 100;
  EngineOptions options{.model = kStories, .device = device, .quantize = "mxfp4", .step_tokens = kRows};
  options.context = 256;  // what it was trained for
  return Runtime::open(options, {.logit_rows = kRows});
}

// Over windows of 256 tokens, in steps of 100 (tiles) and then of 8 (the kernels of decode).
double perplexity(Runtime& runtime, std::span<const int32_t> tokens) {
  const auto vocab = static_cast<size_t>(runtime.config().vocab);
  double nll = 0;
  int scored = 0;
  for (; tokens.size() > 1; tokens = tokens.subspan(std::min<size_t>(256, tokens.size()))) {
    const std::span<const int32_t> window = tokens.first(std::min<size_t>(256, tokens.size()));
    kv::Sequence sequence = runtime.make_sequence();
    for (size_t at = 0, count; at < window.size(); at += count) {
      count = window.size() - at >= 100 ? 100 : std::min<size_t>(window.size() - at, 8);
      const StepInput input = {&sequence, window.subspan(at, count), StepInput::Want::kAll};
      const std::span<const float> logits = runtime.step({&input, 1});
      for (size_t i = 0; i < count && at + i + 1 < window.size(); ++i, ++scored) {
        const std::span<const float> row = logits.subspan(i * vocab, vocab);
        const double top = *std::max_element(row.begin(), row.end());
        double sum = 0;
        for (const float x : row) sum += std::exp(x - top);
        nll += top + std::log(sum) - row[static_cast<size_t>(window[at + i + 1])];
      }
    }
  }
  return std::exp(nll / scored);
}

TEST(Mxfp4Perplexity, OnAmxIsWithinHalfAPercentOfReference) {
  if (!std::filesystem::exists(kStories)) {
    GTEST_SKIP() << kStories << " is not there; `python3 tools/fetch_model.py stories15m` fetches it";
  }
  ::setenv("MILLRACE_ISA", "amx", 1);
  std::unique_ptr<Runtime> amx;
  try {
    amx = open_mxfp4("cpu");
  } catch (const Error& error) {
    ::unsetenv("MILLRACE_ISA");
    GTEST_SKIP() << "this processor has no AMX, whose bits for MXFP4 are its own: " << error.what();
  }
  ::unsetenv("MILLRACE_ISA");
  ASSERT_EQ(amx->backend().isa(), "amx");
  const auto reference = open_mxfp4("reference");
  const std::vector<std::byte> text = golden::read_bytes(kStoriesText);
  std::vector<int32_t> tokens = amx->tokenizer().encode(
      {reinterpret_cast<const char*>(text.data()), text.size()}, {.add_special = true});
  ASSERT_GT(tokens.size(), 1024u);
  tokens.resize(1024);
  const double got = perplexity(*amx, tokens), want = perplexity(*reference, tokens);
  std::printf("[  figure  ] perplexity %.4f on amx, %.4f on reference, %+.3f%%\n", got, want,
              100 * (got / want - 1));
  EXPECT_GT(want, 1.5);
  EXPECT_LT(want, 20.0);  // the model has learned such stories
  EXPECT_NEAR(got / want, 1.0, 0.005);
}

}  // namespace
}  // namespace millrace
