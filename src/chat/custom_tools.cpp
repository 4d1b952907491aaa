#include "chat/custom_tools.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "base/utf8.h"
#include "chat/json_scanner.h"

namespace millrace::chat {
namespace {

using Json = nlohmann::ordered_json;

class CustomCallParser : public AnswerParser {
 public:
  CustomCallParser(std::unique_ptr<AnswerParser> parser, std::set<std::string> names)
      : parser_(std::move(parser)), names_(std::move(names)) {}

  void token(int32_t token, std::string_view text, std::vector<Delta>& out) override {
    const size_t first = out.size();
    parser_->token(token, text, out);
    mark(first, out);
  }
  void finish(std::string_view text, std::vector<Delta>& out) override {
    const size_t first = out.size();
    parser_->finish(text, out);
    mark(first, out);
  }

 private:
  void mark(size_t first, std::vector<Delta>& out) {
    size_t kept = first;
    for (size_t i = first; i < out.size(); ++i) {
      Delta& delta = out[i];
      if (delta.kind == Delta::Kind::kToolCall) {
        calls_.push_back({.is_custom = names_.contains(delta.name), .input = {}});
        delta.custom = calls_.back().is_custom;
      } else if (delta.kind == Delta::Kind::kToolArguments) {
        Call& call = calls_[static_cast<size_t>(delta.call)];
        delta.custom = call.is_custom;
        if (call.is_custom) delta.text = call.input.add(delta.text);
        if (delta.text.empty()) continue;
      }
      if (kept != i) out[kept] = std::move(delta);
      ++kept;
    }
    out.resize(kept);
  }

  struct Call {
    bool is_custom = false;
    CustomInput input = {};
  };
  std::unique_ptr<AnswerParser> parser_;
  std::set<std::string> names_;
  std::vector<Call> calls_;
};

}  // namespace

Tool custom_tool(std::string name, std::string description, const CustomForm& form) {
  Json input = {{"type", "string"}};
  if (!form.pattern.empty()) {
    input["description"] = form.told;
    input["pattern"] = "^(?:" + form.pattern + ")$";
  }
  const Json schema = {{"type", "object"},
                       {"properties", {{"input", std::move(input)}}},
                       {"required", {"input"}},
                       {"additionalProperties", false}};
  return {.name = std::move(name),
          .description = std::move(description),
          .parameters = schema.dump(),
          .strict = true,
          .custom = true};
}

std::string custom_arguments(std::string_view input) { return Json{{"input", valid_utf8(input)}}.dump(); }

std::string CustomInput::add(std::string_view arguments) {
  std::string out;
  for (const char c : arguments) step(c, out);
  return out;
}

void CustomInput::step(char c, std::string& out) {
  switch (state_) {
    case State::kBegin:
      if (is_space(c)) return;
      state_ = c == '{' ? State::kKey : State::kRaw;
      if (c != '{') out += c;
      return;
    case State::kKey:
      if (c == '"' && ++quotes_ == 3) state_ = State::kValue;
      return;
    case State::kValue:
      if (c == '\\') {
        state_ = State::kEscape;
      } else if (c == '"') {
        state_ = State::kDone;
      } else {
        out += c;
      }
      return;
    case State::kEscape:
      return escape(c, out);
    case State::kDigits: {
      const int digit = c >= '0' && c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10;
      unit_ = unit_ * 16 + static_cast<uint32_t>(std::clamp(digit, 0, 15));
      if (++digits_ < 4) return;
      state_ = State::kValue;
      return unit(unit_, out);
    }
    case State::kDone:
      return;
    case State::kRaw:
      out += c;
      return;
  }
}

void CustomInput::escape(char c, std::string& out) {
  state_ = State::kValue;
  constexpr std::string_view kNames = "bfnrt", kMeant = "\b\f\n\r\t";
  if (c == 'u') {
    state_ = State::kDigits;
    digits_ = 0;
    unit_ = 0;
  } else if (const size_t at = kNames.find(c); at != std::string_view::npos) {
    out += kMeant[at];
  } else {
    out += c;
  }
}

// A unit of UTF-16.
void CustomInput::unit(uint32_t unit, std::string& out) {
  const bool is_first = unit >= 0xd800 && unit < 0xdc00, is_second = unit >= 0xdc00 && unit < 0xe000;
  if (is_first) {
    surrogate_ = unit;
    return;
  }
  if (is_second) unit = surrogate_ != 0 ? 0x10000 + ((surrogate_ - 0xd800) << 10) + (unit - 0xdc00) : 0xfffd;
  surrogate_ = 0;
  append_utf8(out, unit);
}

std::unique_ptr<AnswerParser> read_custom_calls(std::unique_ptr<AnswerParser> parser,
                                                const Conversation& conversation) {
  std::set<std::string> names;
  for (const Tool& tool : conversation.tools) {
    if (tool.custom) names.insert(tool.name);
  }
  if (names.empty()) return parser;
  return std::make_unique<CustomCallParser>(std::move(parser), std::move(names));
}

}  // namespace millrace::chat
