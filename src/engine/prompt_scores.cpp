#include "engine/prompt_scores.h"

#include "sample/select.h"
#include "sample/token_softmax.h"

namespace millrace {

PromptScores::PromptScores(std::span<const int32_t> prompt, int32_t top) : top_(top) {
  scores_.reserve(prompt.size());
  for (const int32_t token : prompt) scores_.push_back({.token = token});
}

void PromptScores::add(std::span<const float> logits) {
  TokenLogprob& score = scores_[static_cast<size_t>(++next_)];
  const double total = log_sum_exp(logits);
  score.logprob = log_softmax_at(logits, score.token, total);
  for (const auto& [id, logit] : largest_values(logits, top_)) {
    score.top.emplace_back(id, log_softmax_at(logits, id, total));
  }
}

}  // namespace millrace
