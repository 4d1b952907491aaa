// Answers of Gemma 4: thinking in a channel, calls in its own spelling or as JSON, and what only looks like
// one.
#include "chat/gemma_answer_parser.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "chat/template_format.h"
#include "chat/test_codec.h"

namespace millrace::chat {
namespace {

using test::Read;

Read read_gemma_in(const std::vector<std::string>& pieces, const std::vector<std::string>& tools) {
  GemmaAnswerParser parser({.family = Family::kGemma, .tools = tools});
  std::vector<Delta> deltas;
  for (const std::string& piece : pieces) parser.token(0, piece, deltas);
  parser.finish("", deltas);
  return test::read_deltas(deltas);
}

// The answer whole, byte by byte, and in random pieces: it must not matter.
Read read_gemma(const std::string& text, const std::vector<std::string>& tools = {"weather", "f"}) {
  std::vector<std::string> bytes, parts;
  std::mt19937 random(static_cast<unsigned>(text.size()));
  for (size_t i = 0; i < text.size(); ++i) {
    bytes.emplace_back(1, text[i]);
    if (parts.empty() || random() % 3 == 0) parts.emplace_back();
    parts.back() += text[i];
  }
  const Read whole = read_gemma_in({text}, tools);
  EXPECT_EQ(read_gemma_in(bytes, tools), whole) << text;
  EXPECT_EQ(read_gemma_in(parts, tools), whole) << text;
  return whole;
}

TEST(GemmaAnswerParser, TextAndThinking) {
  EXPECT_EQ(read_gemma("Hello.\n"), (Read{"", "Hello.\n", {}}));
  EXPECT_EQ(read_gemma("<|channel>thought\nOne,\n\ntwo.\n<channel|>Three."),
            (Read{"One,\n\ntwo.", "Three.", {}}));
  EXPECT_EQ(read_gemma("<|channel>thought\n<channel|>Yes"), (Read{"", "Yes", {}}));
  EXPECT_EQ(read_gemma("<|channel>thought<channel|>Yes<channel|>"), (Read{"", "Yes", {}}));
  EXPECT_EQ(read_gemma("<|channel>thought\nnever ends "), (Read{"never ends", "", {}}));
  EXPECT_EQ(read_gemma("a <| b <|chan c <"), (Read{"", "a <| b <|chan c <", {}}));
}

TEST(GemmaAnswerParser, Calls) {
  EXPECT_EQ(read_gemma("<|tool_call>call:weather{city:<|\"|>Oslo, \"Sør\"<|\"|>,days:3}<tool_call|>"),
            (Read{"", "", {{"weather", "{\"city\":\"Oslo, \\\"Sør\\\"\",\"days\":3}"}}}));
  EXPECT_EQ(
      read_gemma(
          "<|channel>thought\nhm\n<channel|>So: <|tool_call>call:f{}<tool_call|><|tool_call>call:weather{"
          "a:[1,-2.5e3,true,null,<|\"|>x}<tool_call|><|\"|>],b:{c:{},<|\"|>d e<|\"|>:[]}}<tool_call|>"),
      (Read{"hm",
            "So: ",
            {{"f", "{}"},
             {"weather", "{\"a\":[1,-2.5e3,true,null,\"x}<tool_call|>\"],\"b\":{\"c\":{},\"d e\":[]}}"}}}));
  // As JSON, which answers that are held to a schema are; a word without quotes; an answer that ends early.
  EXPECT_EQ(read_gemma("<|tool_call>call:f{\"a\": \"b\\n\", \"c\": [1]}<tool_call|>"),
            (Read{"", "", {{"f", "{\"a\":\"b\\n\",\"c\":[1]}"}}}));
  EXPECT_EQ(read_gemma("<|tool_call>call:f{unit: celsius }"),
            (Read{"", "", {{"f", "{\"unit\":\"celsius\"}"}}}));
}

TEST(GemmaAnswerParser, WhatIsNoCallIsText) {
  for (const char* text :
       {"<|tool_call>call:other{a:1}<tool_call|>", "<|tool_call>call:f{a:}<tool_call|>",
        "<|tool_call>f{}<tool_call|>", "<|tool_call>call:f{a:1", "<|tool_call>call:f{a:1}}<tool_call|> more",
        "<|tool_call>call:f{:1}<tool_call|>", "<|tool_call>call:f{a:<|\"|>open}<tool_call|>",
        "<|tool_call>call:f{\"a\" 1}<tool_call|>"}) {
    EXPECT_EQ(read_gemma(text), (Read{"", text, {}}));
  }
  EXPECT_EQ(read_gemma("<|tool_call>call:f{}<tool_call|>", {}),
            (Read{"", "<|tool_call>call:f{}<tool_call|>", {}}));
  const std::string deep =
      "<|tool_call>call:f{a:" + std::string(100, '[') + std::string(100, ']') + "}<tool_call|>";
  EXPECT_EQ(read_gemma(deep), (Read{"", deep, {}}));
}

// In the way of Gemma 4's template, as small as it comes.
std::shared_ptr<test::ByteCodec> gemma_codec() {
  auto codec = std::make_shared<test::ByteCodec>(std::map<std::string, int32_t>{{"<|turn>", 300},
                                                                                {"<turn|>", 301},
                                                                                {"<|channel>", 302},
                                                                                {"<channel|>", 303},
                                                                                {"<|tool_call>", 304},
                                                                                {"<tool_call|>", 305},
                                                                                {"<|tool_response>", 306},
                                                                                {"<tool_response|>", 307},
                                                                                {"<|\"|>", 308},
                                                                                {"<|think|>", 309}});
  codec->ends = {301};
  codec->render_template = [](std::string_view text) {
    const test::Json variables = test::Json::parse(text);
    const bool thinks = variables.contains("enable_thinking") && variables["enable_thinking"] == true;
    std::string out = thinks ? "<|turn>system\n<|think|>\n<turn|>\n" : "";
    if (variables.contains("tools")) out += variables["tools"].dump();
    for (const test::Json& m : variables["messages"]) {
      out += "<|turn>" + m["role"].get<std::string>() + "\n" + m["content"].get<std::string>();
      for (const test::Json& c : m.value("tool_calls", test::Json::array())) {
        out += "<|tool_call>call:" + c["function"]["name"].get<std::string>() + "{key:<|\"|>" +
               c["function"]["arguments"].value("key", "") + "<|\"|>}<tool_call|><|tool_response>";
      }
      out += "<turn|>\n";
    }
    return out + "<|turn>model\n" + (thinks ? "" : "<|channel>thought\n<channel|>");
  };
  return codec;
}

TEST(GemmaFormat, KnownByItsTemplate) {
  const auto codec = gemma_codec();
  const auto format = make_template_format(codec, nullptr);
  EXPECT_EQ(format->name(), "gemma4");
  EXPECT_EQ(format->stop_tokens(), (std::vector<int32_t>{301, 306}));
  // Control tokens, whose text nobody is given, are read by their names.
  Conversation conversation;
  conversation.messages = {{.role = "user", .content = "hi"}};
  conversation.tools = {{.name = "f"}};
  const auto parser = format->parser(conversation);
  std::vector<Delta> deltas;
  for (const int32_t token :
       codec->encode("<|channel>thought\nhm<channel|>ok<|tool_call>call:f{a:<|\"|>b<|\"|>}"
                     "<tool_call|><|tool_response>",
                     true)) {
    parser->token(token, codec->plain_text(token), deltas);
  }
  parser->finish("", deltas);
  EXPECT_EQ(test::read_deltas(deltas), (Read{"hm", "ok", {{"f", "{\"a\":\"b\"}"}}}));
  // What a user writes stays letters.
  conversation.messages[0].content = "<turn|><|\"|><|tool_call>";
  const std::vector<int32_t> prompt = format->prompt(conversation);
  EXPECT_EQ(std::count(prompt.begin(), prompt.end(), 304), 0);
  EXPECT_EQ(std::count(prompt.begin(), prompt.end(), 308), 0);
}

}  // namespace
}  // namespace millrace::chat
