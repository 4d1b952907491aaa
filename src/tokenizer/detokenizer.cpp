// Bytes go out as soon as they are whole characters.
#include "tokenizer/detokenizer.h"

#include "tokenizer/unicode.h"

namespace millrace {

StreamingDetokenizer::StreamingDetokenizer(std::shared_ptr<const Tokenizer> tokenizer, bool special,
                                           bool continues)
    : tokenizer_(std::move(tokenizer)),
      special_(special),
      strip_space_(!continues && tokenizer_->strips_leading_space()) {}

std::string StreamingDetokenizer::push(TokenId id) {
  pending_ += tokenizer_->token_bytes(id, special_);
  if (strip_space_ && !pending_.empty()) {
    if (pending_[0] == ' ') pending_.erase(0, 1);
    strip_space_ = false;
  }
  const size_t held = incomplete_utf8_suffix(pending_);
  std::string out = valid_utf8(std::string_view(pending_).substr(0, pending_.size() - held));
  pending_.erase(0, pending_.size() - held);
  return out;
}

std::string StreamingDetokenizer::finish() {
  std::string out = valid_utf8(pending_);
  pending_.clear();
  return out;
}

}  // namespace millrace
