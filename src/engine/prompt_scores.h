// Logprobs of a prompt's own tokens, taken from the logits of its rows as they are computed: the row of one
// token says how likely the next was. It does not matter in which chunks they come.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "millrace/request.h"

namespace millrace {

class PromptScores {
 public:
  // top: how many of the likeliest tokens are named at each place.
  PromptScores(std::span<const int32_t> prompt, int32_t top);

  // Nothing is missing: no more rows are wanted.
  bool complete() const { return next_ + 1 >= std::ssize(scores_); }
  // Is the row of this position the next to be added? Those of a prompt that is computed again are in
  // already.
  bool wants(int32_t position) const { return position == next_ && !complete(); }
  void add(std::span<const float> logits);  // [vocabulary], of the position that is wanted
  // All of them, once complete; this is left empty.
  std::vector<TokenLogprob> take() { return std::move(scores_); }

 private:
  std::vector<TokenLogprob> scores_;  // [prompt]
  int32_t next_ = 0;                  // position whose row comes next
  int32_t top_;
};

}  // namespace millrace
