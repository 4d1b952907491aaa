#include "sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "base/error.h"
#include "base/sampling_math.h"
#include "sample/select.h"
#include "sample/token_softmax.h"

namespace millrace {
namespace {

void check_range(const char* name, double value, double low, bool low_included, double high) {
  if ((low_included ? value >= low : value > low) && value <= high) return;  // NaN fails
  throw_error(ErrorCode::kBadInput, "{} is {}, expected {} {} and at most {}", name, value,
              low_included ? "at least" : "more than", low, high);
}

// SplitMix64's output function: a bijection whose consecutive inputs give independent-looking outputs, which
// makes mix(seed, counter) a random sequence that can be entered anywhere.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Buffers of one draw.
struct Scratch {
  std::vector<float> logits;         // [vocab] after penalties, bias and constraint
  std::vector<int32_t> ids;          // of weights once top-k has cut it; empty: a weight's index is its token
  std::vector<uint64_t> block_sums;  // of weights
  std::vector<float> weights;  // [vocab] unnormalized probabilities, the likeliest 1; cut to 0 when dropped
};
thread_local Scratch scratch;

uint64_t fresh_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// Drops the weights that are 0, keeping the others' tokens in ids.
void compact() {
  std::vector<float>& weights = scratch.weights;
  size_t kept = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0.0f) continue;
    scratch.ids.push_back(static_cast<int32_t>(i));
    weights[kept++] = weights[i];
  }
  weights.resize(kept);
}

// Inverse of the cumulative sum: over blocks first, then inside the one that holds the target.
size_t pick(double uniform) {
  constexpr size_t kBlock = 512;
  const std::span<const float> weights = scratch.weights;
  std::vector<uint64_t>& block_sums = scratch.block_sums;
  block_sums.clear();
  uint64_t total = 0;
  for (size_t begin = 0; begin < weights.size(); begin += kBlock) {
    block_sums.push_back(sum_units(weights.subspan(begin, std::min(kBlock, weights.size() - begin))));
    total += block_sums.back();
  }
  uint64_t left = sampling::drawn_unit(uniform, total);
  size_t block = 0;
  while (left >= block_sums[block]) left -= block_sums[block++];
  size_t i = block * kBlock;
  while (left >= sampling::units_of(weights[i])) left -= sampling::units_of(weights[i++]);
  return i;
}

}  // namespace

uint64_t sample_seed(uint64_t seed, int32_t index) {
  return index == 0 ? seed : mix(mix(seed) + static_cast<uint64_t>(index));
}

void validate(const SamplingParams& params, int32_t vocab) {
  check_range("temperature", params.temperature, 0.0, true, 100.0);
  check_range("top_k", params.top_k, 0, true, std::numeric_limits<int32_t>::max());
  check_range("top_p", params.top_p, 0.0, false, 1.0);
  check_range("min_p", params.min_p, 0.0, true, 1.0);
  check_range("repetition_penalty", params.repetition_penalty, 0.0, false, 100.0);
  check_range("presence_penalty", params.presence_penalty, -100.0, true, 100.0);
  check_range("frequency_penalty", params.frequency_penalty, -100.0, true, 100.0);
  if (params.logprobs) check_range("logprobs", *params.logprobs, 0, true, 1000);
  for (const auto& [token, bias] : params.logit_bias) {
    if (token < 0 || token >= vocab) {
      throw_error(ErrorCode::kBadInput, "logit_bias names token {}, expected an id in [0, {})", token, vocab);
    }
    if (!std::isfinite(bias)) {
      throw_error(ErrorCode::kBadInput, "logit_bias of token {} is {}, expected a finite number", token,
                  bias);
    }
  }
}

Sampler::Sampler(const SamplingParams& params, int32_t vocab) : params_(params), vocab_(vocab) {
  validate(params, vocab);
  seed_ = params.seed ? *params.seed : fresh_seed();
  if (has_penalties()) place_.assign(static_cast<size_t>(vocab), -1);
  for (const auto& [token, bias] : params.logit_bias) bias_.push_back({token, bias});
}

bool Sampler::has_penalties() const {
  return params_.repetition_penalty != 1.0f || params_.presence_penalty != 0.0f ||
         params_.frequency_penalty != 0.0f;
}

void Sampler::count(int32_t token, int32_t times_generated) {
  if (place_.empty()) return;
  int32_t& place = place_[static_cast<size_t>(token)];
  if (place < 0) {
    place = static_cast<int32_t>(counted_.size());
    counted_.push_back({token, 0});
  }
  counted_[static_cast<size_t>(place)].times += times_generated;
}

void Sampler::add_prompt(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocab_) {
      throw_error(ErrorCode::kBadInput, "prompt holds token {}, expected an id in [0, {})", token, vocab_);
    }
    count(token, 0);
  }
}

std::span<const float> Sampler::adjusted(std::span<const float> logits, std::span<const uint64_t> allowed) {
  if (counted_.empty() && bias_.empty() && allowed.empty()) return logits;
  std::vector<float>& out = scratch.logits;
  out.assign(logits.begin(), logits.end());
  for (const auto& [token, times] : counted_) {
    float& logit = out[static_cast<size_t>(token)];
    logit = sampling::penalized(logit, times, params_.repetition_penalty, params_.presence_penalty,
                                params_.frequency_penalty);
  }
  for (const auto& [token, bias] : bias_) out[static_cast<size_t>(token)] += bias;
  if (!allowed.empty()) {
    for (size_t t = 0; t < out.size(); ++t) {
      if ((allowed[t / 64] >> (t % 64) & 1) == 0) out[t] = -std::numeric_limits<float>::infinity();
    }
  }
  return out;
}

double Sampler::uniform(int32_t ahead) const {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const uint64_t draw = draws_ + 1 + static_cast<uint64_t>(ahead);
  const uint64_t bits = mix(mix(seed_ + kGolden) + kGolden * draw);
  return static_cast<double>(bits >> 11) * 0x1p-53;  // [0, 1)
}

int32_t Sampler::draw(std::span<const float> logits) {
  const int32_t top = argmax(logits);
  if (top < 0) throw_no_logits(logits.size());
  if (!draws()) return top;
  std::vector<float>& weights = scratch.weights;
  softmax_weights(logits, logits[static_cast<size_t>(top)], scale(), weights);
  scratch.ids.clear();
  if (params_.top_k > 0 && params_.top_k < vocab_) {
    apply_cut(weights, cut_to_count(weights, params_.top_k));
    compact();
  }
  if (params_.top_p < 1.0f) {
    const uint64_t total = sum_units(weights);
    apply_cut(weights, cut_to_mass(weights, total, sampling::units_of_mass(params_.top_p, total)));
  }
  if (params_.min_p > 0.0f) apply_cut(weights, {params_.min_p, INT32_MAX});

  const size_t picked = pick(uniform());
  return scratch.ids.empty() ? static_cast<int32_t>(picked) : scratch.ids[picked];
}

void Sampler::accept(int32_t token) {
  count(token, 1);
  if (draws()) ++draws_;
}

SampledToken Sampler::sample(std::span<const float> logits, std::span<const uint64_t> allowed) {
  if (logits.size() != static_cast<size_t>(vocab_)) {
    throw_error(ErrorCode::kBadInput, "logits: {} values, expected the vocabulary's {}", logits.size(),
                vocab_);
  }
  SampledToken result;
  result.token = draw(adjusted(logits, allowed));
  accept(result.token);
  if (params_.logprobs) {
    const double total = log_sum_exp(logits);
    result.logprob = log_softmax_at(logits, result.token, total);
    for (const auto& [id, logit] : largest_values(logits, *params_.logprobs)) {
      result.top.emplace_back(id, log_softmax_at(logits, id, total));
    }
  }
  return result;
}

}  // namespace millrace
