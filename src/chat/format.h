// How a model family writes a conversation, and how its answer is read back: harmony for gpt-oss, the model's
// own chat template with its family's way of calling tools for the others.
//
// Everything here speaks in tokens, not in text: what a user wrote can never become a control token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/grammar.h"
#include "millrace/engine.h"

namespace millrace::chat {

class EngineGrammars;  // engine_grammars.h

struct Tool {
  std::string name = {}, description = {};
  std::string parameters = {};  // a JSON schema; empty: the tool takes none
  bool strict = false;          // the arguments are held to the schema while they are generated
  bool custom = false;          // takes text, not arguments: custom_tools.h
};

struct ToolCall {
  std::string id = {}, name = {}, arguments = {};  // arguments: JSON text as the model wrote it
};

// A PNG or JPEG file in front of byte `at` of a user's content.
struct MessageImage {
  size_t at = 0;
  std::shared_ptr<const std::string> file;
};

struct Message {
  std::string role = {};  // system, developer, user, assistant, tool
  std::string content = {};
  std::string reasoning = {};             // of an assistant
  std::vector<ToolCall> tool_calls = {};  // of an assistant
  std::string tool_call_id = {};          // of a tool: the call it answers
  std::string name = {};                  // of a tool: its name, where the client gave it
  std::vector<MessageImage> images = {};  // of a user, in order
};

enum class ToolChoice { kAuto, kNone, kRequired, kNamed };

struct Conversation {
  std::vector<Message> messages = {};
  std::vector<Tool> tools = {};
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string named_tool = {};  // for kNamed
  // For kAuto and kRequired: the tools that may be called, of those the model is told of; empty: all.
  std::vector<std::string> allowed_tools = {};
  // What objects without additionalProperties may hold in the arguments of tools that are not strict.
  grammar::Objects objects = grammar::Objects::kClosed;
  bool parallel_tool_calls = true;
  std::string reasoning_effort = {};    // low, medium, high; empty: the model's default
  std::string date = {};                // YYYY-MM-DD, for templates that want today's; empty: today
  std::string template_variables = {};  // more for the template, a JSON object; empty: none
  // What the answer is to look like, told to a model whose format has a place for it (harmony): a JSON schema
  // with a name and a description. Telling is not holding: that is constraint()'s.
  std::string response_name = {}, response_description = {}, response_schema = {};
};

// Those of all messages, in order: Request::images of a prompt with them.
std::vector<std::shared_ptr<const std::string>> images_of(const Conversation& conversation);

// A piece of an answer, in the order it became certain.
struct Delta {
  enum class Kind {
    kReasoning,      // text
    kContent,        // text
    kToolCall,       // a call begins: call (0, 1, ... in this answer), name
    kToolArguments,  // text: more of the arguments of `call`, of a custom tool more of its input
  };
  Kind kind = Kind::kContent;
  int32_t call = 0;
  std::string name = {};
  std::string text = {};
  bool custom = false;  // the call is a custom tool's
};

// Reads one answer. Cannot fail: what is malformed becomes text of the nearest sensible channel.
class AnswerParser {
 public:
  virtual ~AnswerParser() = default;
  // Every token of the answer, end token included, with the text that became certain with it (Event::text
  // with show_special off). Appends to `out`. Stop strings are better looked for in the content that comes
  // out than by the engine: there they would cut thinking and arguments too, and hold text back past a
  // control token.
  virtual void token(int32_t token, std::string_view text, std::vector<Delta>& out) = 0;
  // No more tokens come; `text` is what was held back. Appends what is still pending.
  virtual void finish(std::string_view text, std::vector<Delta>& out) = 0;
};

// One per model, shared between threads.
class Format {
 public:
  virtual ~Format() = default;
  virtual std::string_view name() const = 0;  // harmony, hermes, llama3, mistral, gemma4, shaped, plain
  // One line for who runs the model, where its template is not followed in everything; empty: it is.
  virtual std::string_view note() const { return {}; }
  // Once more than `max_tokens` have come out the rest is not tokenized: what came out is more than that
  // then, and not all.
  virtual std::vector<int32_t> prompt(const Conversation& conversation, size_t max_tokens) const = 0;
  std::vector<int32_t> prompt(const Conversation& conversation) const {
    return prompt(conversation, std::numeric_limits<size_t>::max());
  }
  virtual std::unique_ptr<AnswerParser> parser(const Conversation& conversation) const = 0;
  // Tokens that end the turn, beside the model's own.
  virtual std::vector<int32_t> stop_tokens() const = 0;
  // Holds the answer to tool_choice and strict tools, and its final text to `content` (null: free). Reasoning
  // stays free. Null when there is nothing to hold it to.
  virtual std::shared_ptr<const TokenConstraint> constraint(
      const Conversation& conversation, std::shared_ptr<const grammar::Grammar> content) const = 0;
};

// The format of this engine's model: by its special tokens and its chat template. The engine must outlive it.
std::unique_ptr<Format> make_format(const Engine& engine, std::shared_ptr<const EngineGrammars> grammars);

}  // namespace millrace::chat
