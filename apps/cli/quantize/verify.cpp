#include "quantize/verify.h"

#include <algorithm>
#include <cmath>

#include "engine/divergence.h"
#include "engine/load_tokenizer.h"
#include "engine/sample_text.h"
#include "io/checkpoint.h"
#include "open_model.h"

namespace millrace::cli {
namespace {

constexpr size_t kTokens = 64;
// Errors of the weights add up over layers and some of them cancel, and activations are rounded to fit the
// weights' type; a permuted head or a lost scale is far beyond (tests/quantize_test.py).
constexpr double kPerWeightError = 4.0, kRounding = 0.03;

std::vector<int32_t> sample_tokens(const std::string& model) {
  std::vector<int32_t> tokens = load_tokenizer(io::Checkpoint::open(model))->encode(std::string(kSampleText));
  tokens.resize(std::min(tokens.size(), kTokens));
  return tokens;
}

std::vector<float> logits_of(EngineOptions options, const std::string& model, std::span<const int32_t> tokens,
                             DivergenceMeter* meter, std::span<const float> baseline) {
  options.model = model;
  options.kv_type = "f32";
  options.lock = false;
  options.context = static_cast<int32_t>(tokens.size());
  options.step_tokens = static_cast<int32_t>(tokens.size());
  const std::unique_ptr<Runtime> runtime =
      open_runtime(options, {.logit_rows = static_cast<int32_t>(tokens.size())});
  std::vector<float> logits = all_logits(*runtime, tokens);
  if (meter != nullptr) {
    std::vector<int32_t> next(tokens.begin() + 1, tokens.end());
    next.push_back(-1);
    meter->add(runtime->backend(), baseline, logits, runtime->config().vocab, next);
  }
  return logits;
}

// Of the differences, over the spread of the baseline: a constant added to a row of logits means nothing.
double relative_error(std::span<const float> baseline, std::span<const float> other, size_t vocab) {
  double difference = 0, spread = 0;
  for (size_t row = 0; row + vocab <= baseline.size(); row += vocab) {
    double mean = 0, shift = 0;
    for (size_t i = row; i < row + vocab; ++i) {
      mean += baseline[i];
      shift += static_cast<double>(other[i]) - baseline[i];
    }
    mean /= static_cast<double>(vocab);
    shift /= static_cast<double>(vocab);
    for (size_t i = row; i < row + vocab; ++i) {
      difference += std::pow(static_cast<double>(other[i]) - baseline[i] - shift, 2);
      spread += std::pow(baseline[i] - mean, 2);
    }
  }
  return spread > 0 ? std::sqrt(difference / spread) : 0.0;
}

}  // namespace

Verification verify_logits(const EngineOptions& options, const std::string& written, double weight_error) {
  const std::vector<int32_t> tokens = sample_tokens(options.model);
  const std::vector<float> source = logits_of(options, options.model, tokens, nullptr, {});
  DivergenceMeter meter;
  const std::vector<float> file = logits_of(options, written, tokens, &meter, source);
  const Divergence divergence = meter.result();
  return {.tokens = static_cast<int64_t>(tokens.size()),
          .relative_error = relative_error(source, file, source.size() / tokens.size()),
          .limit = kRounding + kPerWeightError * weight_error,
          .kl = divergence.mean,
          .top1_agreement = divergence.top1_agreement};
}

}  // namespace millrace::cli
