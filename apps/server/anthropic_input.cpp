#include "anthropic_input.h"

#include <fmt/core.h>

#include <algorithm>

#include "api_error.h"
#include "conversation.h"

namespace millrace::server {
namespace {

constexpr std::string_view kMissing = "missing_required_parameter";

[[noreturn]] void refuse_block(const Fields& block, const std::string& type, std::string_view expected) {
  if (type == "image") {
    bad_field(block.path_of("type"), "found \"image\": images are read in messages of a user, nowhere else",
              "unsupported_value");
  }
  if (type == "document") {
    bad_field(block.path_of("type"), "found \"document\": of documents plain text is read and nothing else",
              "unsupported_value");
  }
  bad_field(block.path_of("type"), fmt::format("found \"{}\", expected {}", type.substr(0, 60), expected));
}

// A document that is plain text is text; any other is refused.
std::string document_text(const Fields& block) {
  const std::optional<Fields> source = block.object("source");
  if (source && source->text("type") == "text") return source->required_text("data");
  refuse_block(block, "document", "");
}

// {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ...}}
std::string image_file(const Fields& block) {
  const std::optional<Fields> source = block.object("source");
  if (!source) bad_field(block.path_of("source"), "is missing, expected an object", kMissing);
  const std::string type = source->required_text("type");
  if (type != "base64") {
    source->refuse("type", fmt::format("found \"{}\", expected \"base64\": this server fetches nothing",
                                       type.substr(0, 60)));
  }
  return from_base64(source->required_text("data"), source->path_of("data"));
}

// A string, or blocks of text that are joined by `between`. Absent: nothing.
std::string read_text_blocks(const Json* content, const std::string& path, std::string_view between) {
  if (content == nullptr || content->is_null()) return {};
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) wrong_type(path, *content, "a string or an array of blocks");
  std::string text;
  for (size_t i = 0; i < content->size(); ++i) {
    const Fields block((*content)[i], element_path(path, i));
    const std::string type = block.required_text("type");
    std::string piece;
    if (type == "text") {
      piece = block.required_text("text");
    } else if (type == "document") {
      piece = document_text(block);
    } else {
      refuse_block(block, type, "text");
    }
    // Agents put a line of accounting in front that differs with every request: the model has no use for it,
    // and no prefix would ever be found again.
    if (piece.starts_with("x-anthropic-billing-header:")) continue;
    if (!text.empty()) text += between;
    text += piece;
  }
  return text;
}

// One message of theirs may be several of ours: what tools gave are messages of their own.
class Messages {
 public:
  explicit Messages(chat::Conversation& conversation) : messages_(conversation.messages) {}

  void read(const Fields& message) {
    const auto role = message.choice("role", {"user", "assistant", "system"});
    if (!role) bad_field(message.path_of("role"), "is missing, expected a string", kMissing);
    const Json* content = message.find("content");
    const std::string path = message.path_of("content");
    if (content == nullptr) bad_field(path, "is missing, expected a string or an array of blocks", kMissing);
    if (*role == "system") {
      messages_.push_back({.role = "system", .content = read_text_blocks(content, path, "\n\n")});
      return;
    }
    if (content->is_string()) {
      add_text(*role, content->get<std::string>());
      return;
    }
    if (!content->is_array()) wrong_type(path, *content, "a string or an array of blocks");
    for (size_t i = 0; i < content->size(); ++i) {
      const Fields block((*content)[i], element_path(path, i));
      if (*role == "user") {
        read_user_block(block);
      } else {
        read_assistant_block(block);
      }
    }
  }

 private:
  // Neighbours of one role are one message, as Anthropic has it: templates insist on turns.
  chat::Message& of_role(std::string_view role) {
    if (messages_.empty() || messages_.back().role != role) {
      messages_.push_back({.role = std::string(role)});
    }
    return messages_.back();
  }

  void add_text(std::string_view role, const std::string& text) {
    chat::Message& message = of_role(role);
    if (!message.content.empty() && role == "user") message.content += "\n\n";
    message.content += text;
  }

  void read_user_block(const Fields& block) {
    const std::string type = block.required_text("type");
    if (type == "text") {
      add_text("user", block.required_text("text"));
    } else if (type == "document") {
      add_text("user", document_text(block));
    } else if (type == "image") {
      chat::Message& message = of_role("user");
      add_image(message.images, message.content.size(), image_file(block), block.path_of("source"));
    } else if (type == "tool_result") {
      chat::Message result{.role = "tool"};
      result.tool_call_id = block.required_text("tool_use_id");
      result.content = read_text_blocks(block.find("content"), block.path_of("content"), "\n");
      if (block.boolean("is_error").value_or(false)) result.content = "Error: " + result.content;
      result.name = name_of_call(result.tool_call_id, block);
      messages_.push_back(std::move(result));
    } else {
      refuse_block(block, type, "text, image or tool_result");
    }
  }

  void read_assistant_block(const Fields& block) {
    const std::string type = block.required_text("type");
    if (type == "text") {
      add_text("assistant", block.required_text("text"));
    } else if (type == "thinking") {
      of_role("assistant").reasoning += block.required_text("thinking");
    } else if (type == "redacted_thinking") {
      of_role("assistant");  // nobody here can read it
    } else if (type == "tool_use") {
      const std::optional<Fields> input = block.object("input");
      if (!input) bad_field(block.path_of("input"), "is missing, expected an object", kMissing);
      of_role("assistant")
          .tool_calls.push_back({.id = block.required_text("id"),
                                 .name = block.required_text("name"),
                                 .arguments = input->json().dump()});
    } else {
      refuse_block(block, type, "text, thinking or tool_use");
    }
  }

  std::string name_of_call(const std::string& id, const Fields& block) const {
    for (auto message = messages_.rbegin(); message != messages_.rend(); ++message) {
      for (const chat::ToolCall& call : message->tool_calls) {
        if (call.id == id) return call.name;
      }
    }
    bad_field(block.path_of("tool_use_id"),
              fmt::format("names \"{}\", expected the id of a tool_use block before it", id.substr(0, 60)));
  }

  std::vector<chat::Message>& messages_;
};

void read_anthropic_tools(const Fields& fields, chat::Conversation& conversation) {
  const Json* tools = fields.array("tools");
  if (tools == nullptr) return;
  constexpr size_t kMaxTools = 1024;
  if (tools->size() > kMaxTools) {
    bad_field("tools", fmt::format("expected at most {} tools", kMaxTools), "array_above_max_length");
  }
  for (size_t i = 0; i < tools->size(); ++i) {
    const Fields tool((*tools)[i], element_path("tools", i));
    const std::string type = tool.text("type").value_or("custom");
    if (type != "custom") {
      bad_field(tool.path_of("type"),
                fmt::format("found \"{}\", expected \"custom\": this server runs no tools itself",
                            type.substr(0, 60)),
                "unsupported_value");
    }
    chat::Tool read = read_function(tool);
    read.parameters = read_schema(tool, "input_schema");
    if (read.parameters.empty()) {
      bad_field(tool.path_of("input_schema"), "is missing, expected a JSON schema", kMissing);
    }
    conversation.tools.push_back(std::move(read));
  }
}

void read_anthropic_tool_choice(const Fields& fields, chat::Conversation& conversation) {
  const std::optional<Fields> choice = fields.object("tool_choice");
  if (!choice) return;
  using Choice = chat::ToolChoice;
  const auto type = choice->choice("type", {"auto", "any", "tool", "none"});
  if (!type) bad_field(choice->path_of("type"), "is missing, expected a string", kMissing);
  conversation.parallel_tool_calls = !choice->boolean("disable_parallel_tool_use").value_or(false);
  conversation.tool_choice = *type == "auto"   ? Choice::kAuto
                             : *type == "none" ? Choice::kNone
                             : *type == "any"  ? Choice::kRequired
                                               : Choice::kNamed;
  if (*type == "auto" || *type == "none") return;
  if (conversation.tools.empty()) {
    bad_field("tool_choice", "wants a tool to be called, expected some in tools");
  }
  if (*type == "any") return;
  conversation.named_tool = choice->required_text("name");
  const auto same = [&](const chat::Tool& tool) { return tool.name == conversation.named_tool; };
  if (std::none_of(conversation.tools.begin(), conversation.tools.end(), same)) {
    choice->refuse("name", fmt::format("names the tool \"{}\", which is not in tools",
                                       conversation.named_tool.substr(0, 60)));
  }
}

// A budget in tokens becomes the effort that formats know.
std::string effort_of_budget(int64_t tokens) {
  return tokens < 4096 ? "low" : tokens < 16384 ? "medium" : "high";
}

void read_thinking(const Fields& fields, int64_t max_tokens, MessagesInput& out) {
  if (const std::optional<Fields> config = fields.object("output_config")) {
    const auto effort = config->choice("effort", {"low", "medium", "high", "xhigh", "max"});
    if (effort) {
      out.conversation.reasoning_effort = *effort == "xhigh" || *effort == "max" ? "high" : *effort;
    }
  }
  const std::optional<Fields> thinking = fields.object("thinking");
  if (!thinking) return;
  const auto type = thinking->choice("type", {"enabled", "disabled", "adaptive", "between_tools"});
  if (!type) bad_field(thinking->path_of("type"), "is missing, expected a string", kMissing);
  if (*type == "disabled") {
    out.conversation.reasoning_effort = "low";  // the least there is
    out.conversation.template_variables = R"({"enable_thinking": false})";
    return;
  }
  out.thinking = true;
  out.omit_thinking = thinking->choice("display", {"summarized", "omitted"}) == "omitted";
  out.conversation.template_variables = R"({"enable_thinking": true})";
  if (*type != "enabled") return;
  const auto budget = thinking->integer("budget_tokens", 1024, 1 << 28);
  if (!budget) bad_field(thinking->path_of("budget_tokens"), "is missing, expected an integer", kMissing);
  if (max_tokens > 0 && *budget >= max_tokens) {
    thinking->refuse("budget_tokens",
                     fmt::format("found {}, expected less than max_tokens, {}", *budget, max_tokens));
  }
  if (out.conversation.reasoning_effort.empty()) {
    out.conversation.reasoning_effort = effort_of_budget(*budget);
  }
}

}  // namespace

MessagesInput read_messages_input(const Fields& fields, Constraints& constraints, int64_t max_tokens) {
  MessagesInput out;
  out.conversation.objects = constraints.objects(fields);
  std::string system = read_text_blocks(fields.find("system"), "system", "\n\n");
  if (!system.empty()) {
    out.conversation.messages.push_back({.role = "system", .content = std::move(system)});
  }
  const Json* messages = fields.array("messages");
  if (messages == nullptr) bad_field("messages", "is missing, expected an array", kMissing);
  if (messages->empty()) {
    bad_field("messages", "found an empty array, expected at least one message", "empty_array");
  }
  Messages reader(out.conversation);
  for (size_t i = 0; i < messages->size(); ++i) {
    reader.read(Fields((*messages)[i], element_path("messages", i)));
  }
  if (out.conversation.messages.back().role == "assistant") {
    bad_field("messages", "the last message is the assistant's, expected the user's: answers cannot be begun",
              "unsupported_value");
  }
  read_anthropic_tools(fields, out.conversation);
  read_anthropic_tool_choice(fields, out.conversation);
  read_thinking(fields, max_tokens, out);
  if (const std::optional<Fields> config = fields.object("output_config")) {
    if (const std::optional<Fields> format = config->object("format")) {
      out.content = constraints.of_format(*format, &out.conversation);
    }
  }
  return out;
}

}  // namespace millrace::server
