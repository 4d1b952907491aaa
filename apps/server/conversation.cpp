#include "conversation.h"

#include <fmt/core.h>

#include <algorithm>

#include "api_error.h"
#include "base/error.h"
#include "base/work_budget.h"
#include "chat/custom_tools.h"
#include "grammar/lark.h"
#include "grammar/regex.h"

namespace millrace::server {

namespace {

// The bytes of "data:image/png;base64,...".
std::string from_data_url(const std::string& url, const std::string& path) {
  constexpr std::string_view kMark = ";base64,";
  const size_t comma = url.find(kMark);
  if (!url.starts_with("data:image/") || comma == std::string::npos || comma > 64) {
    bad_field(path,
              fmt::format("found \"{}\", expected a data URL with an image in base64: this server fetches "
                          "nothing",
                          url.substr(0, 40)));
  }
  return from_base64(std::string_view(url).substr(comma + kMark.size()), path);
}

// {"type": "image_url", "image_url": {"url": ...}} of chats, {"type": "input_image", "image_url": ...} of
// responses.
std::string read_image(const Fields& part, const std::string& type) {
  if (type == "input_image") return from_data_url(part.required_text("image_url"), part.path_of("image_url"));
  const std::optional<Fields> place = part.object("image_url");
  if (!place)
    bad_field(part.path_of("image_url"), "is missing, expected an object", "missing_required_parameter");
  return from_data_url(place->required_text("url"), place->path_of("url"));
}

}  // namespace

std::string from_base64(std::string_view text, const std::string& path) {
  std::string out;
  out.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  int count = 0;
  while (text.ends_with('=')) text.remove_suffix(1);
  for (const char c : text) {
    const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 26
                      : c >= '0' && c <= '9' ? c - '0' + 52
                      : c == '+'             ? 62
                      : c == '/'             ? 63
                                             : -1;
    if (value < 0) bad_field(path, "found what is no base64, expected an image in base64");
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) out += static_cast<char>(bits >> (count -= 8) & 0xff);
  }
  return out;
}

void add_image(std::vector<chat::MessageImage>& images, size_t at, std::string file,
               const std::string& path) {
  if (images.size() >= kMaxImages)
    bad_field(path, fmt::format("expected at most {} images", kMaxImages), "array_above_max_length");
  images.push_back({at, std::make_shared<const std::string>(std::move(file))});
}

std::string read_content(const Json* content, const std::string& path,
                         std::vector<chat::MessageImage>* images) {
  if (content == nullptr || content->is_null()) return {};
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) wrong_type(path, *content, "a string or an array of parts");
  std::string text;
  for (size_t i = 0; i < content->size(); ++i) {
    const Fields part((*content)[i], element_path(path, i));
    const std::string type = part.required_text("type");
    if (type == "text" || type == "input_text" || type == "output_text") {
      text += part.required_text("text");
    } else if (type == "refusal") {
      text += part.required_text("refusal");
    } else if (images != nullptr && (type == "image_url" || type == "input_image")) {
      add_image(*images, text.size(), read_image(part, type), path);
    } else {
      part.refuse("type",
                  fmt::format("found \"{}\", expected {}", type.substr(0, 60),
                              images != nullptr ? "text or an image" : "text: nothing else is read here"));
    }
  }
  return text;
}

std::string read_schema(const Fields& fields, std::string_view key) {
  const std::optional<Fields> schema = fields.object(key);
  return schema ? schema->json().dump() : std::string();
}

namespace {

std::string read_tool_name(const Fields& fields) {
  std::string name = fields.required_text("name");
  const bool good = !name.empty() && name.size() <= 128 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' ||
           c == '-' || c == '.';
  });
  if (!good) fields.refuse("name", "expected 1 to 128 of the characters a-z A-Z 0-9 _ - .");
  return name;
}

}  // namespace

chat::Tool read_function(const Fields& function) {
  chat::Tool tool;
  tool.name = read_tool_name(function);
  tool.description = function.text("description").value_or("");
  tool.parameters = read_schema(function, "parameters");
  tool.strict = function.boolean("strict").value_or(false);
  return tool;
}

namespace {

// What a custom tool's format asks for.
chat::CustomForm read_format(const Fields& format) {
  const auto type = format.choice("type", {"text", "grammar"});
  if (!type) bad_field(format.path_of("type"), "is missing, expected a string", "missing_required_parameter");
  if (*type == "text") return {};
  const std::optional<Fields> nested = format.object("grammar");
  const Fields& place = nested ? *nested : format;
  const auto syntax = place.choice("syntax", {"lark", "regex"});
  if (!syntax)
    bad_field(place.path_of("syntax"), "is missing, expected a string", "missing_required_parameter");
  const std::string definition = place.required_text("definition");
  try {
    if (*syntax == "lark") {
      chat::CustomForm form{.pattern = grammar::lark_to_regex(definition),
                            .told = "follows this grammar, written for Lark:\n" + definition};
      grammar::parse_regex(form.pattern, false, "lark");
      return form;
    }
    grammar::parse_regex(definition, false, "regex");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadInput && error.code() != ErrorCode::kUnsupported) throw;
    bad_field(place.path_of("definition"), error.what(),
              error.code() == ErrorCode::kUnsupported ? "unsupported" : "invalid_value");
  }
  return {.pattern = definition, .told = "matches the regular expression " + definition};
}

chat::Tool read_custom(const Fields& custom) {
  const std::optional<Fields> format = custom.object("format");
  return chat::custom_tool(read_tool_name(custom), custom.text("description").value_or(""),
                           format ? read_format(*format) : chat::CustomForm());
}

// What lies in the object of this name, or beside it.
Fields within(const Fields& fields, std::string_view key, bool nested) {
  if (!nested) return fields;
  const std::optional<Fields> inner = fields.object(key);
  if (!inner) bad_field(fields.path_of(key), "is missing, expected an object", "missing_required_parameter");
  return *inner;
}

}  // namespace

chat::Tool read_tool(const Fields& tool, bool nested) {
  const std::string type = tool.required_text("type");
  if (type == "function") return read_function(within(tool, type, nested));
  if (type == "custom") return read_custom(within(tool, type, nested));
  tool.refuse("type", fmt::format("found \"{}\", expected \"function\" or \"custom\": this server runs no "
                                  "tools itself",
                                  type.substr(0, 60)));
}

std::string read_effort(const Fields& fields, std::string_view key) {
  const auto effort = fields.choice(key, {"none", "minimal", "low", "medium", "high", "xhigh"});
  if (!effort) return {};
  if (*effort == "none" || *effort == "minimal") return "low";  // the least there is
  return *effort == "xhigh" ? "high" : *effort;
}

namespace {

chat::ToolCall read_call(const Fields& call) {
  chat::ToolCall out = {.id = call.text("id").value_or("")};
  const bool custom = call.text("type").value_or("function") == "custom";
  const Fields said = within(call, custom ? "custom" : "function", true);
  out.name = said.required_text("name");
  out.arguments = custom ? chat::custom_arguments(said.text("input").value_or(""))
                         : said.text("arguments").value_or("{}");
  return out;
}

chat::Message read_message(const Fields& fields) {
  chat::Message message;
  message.role = fields.required_text("role");
  constexpr std::string_view kRoles[] = {"system", "developer", "user", "assistant", "tool", "function"};
  if (std::find(std::begin(kRoles), std::end(kRoles), message.role) == std::end(kRoles)) {
    fields.refuse("role", fmt::format("found \"{}\", expected system, developer, user, assistant or tool",
                                      message.role.substr(0, 60)));
  }
  if (message.role == "function") message.role = "tool";
  message.content = read_content(fields.find("content"), fields.path_of("content"),
                                 message.role == "user" ? &message.images : nullptr);
  message.name = fields.text("name").value_or("");
  message.tool_call_id = fields.text("tool_call_id").value_or("");
  if (message.role != "assistant") {
    if (!fields.has("content"))
      bad_field(fields.path_of("content"), "is missing, expected text", "missing_required_parameter");
    return message;
  }
  message.reasoning = fields.text("reasoning_content").value_or(fields.text("reasoning").value_or(""));
  if (const Json* calls = fields.array("tool_calls")) {
    for (size_t i = 0; i < calls->size(); ++i) {
      const Fields call((*calls)[i], element_path(fields.path_of("tool_calls"), i));
      message.tool_calls.push_back(read_call(call));
    }
  }
  return message;
}

void read_tools(const Fields& fields, chat::Conversation& conversation) {
  const Json* tools = fields.array("tools");
  if (tools == nullptr) return;
  constexpr size_t kMaxTools = 1024;
  if (tools->size() > kMaxTools) {
    bad_field(fields.path_of("tools"), fmt::format("expected at most {} tools", kMaxTools),
              "array_above_max_length");
  }
  for (size_t i = 0; i < tools->size(); ++i) {
    const Fields tool((*tools)[i], element_path(fields.path_of("tools"), i));
    conversation.tools.push_back(read_tool(tool, true));
  }
}

// {"type": "function" or "custom", ...}: the tool it names, one of those there are.
std::string read_named(const Fields& named, const chat::Conversation& conversation, bool nested) {
  const auto type = named.choice("type", {"function", "custom"});
  if (!type) bad_field(named.path_of("type"), "is missing, expected a string", "missing_required_parameter");
  std::string name = within(named, *type, nested).required_text("name");
  const auto same = [&](const chat::Tool& tool) {
    return tool.name == name && tool.custom == (*type == "custom");
  };
  if (std::none_of(conversation.tools.begin(), conversation.tools.end(), same)) {
    bad_field(named.path(),
              fmt::format("names the {} tool \"{}\", which is not in tools", *type, name.substr(0, 60)));
  }
  return name;
}

// Some of the tools, among which the model may choose or has to.
void read_allowed(const Fields& allowed, chat::Conversation& conversation, bool nested) {
  const auto mode = allowed.choice("mode", {"auto", "required"});
  if (!mode)
    bad_field(allowed.path_of("mode"), "is missing, expected a string", "missing_required_parameter");
  conversation.tool_choice = *mode == "auto" ? chat::ToolChoice::kAuto : chat::ToolChoice::kRequired;
  const Json* tools = allowed.array("tools");
  const std::string path = allowed.path_of("tools");
  if (tools == nullptr) bad_field(path, "is missing, expected an array", "missing_required_parameter");
  if (tools->empty()) bad_field(path, "found an empty array, expected at least one tool");
  for (size_t i = 0; i < tools->size(); ++i) {
    const Fields tool((*tools)[i], element_path(path, i));
    conversation.allowed_tools.push_back(read_named(tool, conversation, nested));
  }
}

}  // namespace

void read_tool_choice(const Fields& fields, chat::Conversation& conversation, bool nested) {
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr) return;
  using Choice = chat::ToolChoice;
  const std::string path = fields.path_of("tool_choice");
  if (choice->is_string()) {
    const std::string name = *fields.choice("tool_choice", {"none", "auto", "required"});
    conversation.tool_choice = name == "none"   ? Choice::kNone
                               : name == "auto" ? Choice::kAuto
                                                : Choice::kRequired;
  } else {
    const Fields named(*choice, path);
    if (named.text("type") == "allowed_tools") {
      read_allowed(within(named, "allowed_tools", nested), conversation, nested);
    } else {
      conversation.tool_choice = Choice::kNamed;
      conversation.named_tool = read_named(named, conversation, nested);
    }
  }
  if (conversation.tool_choice == Choice::kRequired && conversation.tools.empty()) {
    bad_field(path, "wants a tool to be called, expected some in tools");
  }
}

std::vector<std::shared_ptr<const std::string>> read_images(const chat::Conversation& conversation,
                                                            const ModelInfo& info) {
  std::vector<std::shared_ptr<const std::string>> images = chat::images_of(conversation);
  if (!images.empty() && info.images.token < 0)
    throw ApiError(400, fmt::format("images: {}", info.images.refusal), "messages", "unsupported_value");
  return images;
}

chat::Conversation read_conversation(const Fields& fields) {
  chat::Conversation conversation;
  const Json* messages = fields.array("messages");
  if (messages == nullptr)
    bad_field(fields.path_of("messages"), "is missing, expected an array", "missing_required_parameter");
  if (messages->empty()) {
    bad_field(fields.path_of("messages"), "found an empty array, expected at least one message",
              "empty_array");
  }
  for (size_t i = 0; i < messages->size(); ++i) {
    spend_work(50);
    conversation.messages.push_back(
        read_message(Fields((*messages)[i], element_path(fields.path_of("messages"), i))));
  }
  read_tools(fields, conversation);
  read_tool_choice(fields, conversation, true);
  conversation.parallel_tool_calls = fields.boolean("parallel_tool_calls").value_or(true);
  conversation.reasoning_effort = read_effort(fields, "reasoning_effort");
  if (const std::optional<Fields> variables = fields.object("chat_template_kwargs")) {
    constexpr size_t kMaxVariables = 256;
    if (variables->json().size() > kMaxVariables) {
      fields.refuse("chat_template_kwargs", fmt::format("found {} variables, expected at most {}",
                                                        variables->json().size(), kMaxVariables));
    }
    conversation.template_variables = variables->json().dump();
  }
  return conversation;
}

}  // namespace millrace::server
