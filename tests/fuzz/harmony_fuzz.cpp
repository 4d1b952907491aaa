// Any tokens as an answer, harmony's and the template families': read without a fault, calls numbered as they
// come, no character cut in two, and of harmony no text lost. Bytes below 16 are control tokens, the rest are
// letters, those beyond ASCII of two bytes; the first byte chooses the family.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/utf8.h"
#include "chat/harmony_parser.h"
#include "chat/template_answer_parser.h"
#include "touch.h"

namespace {

using namespace millrace::chat;

constexpr int kNumFamilies = 6;  // harmony, and TemplateAnswerParser's
constexpr const char* kNames[] = {"<think>",      "</think>", "<tool_call>",   "</tool_call>",
                                  "[TOOL_CALLS]", "[ARGS]",   "<|python_tag|>"};

CallShape make_shape(int kind) {
  CallShape out;
  out.kind = static_cast<CallShape::Kind>(static_cast<int>(CallShape::Kind::kNamed) + kind);
  if (out.kind == CallShape::Kind::kPython) {
    out.open = "<think>[";
    out.name_end = "(";
    out.end = ")";
    out.between = ", ";
    out.close = "]</think>";
    return out;
  }
  out.begin = "<tool_call>\n<f=";
  out.name_end = std::string(">") + CallShape::kAny + "\n";
  out.key_begin = "<k=";
  out.key_end = ">\n";
  out.value_end = "</k>";
  out.end = "\n</f>\n</tool_call>";
  out.between = "\n";
  return out;
}

std::unique_ptr<AnswerParser> make_parser(uint8_t choice) {
  const HarmonyTokens tokens = {
      .start = 0, .end = 1, .message = 2, .channel = 3, .constrain = 4, .ret = 5, .call = 6};
  if (choice % kNumFamilies == 0)
    return std::make_unique<HarmonyParser>(tokens, std::vector<std::string>{"f", "get_weather"});
  TemplateAnswer answer;
  answer.family = static_cast<Family>(choice % kNumFamilies - 1);
  answer.tools = {"f", "get_weather"};
  if (answer.family == Family::kShaped) answer.shape = make_shape(choice / kNumFamilies % 3);
  answer.thinking = choice >= 128;
  for (int32_t i = 0; i < 7; ++i) answer.names[i] = kNames[i];
  return std::make_unique<TemplateAnswerParser>(std::move(answer));
}

std::string text_of(uint8_t byte) {
  if (byte < 16) return "";
  if (byte < 128) return std::string(1, static_cast<char>(byte));
  return {static_cast<char>(0xc0 | byte >> 6), static_cast<char>(0x80 | (byte & 0x3f))};
}

bool is_utf8(const std::string& text) { return millrace::valid_utf8(text) == text; }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto parser = make_parser(data[0]);
  std::vector<Delta> deltas;
  size_t letters = 0;
  for (size_t i = 1; i < size; ++i) {
    parser->token(data[i], text_of(data[i]), deltas);
    letters += data[i] == '*' ? 1 : 0;
  }
  parser->finish("", deltas);
  int32_t calls = 0;
  size_t read = 0;
  for (const Delta& delta : deltas) {
    if (delta.kind == Delta::Kind::kToolCall && delta.call != calls++) __builtin_trap();
    if (delta.kind == Delta::Kind::kToolArguments && delta.call != calls - 1) __builtin_trap();
    if (delta.kind != Delta::Kind::kToolCall && delta.text.empty()) __builtin_trap();
    if (!is_utf8(delta.text) || !is_utf8(delta.name)) __builtin_trap();
    read += static_cast<size_t>(std::count(delta.text.begin(), delta.text.end(), '*'));
    millrace::fuzz::touch(delta.text);
  }
  if (data[0] % kNumFamilies == 0 && read != letters) __builtin_trap();
  return 0;
}
