#include "sampling_options.h"

#include <charconv>

#include "base/error.h"
#include "io/printable.h"

namespace millrace::cli {

void add_sampling_options(Command& command, SamplingOptions& options) {
  SamplingParams& p = options.params;
  ModelInfo::Sampling& given = options.given;
  const auto add = [&](const char* name, auto& value, const char* help) {
    command.option(name, value, help).show_default().group("Sampling, in this order");
  };
  add("--repeat-penalty", given.repetition_penalty,
      "of tokens in prompt and answer; 1: none; default: the model's, else 1");
  add("--frequency-penalty", p.frequency_penalty, "for each time a token was generated");
  add("--presence-penalty", p.presence_penalty, "for a token that was generated at all");
  add("--logit-bias", options.biases, "ID=BIAS, added to that token's logit; may be repeated");
  add("--temp", given.temperature,
      "temperature; 0: always the likeliest token; default: the model's, else 0.7");
  add("--top-k", given.top_k, "keep the K likeliest tokens; 0: all; default: the model's, else all");
  add("--top-p", given.top_p,
      "keep the likeliest tokens that make up this probability; default: the model's, else 0.95");
  add("--min-p", given.min_p,
      "keep tokens at least this times as likely as the likeliest; default: the model's, else 0");
  add("--seed", p.seed, "same seed, same text; default: a new one each time");
}

SamplingParams sampling_params(const SamplingOptions& options, const ModelInfo::Sampling& advised) {
  SamplingParams params = options.params;
  const auto choose = [](auto& value, const auto& given, const auto& model, auto otherwise) {
    value = given ? *given : model.value_or(otherwise);
  };
  const ModelInfo::Sampling& given = options.given;
  choose(params.temperature, given.temperature, advised.temperature, 0.7f);
  choose(params.top_p, given.top_p, advised.top_p, 0.95f);
  choose(params.top_k, given.top_k, advised.top_k, 0);
  choose(params.min_p, given.min_p, advised.min_p, 0.0f);
  choose(params.repetition_penalty, given.repetition_penalty, advised.repetition_penalty, 1.0f);
  for (const std::string& bias : options.biases) {
    int32_t token = 0;
    float value = 0.0f;
    const char* end = bias.data() + bias.size();
    const auto [after_id, id_error] = std::from_chars(bias.data(), end, token);
    bool good = id_error == std::errc() && after_id != end && *after_id == '=';
    if (good) {
      const auto [after, error] = std::from_chars(after_id + 1, end, value);
      good = error == std::errc() && after == end;
    }
    if (!good) {
      throw_error(ErrorCode::kBadInput, "--logit-bias: found {}, expected ID=BIAS such as 42=-1.5",
                  io::printable(bias));
    }
    params.logit_bias[token] = value;
  }
  return params;
}

}  // namespace millrace::cli
