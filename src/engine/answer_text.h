// From sampled tokens to text that may be shown: whole UTF-8, and nothing of a stop string.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/job.h"
#include "engine/stop_matcher.h"
#include "tokenizer/detokenizer.h"

namespace millrace {

class AnswerText {
 public:
  explicit AnswerText(const Job& job);
  std::string push(int32_t token);  // what became certain with it
  std::string finish();             // what was held back
  bool stopped() const { return stops_.stopped(); }

 private:
  std::optional<StreamingDetokenizer> detokenizer_;  // none: the model has no tokenizer, so there is no text
  StopMatcher stops_;
};

}  // namespace millrace
