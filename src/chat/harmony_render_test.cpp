// Rendering against openai-harmony's own (tests/golden/harmony/render.json). Here over bytes: what is control
// and what is text, piece by piece; tests/harmony_test.cpp compares ids with the real vocabulary.
#include "chat/harmony_render.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "chat/test_codec.h"
#include "millrace/error.h"

namespace millrace::chat {
namespace {

using test::Json;

// Control tokens as numbers of the real vocabulary, text between them as strings.
Json pieces_of(const test::ByteCodec& codec, const std::vector<int32_t>& tokens, const Json& special) {
  Json out = Json::array();
  for (const int32_t token : tokens) {
    if (codec.is_special(token)) {
      const std::string name = codec.token_text(token);
      out.push_back(special[name.substr(2, name.size() - 4)]);
    } else {
      if (out.empty() || !out.back().is_string()) out.push_back("");
      out.back() = out.back().get<std::string>() + codec.token_text(token);
    }
  }
  return out;
}

void check_cases(const std::string& path, size_t at_least) {
  const Json golden = test::read_json(path);
  const test::ByteCodec codec = test::harmony_codec();
  const HarmonyTokens tokens = find_harmony_tokens(codec);
  ASSERT_GE(golden["cases"].size(), at_least);
  for (const Json& c : golden["cases"]) {
    const std::vector<int32_t> got = render_harmony(codec, tokens, test::conversation_of(c["conversation"]));
    ASSERT_EQ(pieces_of(codec, got, golden["special"]), c["pieces"]) << c["name"];
  }
}

TEST(HarmonyRender, AsOpenAiHarmony) { check_cases("tests/golden/harmony/render.json", 70); }

TEST(HarmonyRender, AsOpenAiHarmonyOnMoreCases) {
  const char* path = std::getenv("MILLRACE_HARMONY_CASES");
  if (path == nullptr) GTEST_SKIP() << "MILLRACE_HARMONY_CASES is not set";
  check_cases(path, 1);
}

TEST(HarmonyRender, TextsBehindSoManyTokensAreNotTokenized) {
  const test::ByteCodec codec = test::harmony_codec();
  const HarmonyTokens tokens = find_harmony_tokens(codec);
  Conversation conversation;
  conversation.messages = {{.role = "user", .content = std::string(5000, 'a')},
                           {.role = "user", .content = std::string(5000, 'b')}};
  const std::vector<int32_t> all = render_harmony(codec, tokens, conversation);
  EXPECT_EQ(render_harmony(codec, tokens, conversation, all.size()), all);
  const std::vector<int32_t> some = render_harmony(codec, tokens, conversation, 3000);
  EXPECT_GT(some.size(), 3000u);
  EXPECT_LT(some.size(), 3100u);
}

std::string shown(const Conversation& conversation) {
  const test::ByteCodec codec = test::harmony_codec();
  std::string out;
  for (const int32_t token : render_harmony(codec, find_harmony_tokens(codec), conversation)) {
    out += codec.token_text(token);
  }
  return out;
}

TEST(HarmonyRender, ToolsThatMayNotBeCalledAreNotTold) {
  Conversation conversation;
  conversation.messages = {{.role = "user", .content = "hi"}};
  conversation.tools = {{.name = "f", .description = "F."}};
  EXPECT_NE(shown(conversation).find("namespace functions"), std::string::npos);
  conversation.tool_choice = ToolChoice::kNone;
  EXPECT_EQ(shown(conversation).find("functions"), std::string::npos);
}

TEST(HarmonyRender, ResponseFormat) {
  Conversation conversation;
  conversation.messages = {{.role = "system", .content = "You are a helpful shopping assistant"}};
  conversation.response_name = "shopping_list";
  conversation.response_schema = R"({"properties": {"items": {"type": "array"}}, "type": "object"})";
  EXPECT_NE(
      shown(conversation)
          .find("<|start|>developer<|message|># Instructions\n\nYou are a helpful shopping assistant\n\n"
                "# Response Formats\n\n## shopping_list\n\n"
                "{\"properties\":{\"items\":{\"type\":\"array\"}},\"type\":\"object\"}<|end|>"),
      std::string::npos)
      << shown(conversation);
}

TEST(HarmonyRender, OwnToolsOfTheModel) {
  Conversation conversation;
  conversation.messages = {
      {.role = "assistant", .tool_calls = {{.id = "1", .name = "python", .arguments = "print(1)"}}},
      {.role = "tool", .content = "1", .tool_call_id = "1"}};
  const std::string own = shown(conversation);
  EXPECT_NE(
      own.find("<|start|>assistant to=python<|channel|>analysis <|constrain|>code<|message|>print(1)<|call|>"
               "<|start|>python to=assistant<|channel|>analysis<|message|>1<|end|>"),
      std::string::npos)
      << own;
  conversation.tools = {{.name = "python"}};
  EXPECT_NE(shown(conversation).find("<|start|>assistant to=functions.python<|channel|>commentary"),
            std::string::npos);
}

TEST(HarmonyRender, TodayWhenNoDateIsGiven) {
  EXPECT_NE(shown({}).find("Current date: " + today() + "\n"), std::string::npos);
}

TEST(HarmonyRender, RefusesWhatItCannotSay) {
  Conversation conversation;
  conversation.messages = {{.role = "narrator", .content = "x"}};
  EXPECT_THROW(shown(conversation), Error);
  conversation.messages = {};
  conversation.reasoning_effort = "extreme";
  EXPECT_THROW(shown(conversation), Error);
  conversation.reasoning_effort = "";
  conversation.tools = {{.name = "f", .parameters = "{\"type\":"}};
  EXPECT_THROW(shown(conversation), Error);
  std::string deep;
  for (int i = 0; i < 10000; ++i) deep += "{\"items\":";
  conversation.tools = {{.name = "f", .parameters = deep + "1" + std::string(10000, '}')}};
  EXPECT_THROW(shown(conversation), Error);
}

}  // namespace
}  // namespace millrace::chat
