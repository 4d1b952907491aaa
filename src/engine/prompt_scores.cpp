#include "engine/prompt_scores.h"

#include "sample/select.h"
#include "sample/token_softmax.h"

namespace millrace {

PromptScores::PromptScores(std::span<const int32_t> prompt, Wanted wanted)
    : wanted_(wanted), rows_(static_cast<int32_t>(prompt.size()) - (wanted.logits > 0 ? 0 : 1)) {
  logits_.reserve(prompt.size() * static_cast<size_t>(wanted.logits));
  if (!wanted.top) return;
  scores_.reserve(prompt.size());
  for (const int32_t token : prompt) scores_.push_back({.token = token});
}

void PromptScores::add(std::span<const float> logits) {
  if (wanted_.logits > 0) logits_.insert(logits_.end(), logits.begin(), logits.end());
  const auto told_of = static_cast<size_t>(++next_);
  if (told_of >= scores_.size()) return;
  TokenLogprob& score = scores_[told_of];
  const double total = log_sum_exp(logits);
  score.logprob = log_softmax_at(logits, score.token, total);
  for (const auto& [id, logit] : largest_values(logits, *wanted_.top)) {
    score.top.emplace_back(id, log_softmax_at(logits, id, total));
  }
}

std::shared_ptr<const std::vector<TokenLogprob>> PromptScores::take_logprobs() {
  if (!wanted_.top) return nullptr;
  return std::make_shared<const std::vector<TokenLogprob>>(std::move(scores_));
}

std::shared_ptr<const std::vector<float>> PromptScores::take_logits() {
  if (wanted_.logits == 0) return nullptr;
  return std::make_shared<const std::vector<float>>(std::move(logits_));
}

}  // namespace millrace
