#include "engine/answer_text.h"

namespace millrace {

AnswerText::AnswerText(const Job& job) : stops_(job.request.stop) {
  if (job.tokenizer) detokenizer_.emplace(job.tokenizer, job.request.show_special);
}

std::string AnswerText::push(int32_t token) {
  return detokenizer_ ? stops_.push(detokenizer_->push(token)) : std::string();
}

std::string AnswerText::finish() {
  if (!detokenizer_ || stops_.stopped()) return {};
  std::string out = stops_.push(detokenizer_->finish());
  if (!stops_.stopped()) out += stops_.finish();
  return out;
}

}  // namespace millrace
