// What a format needs of a model: its tokens and its chat template. Engine has both; tests bring their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace millrace::chat {

class Codec {
 public:
  virtual ~Codec() = default;
  // Nothing is added in front. With `parse_special` the names of control tokens in the text become them.
  // Once more than `max_tokens` have come out the rest of the text is not looked at.
  virtual std::vector<int32_t> encode(std::string_view text, bool parse_special, size_t max_tokens) const = 0;
  std::vector<int32_t> encode(std::string_view text, bool parse_special) const {
    return encode(text, parse_special, std::numeric_limits<size_t>::max());
  }
  virtual std::string token_text(int32_t token) const = 0;  // its bytes, control tokens by name
  virtual bool is_special(int32_t token) const = 0;
  virtual int32_t vocab() const = 0;  // ids are below this
  virtual std::vector<int32_t> end_tokens() const = 0;
  virtual bool has_template() const = 0;
  // The chat template with these variables, a JSON object. Throws Error as the template does.
  virtual std::string render(std::string_view variables) const = 0;
  // What the template writes for an image, and what belongs in its place; empty: there are none.
  struct ImagePlace {
    std::string written = {}, expanded = {};
  };
  virtual ImagePlace image_place() const { return {}; }

  // The control token of this name, or -1.
  int32_t find_special(std::string_view name) const;
};

}  // namespace millrace::chat
