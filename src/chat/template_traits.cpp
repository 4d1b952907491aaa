#include "chat/template_traits.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"

namespace millrace::chat {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kUser = "probe question";
constexpr const char* kSystem = "probe instruction";
constexpr const char* kFunction = "probe_function";
constexpr const char* kValue = "probe value";
constexpr const char* kResult = "probe result";

Json message(const char* role, const char* content) { return {{"role", role}, {"content", content}}; }

Json call(const char* id) {
  return {{"id", id},
          {"type", "function"},
          {"function", {{"name", kFunction}, {"arguments", {{"key", kValue}}}}}};
}

// What the template makes of it, or nothing where it refuses.
std::string try_render(const Codec& codec, const Json& variables) {
  try {
    return codec.render(variables.dump());
  } catch (const Error&) {
    return "";
  }
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

Json with_tools(int num_calls) {
  Json calls = Json::array();
  // Mistral's templates want ids of nine letters.
  for (int i = 0; i < num_calls; ++i) calls.push_back(call(i == 0 ? "callaaaa0" : "callaaaa1"));
  Json assistant = {{"role", "assistant"}, {"content", ""}, {"tool_calls", calls}};
  Json messages = {message("user", kUser), assistant};
  for (int i = 0; i < num_calls; ++i) {
    messages.push_back({{"role", "tool"},
                        {"name", kFunction},
                        {"tool_call_id", i == 0 ? "callaaaa0" : "callaaaa1"},
                        {"content", kResult}});
  }
  const Json schema = {{"type", "object"}, {"properties", {{"key", {{"type", "string"}}}}}};
  const Json tool = {{"type", "function"},
                     {"function", {{"name", kFunction}, {"description", "probe"}, {"parameters", schema}}}};
  return {{"messages", messages}, {"tools", {tool}}};
}

// Is the call a JSON object between <tool_call> and </tool_call>? Others have marks of their own there.
bool calls_are_json(const std::string& text) {
  constexpr std::string_view kBegin = "<tool_call>", kEnd = "</tool_call>";
  for (size_t at = text.find(kBegin); at != std::string::npos; at = text.find(kBegin, at + 1)) {
    const size_t first = text.find_first_not_of(" \r\n\t", at + kBegin.size());
    const size_t end = std::min(text.find(kEnd, at), text.size());
    if (first == std::string::npos || text[first] != '{') continue;
    if (text.substr(first, end - first).find(kFunction) != std::string::npos) return true;
  }
  return false;
}

// A spelling that is not listed, if answers in it are read as the calls they are.
bool learn_calls(const Codec& codec, TemplateTraits& traits) {
  std::string written;
  const CallShape shape = learn_call_shape(codec, written);
  if (shape.kind == CallShape::Kind::kNone) return false;
  TemplateAnswer answer = {
      .family = shape.kind == CallShape::Kind::kObject ? Family::kHermes : Family::kShaped, .shape = shape};
  const std::vector<ProbeCall> expected = probe_calls();
  for (const ProbeCall& call : expected) answer.tools.push_back(call.name);
  TemplateAnswerParser parser(answer);
  std::vector<Delta> deltas;
  parser.token(-1, written, deltas);
  parser.finish("", deltas);
  std::vector<ProbeCall> read;
  for (const Delta& delta : deltas) {
    if (delta.kind == Delta::Kind::kToolCall) read.push_back({delta.name, ""});
    if (delta.kind == Delta::Kind::kToolArguments) read.back().arguments += delta.text;
    if (delta.kind == Delta::Kind::kContent) return false;
  }
  const auto same = [](const ProbeCall& a, const ProbeCall& b) {
    return a.name == b.name && Json::parse(a.arguments, nullptr, false) == Json::parse(b.arguments);
  };
  if (!std::equal(read.begin(), read.end(), expected.begin(), expected.end(), same)) return false;
  traits.family = answer.family;
  traits.shape = shape;
  return true;
}

}  // namespace

TemplateTraits probe_template(const Codec& codec) {
  TemplateTraits out;
  const Json user = message("user", kUser);
  out.system_role = has(try_render(codec, {{"messages", {message("system", kSystem), user}}}), kSystem);
  const std::string on = try_render(codec, {{"messages", {user}}, {"enable_thinking", true}});
  const std::string off = try_render(codec, {{"messages", {user}}, {"enable_thinking", false}});
  out.thinking_switch = on != off;

  out.rendered = try_render(codec, with_tools(1));
  Json without_list = with_tools(1);
  without_list.erase("tools");
  // The tool is told of when leaving it out changes the text; the call and the result must be there anyway.
  const bool told = try_render(codec, without_list) != out.rendered;
  const bool complete =
      told && has(out.rendered, kFunction) && has(out.rendered, kValue) && has(out.rendered, kResult);
  const std::string many = try_render(codec, with_tools(2));
  out.many_calls = !many.empty();
  out.told_otherwise = told && has(out.rendered, kFunction);
  if (!complete) return out;
  if (has(out.rendered, "<|tool_call>call:probe_function{")) {
    out.family = Family::kGemma;
    out.native_tools = true;
  } else if (calls_are_json(out.rendered)) {
    out.native_tools = true;
  } else if (has(out.rendered, "[TOOL_CALLS]")) {
    out.family = Family::kMistral;
    out.native_tools = true;
    out.named_arguments = has(out.rendered, "[ARGS]");
  } else if (learn_calls(codec, out)) {
    out.native_tools = true;
  } else if (has(out.rendered, "{\"name\": \"probe_function\", \"parameters\": ") ||
             codec.find_special("<|python_tag|>") >= 0) {
    out.family = Family::kLlama3;
    out.native_tools = true;
  }
  if (out.native_tools) out.told_otherwise = false;
  return out;
}

}  // namespace millrace::chat
