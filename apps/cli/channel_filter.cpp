#include "channel_filter.h"

namespace millrace::cli {

ChannelFilter::ChannelFilter(const Tokenizer& tokenizer)
    : start_(tokenizer.find("<|start|>")),
      channel_token_(tokenizer.find("<|channel|>")),
      message_(tokenizer.find("<|message|>")),
      end_(tokenizer.find("<|end|>")),
      constrain_(tokenizer.find("<|constrain|>")) {
  harmony_ = start_ && channel_token_ && message_ && end_;
}

std::string ChannelFilter::push(int32_t token, std::string_view text) {
  if (!harmony_) return std::string(text);
  std::string answer;
  if (part_ == Part::kChannel) {
    channel_ += text;
  } else if (part_ == Part::kBody) {
    const size_t name_end =
        channel_.find_first_of(" \n");  // "commentary to=functions.x" names a recipient too
    const std::string_view name = std::string_view(channel_).substr(0, name_end);
    (name.empty() || name == "final" ? answer : thinking_) += text;
  }
  if (token == *channel_token_) {
    part_ = Part::kChannel;
    channel_.clear();
  } else if (token == *message_) {
    part_ = Part::kBody;
  } else if (token == *start_ || token == *end_) {
    part_ = Part::kRole;
    channel_.clear();
  } else if (token == constrain_) {
    part_ = Part::kRole;
  }
  return answer;
}

}  // namespace millrace::cli
