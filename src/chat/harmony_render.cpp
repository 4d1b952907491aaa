#include "chat/harmony_render.h"

#include <algorithm>
#include <array>
#include <ctime>

#include "base/error.h"
#include "base/utf8.h"
#include "base/work_budget.h"
#include "chat/json_text.h"
#include "chat/tools.h"
#include "chat/typescript.h"

namespace millrace::chat {
namespace {

struct Header {
  std::string role = {};                     // what stands behind <|start|>: a role, or a tool's name
  std::string recipient = {}, channel = {};  // empty: none
  std::string content_type = {};             // behind <|constrain|>; empty: none
};

class Writer {
 public:
  Writer(const Codec& codec, const HarmonyTokens& tokens, size_t max_tokens)
      : codec_(codec), tokens_(tokens), max_tokens_(max_tokens) {}

  // Pieces are encoded one by one, as openai-harmony does: no token reaches from one into the next.
  void text(std::string_view piece) {
    if (out_.size() > max_tokens_) return;
    const std::vector<int32_t> ids = codec_.encode(valid_utf8(piece), false, max_tokens_ - out_.size());
    out_.insert(out_.end(), ids.begin(), ids.end());
  }
  void message(const Header& header, std::string_view content) {
    out_.push_back(tokens_.start);
    text(header.role);
    if (!header.recipient.empty()) text(" to=" + header.recipient);
    if (!header.channel.empty()) {
      out_.push_back(tokens_.channel);
      text(header.channel);
    }
    if (!header.content_type.empty()) {
      if (tokens_.constrain >= 0) {
        text(" ");
        out_.push_back(tokens_.constrain);
        text(header.content_type);
      } else {
        text(" " + header.content_type);
      }
    }
    out_.push_back(tokens_.message);
    text(content);
    const bool calls = header.role == "assistant" && !header.recipient.empty();
    out_.push_back(calls && tokens_.call >= 0 ? tokens_.call : tokens_.end);
  }
  void open_answer() {
    out_.push_back(tokens_.start);
    text("assistant");
  }
  std::vector<int32_t> take() { return std::move(out_); }

 private:
  const Codec& codec_;
  const HarmonyTokens& tokens_;
  const size_t max_tokens_;
  std::vector<int32_t> out_;
};

bool is_instruction(const Message& message) {
  return message.role == "system" || message.role == "developer";
}

std::string system_text(const Conversation& conversation) {
  std::string effort = conversation.reasoning_effort.empty() ? "medium" : conversation.reasoning_effort;
  // What others call less than low or more than high.
  if (effort == "minimal" || effort == "none") effort = "low";
  if (effort == "xhigh") effort = "high";
  if (effort != "low" && effort != "medium" && effort != "high") {
    throw_error(ErrorCode::kBadInput, "reasoning effort: found {}, expected low, medium or high",
                valid_utf8(effort));
  }
  std::string out = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n";
  out += "Current date: " + (conversation.date.empty() ? today() : conversation.date);
  out += "\n\nReasoning: " + effort;
  out += "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.";
  if (offers_tools(conversation)) {
    out += "\nCalls to these tools must go to the commentary channel: 'functions'.";
  }
  return out;
}

std::string response_format(const Conversation& conversation) {
  if (conversation.response_schema.empty()) return "";
  std::string out = "# Response Formats\n\n## ";
  out += conversation.response_name.empty() ? "response" : conversation.response_name;
  out += "\n\n";
  if (!conversation.response_description.empty()) out += "// " + conversation.response_description + "\n";
  return out + compact_json(parse_json(conversation.response_schema, "response schema"));
}

// Sections with an empty line between them; empty when there is nothing to tell.
std::string developer_text(const std::string& instructions, const Conversation& conversation) {
  std::string out;
  const auto add = [&](const std::string& section) {
    if (section.empty()) return;
    if (!out.empty()) out += "\n\n";
    out += section;
  };
  if (!instructions.empty()) add("# Instructions\n\n" + instructions);
  if (offers_tools(conversation)) add(typescript_tools(conversation.tools));
  add(response_format(conversation));
  return out;
}

// The name of the tool that a result comes from: by the call it answers, by what the client says, by the last
// call before it.
std::string tool_of(const std::vector<Message>& messages, size_t result) {
  const Message& message = messages[result];
  std::string last;
  for (size_t i = result; i-- > 0;) {
    spend_work(1);
    const std::vector<ToolCall>& calls = messages[i].tool_calls;
    for (const ToolCall& call : calls) {
      if (!message.tool_call_id.empty() && call.id == message.tool_call_id) return call.name;
    }
    if (last.empty() && !calls.empty()) last = calls.back().name;
  }
  if (!message.name.empty()) return message.name;
  return last.empty() ? "unknown" : last;
}

// Ends a turn: what was thought before it has served its purpose.
bool is_final(const Message& message) {
  return message.role == "assistant" && message.tool_calls.empty() &&
         (!message.content.empty() || message.reasoning.empty());
}

class Renderer {
 public:
  Renderer(const Codec& codec, const HarmonyTokens& tokens, const Conversation& conversation,
           size_t max_tokens)
      : conversation_(conversation), messages_(conversation.messages), writer_(codec, tokens, max_tokens) {}

  std::vector<int32_t> run() {
    writer_.message({.role = "system"}, system_text(conversation_));
    size_t first = 0;
    std::string instructions;
    for (; first < messages_.size() && is_instruction(messages_[first]); ++first) {
      if (messages_[first].content.empty()) continue;
      if (!instructions.empty()) instructions += "\n\n";
      instructions += messages_[first].content;
    }
    const std::string developer = developer_text(instructions, conversation_);
    if (!developer.empty()) writer_.message({.role = "developer"}, developer);
    const size_t thinking_from = first_with_analysis();
    for (size_t i = first; i < messages_.size(); ++i) message(i, i >= thinking_from);
    writer_.open_answer();
    return writer_.take();
  }

 private:
  // Analysis before the last final message has served its purpose and is dropped; behind it a tool call is
  // pending, and the model goes on from what it thought.
  size_t first_with_analysis() const {
    for (size_t i = messages_.size(); i-- > 0;) {
      if (is_final(messages_[i])) return i + 1;
    }
    return 0;
  }

  void message(size_t index, bool with_analysis) {
    const Message& message = messages_[index];
    if (message.role == "assistant") {
      assistant(message, with_analysis);
    } else if (message.role == "tool" || message.role == "function") {
      const std::string name = harmony_recipient(tool_of(messages_, index), conversation_);
      const bool own = name.compare(0, 10, "functions.") != 0;
      writer_.message({.role = name, .recipient = "assistant", .channel = own ? "analysis" : "commentary"},
                      message.content);
    } else if (is_instruction(message)) {
      writer_.message({.role = "developer"}, "# Instructions\n\n" + message.content);
    } else if (message.role == "user") {
      writer_.message({.role = "user"}, message.content);
    } else {
      throw_error(ErrorCode::kBadInput,
                  "message {}: role is {}, expected system, developer, user, assistant or tool", index,
                  valid_utf8(message.role));
    }
  }

  void assistant(const Message& message, bool with_analysis) {
    if (with_analysis && !message.reasoning.empty()) {
      writer_.message({.role = "assistant", .channel = "analysis"}, message.reasoning);
    }
    const bool calls = !message.tool_calls.empty();
    // What is said beside a call is a preamble, not the answer.
    if (!message.content.empty() || is_final(message)) {
      writer_.message({.role = "assistant", .channel = calls ? "commentary" : "final"}, message.content);
    }
    for (const ToolCall& call : message.tool_calls) {
      const std::string recipient = harmony_recipient(call.name, conversation_);
      const bool own = recipient.compare(0, 10, "functions.") != 0;
      writer_.message({.role = "assistant",
                       .recipient = recipient,
                       .channel = own ? "analysis" : "commentary",
                       .content_type = recipient == "python" ? "code" : "json"},
                      call.arguments);
    }
  }

  const Conversation& conversation_;
  const std::vector<Message>& messages_;
  Writer writer_;
};

}  // namespace

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  std::array<char, 16> text{};
  const size_t length = std::strftime(text.data(), text.size(), "%Y-%m-%d", &local);
  return std::string(text.data(), length);
}

std::string harmony_recipient(const std::string& name, const Conversation& conversation) {
  const bool listed = std::any_of(conversation.tools.begin(), conversation.tools.end(),
                                  [&](const Tool& tool) { return tool.name == name; });
  const bool own = name == "python" || name.compare(0, 8, "browser.") == 0;
  if (!listed && (own || name.compare(0, 10, "functions.") == 0)) return name;
  return "functions." + name;
}

HarmonyTokens find_harmony_tokens(const Codec& codec) {
  return {.start = codec.find_special("<|start|>"),
          .end = codec.find_special("<|end|>"),
          .message = codec.find_special("<|message|>"),
          .channel = codec.find_special("<|channel|>"),
          .constrain = codec.find_special("<|constrain|>"),
          .ret = codec.find_special("<|return|>"),
          .call = codec.find_special("<|call|>")};
}

std::vector<int32_t> render_harmony(const Codec& codec, const HarmonyTokens& tokens,
                                    const Conversation& conversation, size_t max_tokens) {
  return Renderer(codec, tokens, conversation, max_tokens).run();
}

}  // namespace millrace::chat
