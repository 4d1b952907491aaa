#include "chat/template_messages.h"

#include <array>
#include <cstdio>

#include "base/error.h"
#include "base/utf8.h"
#include "chat/harmony_render.h"
#include "chat/json_text.h"
#include "chat/tools.h"

namespace millrace::chat {
namespace {

using Json = nlohmann::ordered_json;

// The client's values, seen by `clean`.
class Source {
 public:
  explicit Source(const Clean& clean) : clean_(clean) {}

  Json json(Json value, bool assistant = false) const {
    if (clean_) clean_(value, assistant);
    return value;
  }
  std::string text(const std::string& text, bool assistant = false) const {
    return json(valid_utf8(text), assistant).get<std::string>();
  }
  Json tool(const Tool& tool) const {
    Json function = {{"name", text(tool.name)}, {"description", text(tool.description)}};
    function["parameters"] = tool.parameters.empty()
                                 ? Json{{"type", "object"}, {"properties", Json::object()}}
                                 : json(parse_json(tool.parameters, "parameters of tool " + tool.name));
    return {{"type", "function"}, {"function", std::move(function)}};
  }
  // Templates take arguments as an object; what is no JSON goes in as it is.
  Json arguments(const ToolCall& call) const {
    if (call.arguments.empty()) return Json::object();
    Json value = try_parse_json(call.arguments);
    return json(value.is_discarded() ? Json(valid_utf8(call.arguments)) : std::move(value));
  }
  Json function(const ToolCall& call) const {
    return {{"name", text(call.name)}, {"arguments", arguments(call)}};
  }

 private:
  const Clean& clean_;
};

// Mistral's templates take ids of nine letters or digits and no others.
std::string call_id(const std::string& id, Family family) {
  if (family != Family::kMistral || id.empty()) return id;
  bool fits = id.size() == 9;
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : id) {
    fits = fits && ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'));
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  if (fits) return id;
  constexpr std::string_view kLetters = "0123456789abcdefghijklmnopqrstuvwxyz";
  std::string out;
  for (int i = 0; i < 9; ++i, hash /= kLetters.size()) out += kLetters[hash % kLetters.size()];
  return out;
}

// Our own words for a template that has none for tools.
std::string tools_text(const Conversation& conversation, const Source& source) {
  std::string out = "You can call these functions, given as JSON, one on each line:\n<tools>\n";
  for (const Tool& tool : conversation.tools) out += source.tool(tool)["function"].dump() + "\n";
  return out +
         "</tools>\nTo call one, answer with its name and its arguments as JSON in this form, once for each "
         "call:\n"
         "<tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"KEY\": \"VALUE\"}}\n</tool_call>";
}

void add_text(Json& message, const std::string& text) {
  auto& content = message["content"].get_ref<std::string&>();
  if (!content.empty()) content += '\n';
  content += text;
}

class Messages {
 public:
  Messages(const Conversation& conversation, const TemplateTraits& traits, const Source& source)
      : conversation_(conversation), traits_(traits), source_(source) {}

  Json run() {
    size_t first = 0;
    std::string system;
    const auto add_system = [&](const std::string& text) {
      if (!text.empty()) system += (system.empty() ? "" : "\n\n") + text;
    };
    const std::vector<Message>& messages = conversation_.messages;
    for (; first < messages.size() && is_system(messages[first]); ++first) {
      add_system(source_.text(messages[first].content));
    }
    if (!traits_.native_tools && offers_tools(conversation_)) add_system(tools_text(conversation_, source_));
    const bool given = first > 0 || !system.empty();
    if (given && traits_.system_role) out_.push_back({{"role", "system"}, {"content", system}});
    for (size_t i = first; i < messages.size(); ++i) add(messages[i], i);
    if (!traits_.system_role && !system.empty()) into_first_user(system);
    return std::move(out_);
  }

 private:
  static bool is_system(const Message& message) {
    return message.role == "system" || message.role == "developer";
  }

  void into_first_user(const std::string& system) {
    for (Json& message : out_) {
      if (message["role"] != "user") continue;
      if (message["content"].is_array()) {
        message["content"].insert(message["content"].begin(), text_part(system + "\n\n"));
      } else {
        message["content"] = system + "\n\n" + message["content"].get<std::string>();
      }
      return;
    }
    out_.insert(out_.begin(), Json{{"role", "user"}, {"content", system}});
  }

  void add(const Message& message, size_t index) {
    const std::string content = source_.text(message.content, message.role == "assistant");
    if (message.role == "assistant") {
      assistant(message, content);
    } else if (message.role == "tool" || message.role == "function") {
      result(message, content);
    } else if (is_system(message)) {
      out_.push_back({{"role", "system"}, {"content", content}});
    } else if (message.role == "user") {
      out_.push_back(
          {{"role", "user"}, {"content", message.images.empty() ? Json(content) : parts(message)}});
    } else {
      throw_error(ErrorCode::kBadInput,
                  "message {}: role is {}, expected system, developer, user, assistant or tool", index,
                  valid_utf8(message.role));
    }
  }

  static Json text_part(const std::string& text) { return {{"type", "text"}, {"text", text}}; }

  // Texts and images in turn, as templates of models that see take them.
  Json parts(const Message& message) const {
    Json out = Json::array();
    size_t at = 0;
    const auto text_until = [&](size_t end) {
      if (end > at) out.push_back(text_part(source_.text(message.content.substr(at, end - at))));
      at = end;
    };
    for (const MessageImage& image : message.images) {
      text_until(image.at);
      out.push_back({{"type", "image"}});
    }
    text_until(message.content.size());
    return out;
  }

  void assistant(const Message& message, const std::string& content) {
    Json out = {{"role", "assistant"}, {"content", content}};
    if (!message.reasoning.empty()) out["reasoning_content"] = source_.text(message.reasoning, true);
    if (!traits_.native_tools) {
      for (const ToolCall& call : message.tool_calls) {
        add_text(out, "<tool_call>\n" + source_.function(call).dump() + "\n</tool_call>");
      }
      out_.push_back(std::move(out));
      return;
    }
    Json calls = Json::array();
    for (const ToolCall& call : message.tool_calls) {
      // Where a template takes one call a message, each gets its own.
      if (!calls.empty() && !traits_.many_calls) {
        out["tool_calls"] = std::move(calls);
        out_.push_back(std::move(out));
        out = {{"role", "assistant"}, {"content", ""}};
        calls = Json::array();
      }
      calls.push_back({{"id", source_.text(call_id(call.id, traits_.family))},
                       {"type", "function"},
                       {"function", source_.function(call)}});
    }
    if (!calls.empty()) out["tool_calls"] = std::move(calls);
    out_.push_back(std::move(out));
  }

  void result(const Message& message, const std::string& content) {
    if (traits_.native_tools) {
      Json out = {{"role", "tool"}, {"content", content}};
      if (!message.name.empty()) out["name"] = source_.text(message.name);
      if (!message.tool_call_id.empty()) {
        out["tool_call_id"] = source_.text(call_id(message.tool_call_id, traits_.family));
      }
      out_.push_back(std::move(out));
      return;
    }
    const std::string text = "<tool_response>\n" + content + "\n</tool_response>";
    const bool joins = !out_.empty() && out_.back().contains("result");
    if (joins) {
      add_text(out_.back(), text);
    } else {
      out_.push_back({{"role", "user"}, {"content", text}, {"result", true}});
    }
  }

  const Conversation& conversation_;
  const TemplateTraits& traits_;
  const Source& source_;
  Json out_ = Json::array();
};

// "26 Jul 2024", as Llama's templates write a date.
std::string long_date(const std::string& date) {
  int year = 0, month = 0, day = 0;
  if (std::sscanf(date.c_str(), "%d-%d-%d", &year, &month, &day) != 3 || month < 1 || month > 12) return date;
  constexpr std::array<const char*, 12> kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                   "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  return fmt::format("{:02} {} {}", day, kMonths[static_cast<size_t>(month) - 1], year);
}

void add_variables(const Conversation& conversation, const TemplateTraits& traits, const Source& source,
                   Json& out) {
  if (traits.native_tools && offers_tools(conversation)) {
    out["tools"] = Json::array();
    for (const Tool& tool : conversation.tools) out["tools"].push_back(source.tool(tool));
  }
  out["add_generation_prompt"] = true;
  if (!conversation.reasoning_effort.empty()) {
    out["reasoning_effort"] = source.text(conversation.reasoning_effort);
    out["enable_thinking"] = !thinking_off(conversation);
  }
  out["date_string"] = long_date(conversation.date.empty() ? today() : valid_utf8(conversation.date));
  if (conversation.template_variables.empty()) return;
  const Json more = source.json(parse_json(conversation.template_variables, "template variables"));
  if (!more.is_object()) {
    throw_error(ErrorCode::kBadInput, "template variables: found no JSON object, expected one");
  }
  constexpr size_t kMaxVariables = 256;
  if (more.size() > kMaxVariables) {
    throw_error(ErrorCode::kBadInput, "template variables: found {}, expected at most {}", more.size(),
                kMaxVariables);
  }
  for (const auto& [name, value] : more.items()) {
    if (name != "messages" && name != "tools") out[name] = value;
  }
}

}  // namespace

bool thinking_off(const Conversation& conversation) {
  return conversation.reasoning_effort == "none" || conversation.reasoning_effort == "minimal";
}

Json template_variables(const Conversation& conversation, const TemplateTraits& traits, const Clean& clean) {
  const Source source(clean);
  Json messages = Messages(conversation, traits, source).run();
  for (Json& message : messages) message.erase("result");
  Json out = {{"messages", std::move(messages)}};
  add_variables(conversation, traits, source, out);
  return out;
}

Json short_variables(const Conversation& conversation, const TemplateTraits& traits) {
  Json out = {{"messages", {{{"role", "user"}, {"content", "x"}}}}};
  const Clean as_it_is = {};
  add_variables(conversation, traits, Source(as_it_is), out);
  out.erase("tools");
  return out;
}

}  // namespace millrace::chat
