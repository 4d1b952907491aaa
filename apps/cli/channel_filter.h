// ChannelFilter: tells the answer from the thinking of models that speak Harmony (gpt-oss). Their turn is a
// row of messages, <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...:
// only the final channel (or none) is the answer. For every other model all text is.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "millrace/engine.h"

namespace millrace::cli {

class ChannelFilter {
 public:
  // Follows the turn from just behind the prompt's "<|start|>assistant".
  explicit ChannelFilter(const Engine& engine);

  // Takes a sampled token and the text that became certain with it (which precedes a special token); returns
  // what belongs to the answer.
  std::string push(int32_t token, std::string_view text);
  const std::string& thinking() const { return thinking_; }  // what other channels said

 private:
  enum class Part { kRole, kChannel, kBody };

  bool harmony_;
  std::optional<int32_t> start_, channel_token_, message_, end_, constrain_;
  Part part_ = Part::kBody;  // a model that does not keep to the form is shown as it is
  std::string channel_, thinking_;
};

}  // namespace millrace::cli
