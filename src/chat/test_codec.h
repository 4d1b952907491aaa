// A vocabulary for tests: tokens 0..255 are bytes, behind them control tokens and whole words. And the cases
// of tests/golden/harmony as conversations.
#pragma once

#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "chat/chat_codec.h"
#include "chat/format.h"

namespace millrace::chat::test {

using Json = nlohmann::ordered_json;

class ByteCodec : public Codec {
 public:
  // `specials` are numbered as given; `words`, tokens of text longer than a byte, as given too.
  explicit ByteCodec(std::map<std::string, int32_t> specials, std::map<std::string, int32_t> words = {})
      : specials_(std::move(specials)), words_(std::move(words)) {
    for (const auto* table : {&specials_, &words_}) {
      for (const auto& [name, id] : *table) {
        names_[id] = name;
        vocab_ = std::max(vocab_, id + 1);
      }
    }
  }

  using Codec::encode;
  std::vector<int32_t> encode(std::string_view text, bool parse_special, size_t max_tokens) const override {
    std::vector<int32_t> out;
    while (!text.empty() && out.size() <= max_tokens) {
      size_t length = parse_special ? match(specials_, text, out) : 0;
      if (length == 0) length = match(words_, text, out);
      if (length == 0) {
        out.push_back(static_cast<unsigned char>(text[0]));
        length = 1;
      }
      text.remove_prefix(length);
    }
    return out;
  }
  std::string token_text(int32_t token) const override {
    if (token < 256) return std::string(1, static_cast<char>(token));
    const auto it = names_.find(token);
    return it == names_.end() ? "" : it->second;
  }
  bool is_special(int32_t token) const override {
    const auto it = names_.find(token);
    return it != names_.end() && specials_.count(it->second) > 0;
  }
  int32_t vocab() const override { return vocab_; }
  std::vector<int32_t> end_tokens() const override { return ends; }
  bool has_template() const override { return static_cast<bool>(render_template); }
  std::string render(std::string_view variables) const override { return render_template(variables); }

  // Text as the engine gives it: control tokens say nothing.
  std::string plain_text(int32_t token) const { return is_special(token) ? "" : token_text(token); }
  int32_t id(const std::string& name) const {
    return specials_.count(name) > 0 ? specials_.at(name) : words_.at(name);
  }

  std::function<std::string(std::string_view)> render_template = {};
  std::vector<int32_t> ends = {};

 private:
  static size_t match(const std::map<std::string, int32_t>& table, std::string_view text,
                      std::vector<int32_t>& out) {
    for (const auto& [name, id] : table) {
      if (text.substr(0, name.size()) == name) {
        out.push_back(id);
        return name.size();
      }
    }
    return 0;
  }

  std::map<std::string, int32_t> specials_, words_;
  std::map<int32_t, std::string> names_;
  int32_t vocab_ = 256;
};

inline ByteCodec harmony_codec() {
  return ByteCodec({{"<|startoftext|>", 300},
                    {"<|endoftext|>", 301},
                    {"<|return|>", 302},
                    {"<|constrain|>", 303},
                    {"<|channel|>", 305},
                    {"<|start|>", 306},
                    {"<|end|>", 307},
                    {"<|message|>", 308},
                    {"<|call|>", 312},
                    {"<|reserved|>", 313}});
}

inline Json read_json(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return Json::parse(text.str());
}

inline Conversation conversation_of(const Json& json) {
  const auto text = [](const Json& object, const char* key) { return object.value(key, std::string()); };
  Conversation out;
  for (const Json& m : json["messages"]) {
    Message message = {.role = text(m, "role"),
                       .content = text(m, "content"),
                       .reasoning = text(m, "reasoning"),
                       .tool_call_id = text(m, "tool_call_id"),
                       .name = text(m, "name")};
    for (const Json& call : m.value("tool_calls", Json::array())) {
      message.tool_calls.push_back(
          {.id = text(call, "id"), .name = text(call, "name"), .arguments = text(call, "arguments")});
    }
    out.messages.push_back(std::move(message));
  }
  for (const Json& t : json["tools"]) {
    out.tools.push_back({.name = text(t, "name"),
                         .description = text(t, "description"),
                         .parameters = t.contains("parameters") ? t["parameters"].dump() : ""});
  }
  out.reasoning_effort = text(json, "effort");
  out.date = text(json, "date");
  return out;
}

// An answer put together again: what a client would have.
struct Read {
  std::string reasoning, content;
  std::vector<std::pair<std::string, std::string>> calls;  // name, arguments
  bool operator==(const Read& other) const {
    return reasoning == other.reasoning && content == other.content && calls == other.calls;
  }
};

inline Read read_deltas(const std::vector<Delta>& deltas) {
  Read out;
  for (const Delta& delta : deltas) {
    switch (delta.kind) {
      case Delta::Kind::kReasoning:
        out.reasoning += delta.text;
        break;
      case Delta::Kind::kContent:
        out.content += delta.text;
        break;
      case Delta::Kind::kToolCall:
        if (delta.call != static_cast<int32_t>(out.calls.size())) out.calls.emplace_back("bad index", "");
        out.calls.emplace_back(delta.name, "");
        break;
      case Delta::Kind::kToolArguments:
        if (delta.call + 1 != static_cast<int32_t>(out.calls.size())) out.calls.emplace_back("bad call", "");
        out.calls.back().second += delta.text;
        break;
    }
  }
  return out;
}

inline std::ostream& operator<<(std::ostream& out, const Read& read) {
  out << "reasoning [" << read.reasoning << "] content [" << read.content << "]";
  for (const auto& [name, arguments] : read.calls) out << " call " << name << " [" << arguments << "]";
  return out;
}

}  // namespace millrace::chat::test
