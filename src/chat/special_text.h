// Text that others wrote, on its way through a chat template: names of control tokens in it must stay
// letters.
//
// A template mixes its own control tokens with that text, and only the rendered whole is tokenized. So before
// rendering every such name in the text gets a character that nobody uses behind its first one. A name that
// is whole in what comes out is then the template's own; the broken ones are made whole again and taken
// letter by letter.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "chat/chat_codec.h"

namespace millrace::chat {

class SpecialText {
 public:
  // The characters that were put into names: of control tokens, of markers. Empty: nothing was masked.
  struct Mask {
    std::string control = {}, marker = {};
    bool empty() const { return control.empty(); }
  };

  // Control tokens by the codec's word; `markers` are ordinary tokens that mean as much (<think>,
  // <tool_call>).
  SpecialText(const Codec& codec, const std::vector<std::string>& markers);

  // Two characters that do not occur in the value; empty when no name does either.
  Mask choose_mask(const nlohmann::ordered_json& value) const;
  // Masks every string in the value, keys too. An assistant's own text keeps its markers (templates look for
  // </think> there).
  void mask(nlohmann::ordered_json& value, const Mask& mask, bool keep_markers) const;
  // Tokens of a text rendered from masked variables, not all of them once there are more than `max_tokens`.
  std::vector<int32_t> encode(const Codec& codec, std::string_view rendered, const Mask& mask,
                              size_t max_tokens) const;
  static std::string unmask(std::string_view text, const Mask& mask);

 private:
  struct Name {
    std::string text;
    bool is_marker;
  };
  // The first name at or behind `from`, the longest of those that begin there; null: none.
  const Name* find(std::string_view text, size_t from, size_t& at) const;
  bool has_name(const nlohmann::ordered_json& value) const;
  std::string masked(const std::string& text, const Mask& mask, bool keep_markers) const;

  std::vector<Name> names_;  // longest first
  std::array<bool, 256> begins_name_{};
};

}  // namespace millrace::chat
