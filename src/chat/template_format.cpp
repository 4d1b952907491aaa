#include "chat/template_format.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "chat/custom_tools.h"
#include "chat/gemma_answer_parser.h"
#include "chat/json_text.h"
#include "chat/special_text.h"
#include "chat/template_constraint.h"
#include "chat/template_messages.h"
#include "chat/template_traits.h"
#include "chat/tools.h"

namespace millrace::chat {
namespace {

// Ordinary tokens in some vocabularies, and yet no words of a user's.
const std::vector<std::string> kMarkers = {
    "<think>",          "</think>",         "<tool_call>",  "</tool_call>",     "<tool_response>",
    "</tool_response>", "<|tool_call>",     "<tool_call|>", "<|tool_response>", "<|channel>",
    "<channel|>",       "<tool_response|>", "<|\"|>"};
// Control tokens whose place in an answer means something.
constexpr std::array<const char*, 13> kAnswerNames = {
    "<think>",        "</think>",   "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", "<|channel>", "<channel|>",  "<|tool_call>", "<tool_call|>", "<|\"|>"};
// Gemma 4 hands over to a tool with <|tool_response>.
constexpr std::array<const char*, 7> kTurnEnds = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "</s>", "<turn|>", "<|tool_response>"};

std::string_view without_trailing_space(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  return text;
}

bool ends_with(std::string_view text, std::string_view tail) {
  return text.size() >= tail.size() && text.substr(text.size() - tail.size()) == tail;
}

// Which of a tool's arguments are strings: between tags nothing else tells.
std::map<std::string, bool> string_keys(const Tool& tool) {
  std::map<std::string, bool> out;
  const nlohmann::ordered_json schema = try_parse_json(tool.parameters);
  if (!schema.is_object() || !schema.contains("properties") || !schema["properties"].is_object()) return out;
  for (const auto& [key, property] : schema["properties"].items()) {
    if (!property.is_object()) continue;
    const nlohmann::ordered_json type = property.value("type", nlohmann::ordered_json());
    const nlohmann::ordered_json values = property.value("enum", nlohmann::ordered_json());
    if (type.is_string()) {
      out[key] = type == "string";
    } else if (type.is_array()) {
      out[key] = std::find(type.begin(), type.end(), "string") != type.end();
    } else if (values.is_array() && !values.empty()) {
      out[key] =
          std::all_of(values.begin(), values.end(), [](const auto& value) { return value.is_string(); });
    }
  }
  return out;
}

TemplateTraits traits_of(const Codec& codec) {
  return codec.has_template() ? probe_template(codec) : TemplateTraits();
}

std::vector<std::string> markers(const CallShape& shape) {
  std::vector<std::string> out = kMarkers;
  for (std::string& mark : shape.marks()) out.push_back(std::move(mark));
  return out;
}

class TemplateFormat : public Format {
 public:
  TemplateFormat(std::shared_ptr<const Codec> codec, std::shared_ptr<const Grammars> grammars)
      : codec_(std::move(codec)),
        grammars_(std::move(grammars)),
        traits_(traits_of(*codec_)),
        special_(*codec_, markers(traits_.shape)),
        text_(text_mask(*codec_)) {
    std::vector<std::string> names(kAnswerNames.begin(), kAnswerNames.end());
    for (std::string& mark : traits_.shape.marks()) names.push_back(std::move(mark));
    for (const std::string& name : names) {
      const int32_t token = codec_->find_special(name);
      if (token >= 0) names_[token] = name;
    }
    for (const char* name : kTurnEnds) {
      const int32_t token = codec_->find_special(name);
      const bool used =
          traits_.rendered.find(name) != std::string::npos || std::string_view(name) == "<|eom_id|>";
      if (token >= 0 && used) stops_.push_back(token);
    }
  }

  std::string_view name() const override {
    if (!traits_.native_tools) return "plain";
    return traits_.family == Family::kLlama3              ? "llama3"
           : traits_.family == Family::kMistral           ? "mistral"
           : traits_.family == Family::kGemma             ? "gemma4"
           : traits_.shape.kind == CallShape::Kind::kNone ? "hermes"
                                                          : "shaped";
  }

  std::string_view note() const override {
    if (!traits_.told_otherwise) return {};
    return "the chat template describes tools but spells no call that can be read back; the model is told of "
           "tools in Millrace's own words";
  }

  std::vector<int32_t> prompt(const Conversation& conversation, size_t max_tokens) const override {
    check_template();
    check_tool_choice(conversation);
    nlohmann::ordered_json variables = template_variables(conversation, traits_);
    const SpecialText::Mask mask = special_.choose_mask(variables);
    // Our own markers around tools are as good as the template's: only what is the client's is masked.
    if (!mask.empty()) {
      variables = template_variables(
          conversation, traits_,
          [&](nlohmann::ordered_json& value, bool assistant) { special_.mask(value, mask, assistant); });
    }
    return special_.encode(*codec_, with_images(codec_->render(variables.dump()), conversation), mask,
                           max_tokens);
  }

  std::unique_ptr<AnswerParser> parser(const Conversation& conversation) const override {
    TemplateAnswer answer;
    answer.family = traits_.family;
    answer.names = names_;
    answer.thinking = thinking(conversation) == Thinking::kOpened;
    answer.shape = traits_.shape;
    for (const Tool* tool : callable_tools(conversation)) {
      answer.tools.push_back(tool->name);
      if (answer.family == Family::kShaped) answer.strings[tool->name] = string_keys(*tool);
    }
    std::unique_ptr<AnswerParser> parser;
    if (answer.family == Family::kGemma) {
      parser = std::make_unique<GemmaAnswerParser>(std::move(answer));
    } else {
      parser = std::make_unique<TemplateAnswerParser>(std::move(answer));
    }
    return read_custom_calls(std::move(parser), conversation);
  }

  std::vector<int32_t> stop_tokens() const override { return stops_; }

  std::shared_ptr<const TokenConstraint> constraint(
      const Conversation& conversation, std::shared_ptr<const grammar::Grammar> content) const override {
    check_tool_choice(conversation);
    std::vector<int32_t> ends = codec_->end_tokens();
    for (const int32_t token : stops_) {
      if (std::find(ends.begin(), ends.end(), token) == ends.end()) ends.push_back(token);
    }
    const TemplateConstraintInput in = {.codec = codec_,
                                        .grammars = *grammars_,
                                        .text = text_,
                                        .traits = traits_,
                                        .thinking = thinking(conversation),
                                        .ends = std::move(ends)};
    return template_constraint(in, conversation, std::move(content));
  }

 private:
  void check_template() const {
    if (!codec_->has_template()) {
      throw_error(ErrorCode::kUnsupported,
                  "messages: the model has no chat template, expected text or tokens");
    }
  }

  // What the template wrote for an image, with what belongs around it: nobody else's text has the name whole.
  std::string with_images(std::string rendered, const Conversation& conversation) const {
    const size_t images = images_of(conversation).size();
    if (images == 0) return rendered;
    const Codec::ImagePlace place = codec_->image_place();
    size_t found = 0;
    for (size_t at = 0;
         !place.written.empty() && (at = rendered.find(place.written, at)) != std::string::npos; ++found) {
      rendered.replace(at, place.written.size(), place.expanded);
      at += place.expanded.size();
    }
    if (found != images) {
      throw_error(ErrorCode::kUnsupported,
                  "messages: the chat template has places for {} of {} images, expected one for each", found,
                  images);
    }
    return rendered;
  }

  // By how the template begins an answer.
  Thinking thinking(const Conversation& conversation) const {
    if (!codec_->has_template()) return Thinking::kNone;
    const std::string rendered = codec_->render(short_variables(conversation, traits_).dump());
    const std::string_view end = without_trailing_space(rendered);
    if (traits_.family == Family::kGemma) {
      // The template closes an empty channel where nothing is to be thought.
      const bool off = ends_with(end, "<channel|>") || thinking_off(conversation);
      return off || codec_->encode("<|channel>", true).size() != 1 ? Thinking::kNone : Thinking::kMay;
    }
    if (ends_with(end, "<think>")) return Thinking::kOpened;
    if (ends_with(end, "</think>") || (traits_.thinking_switch && thinking_off(conversation)))
      return Thinking::kNone;
    const bool knows = codec_->encode("<think>", true).size() == 1 && traits_.thinking_switch;
    return knows ? Thinking::kMay : Thinking::kNone;
  }

  std::shared_ptr<const Codec> codec_;
  std::shared_ptr<const Grammars> grammars_;
  TemplateTraits traits_;
  SpecialText special_;
  std::vector<uint64_t> text_;
  std::map<int32_t, std::string> names_;
  std::vector<int32_t> stops_;
};

}  // namespace

std::unique_ptr<Format> make_template_format(std::shared_ptr<const Codec> codec,
                                             std::shared_ptr<const Grammars> grammars) {
  return std::make_unique<TemplateFormat>(std::move(codec), std::move(grammars));
}

std::vector<std::shared_ptr<const std::string>> images_of(const Conversation& conversation) {
  std::vector<std::shared_ptr<const std::string>> images;
  for (const Message& message : conversation.messages) {
    for (const MessageImage& image : message.images) images.push_back(image.file);
  }
  return images;
}

}  // namespace millrace::chat
