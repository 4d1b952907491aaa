#include "channel_filter.h"

namespace millrace::cli {

namespace {

std::optional<int32_t> special_token(const Engine& engine, std::string_view name) {
  const std::vector<int32_t> ids = engine.tokenize(name, /*add_special=*/false);
  if (ids.size() != 1 || engine.token_text(ids[0]) != name) return std::nullopt;
  return ids[0];
}

}  // namespace

ChannelFilter::ChannelFilter(const Engine& engine)
    : start_(special_token(engine, "<|start|>")),
      channel_token_(special_token(engine, "<|channel|>")),
      message_(special_token(engine, "<|message|>")),
      end_(special_token(engine, "<|end|>")),
      constrain_(special_token(engine, "<|constrain|>")) {
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
