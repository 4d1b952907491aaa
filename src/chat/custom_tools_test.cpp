// Custom tools: their input comes out of the arguments however these are spelled and cut, and goes back in.
#include "chat/custom_tools.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "chat/harmony_format.h"
#include "chat/harmony_parser.h"
#include "chat/test_codec.h"

namespace millrace::chat {
namespace {

const std::string kInputs[] = {"", "ls -l | grep \"x\\y\"\n",
                               "tab\there, bell\a, nul" + std::string(1, '\0') + ", slash /",
                               "ünï €, 日本 and 😀😀", "{\"input\": \"nested\"}"};

TEST(CustomInput, IsReadHoweverItIsSpelledAndCut) {
  for (const std::string& input : kInputs) {
    // nlohmann's spellings: bytes as they are, and everything beyond ASCII in \u, pairs included.
    for (const bool ascii : {false, true}) {
      for (const int indent : {-1, 2}) {
        const std::string arguments = nlohmann::json{{"input", input}}.dump(indent, ' ', ascii);
        for (size_t size = 1; size < 9; ++size) {
          CustomInput reader;
          std::string got;
          for (size_t at = 0; at < arguments.size(); at += size)
            got += reader.add(arguments.substr(at, size));
          EXPECT_EQ(got, input) << arguments;
        }
      }
    }
    CustomInput reader;
    EXPECT_EQ(reader.add(custom_arguments(input)), input);
  }
}

TEST(CustomInput, WhatIsCutShortIsAsFarAsItCame) {
  EXPECT_EQ(CustomInput().add("{\"input\": \"ab\\u00"), "ab");
  EXPECT_EQ(CustomInput().add("{\"inp"), "");
  EXPECT_EQ(CustomInput().add("{}"), "");
  EXPECT_EQ(CustomInput().add(" plain text"), "plain text");
}

TEST(CustomTools, AreFunctionsOfOneStringToTheModel) {
  const Tool free = custom_tool("shell", "Runs it.", {}),
             number = custom_tool("dial", "", {.pattern = "[0-9]+|x", .told = "a number"});
  EXPECT_TRUE(free.custom && free.strict && number.custom);
  EXPECT_FALSE(nlohmann::json::parse(free.parameters)["properties"]["input"].contains("pattern"));
  EXPECT_EQ(nlohmann::json::parse(number.parameters)["properties"]["input"]["pattern"], "^(?:[0-9]+|x)$");
}

TEST(CustomTools, CallsOfBothKindsAreTold) {
  const test::ByteCodec codec = test::harmony_codec();
  Conversation conversation;
  conversation.tools = {custom_tool("shell", "", {}), {.name = "get"}};
  auto tokens = find_harmony_tokens(codec);
  const auto parser = read_custom_calls(
      std::make_unique<HarmonyParser>(tokens, std::vector<std::string>{"shell", "get"}), conversation);
  std::vector<Delta> deltas;
  const std::string answer =
      "<|channel|>commentary to=functions.shell <|constrain|>json<|message|>{\"input\": "
      "\"a\\n\\\"b\\\"\"}<|call|>"
      "<|start|>assistant<|channel|>commentary to=functions.get<|message|>{\"input\": 1}<|call|>";
  for (const int32_t token : codec.encode(answer, true)) {
    parser->token(token, codec.plain_text(token), deltas);
  }
  parser->finish("", deltas);
  const test::Read read = test::read_deltas(deltas);
  EXPECT_EQ(read,
            (test::Read{
                .reasoning = "", .content = "", .calls = {{"shell", "a\n\"b\""}, {"get", "{\"input\": 1}"}}}))
      << read;
  for (const Delta& delta : deltas) EXPECT_EQ(delta.custom, delta.call == 0) << delta.text;
}

}  // namespace
}  // namespace millrace::chat
