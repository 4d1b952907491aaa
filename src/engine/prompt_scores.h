// Logprobs of a prompt's own tokens, taken from the logits of its rows as they are computed: the row of one
// token says how likely the next was. Or those logits themselves. It does not matter in which chunks they
// come.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "millrace/request.h"

namespace millrace {

class PromptScores {
 public:
  struct Wanted {
    std::optional<int32_t> top;  // logprobs, with so many of the likeliest tokens at each place
    int32_t logits = 0;          // entries of a row that is kept whole; 0: none is
  };
  PromptScores(std::span<const int32_t> prompt, Wanted wanted);

  // Nothing is missing: no more rows are wanted.
  bool complete() const { return next_ >= rows_; }
  // Is the row of this position the next to be added? Those of a prompt that is computed again are in
  // already.
  bool wants(int32_t position) const { return position == next_ && !complete(); }
  void add(std::span<const float> logits);  // [vocabulary], of the position that is wanted
  // All of them, once complete; this is left empty. Null: not wanted.
  std::shared_ptr<const std::vector<TokenLogprob>> take_logprobs();
  std::shared_ptr<const std::vector<float>> take_logits();

 private:
  const Wanted wanted_;
  std::vector<TokenLogprob> scores_;  // [prompt]
  std::vector<float> logits_;         // [positions so far, vocabulary]
  int32_t next_ = 0;                  // position whose row comes next
  const int32_t rows_;                // that are wanted: the last token's tells of no token of the prompt
};

}  // namespace millrace
