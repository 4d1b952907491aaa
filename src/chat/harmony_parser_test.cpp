// Answers as openai-harmony reads them (tests/golden/harmony/parse.json), answers that leave the form, and
// random tokens: every one is read, and no text is lost.
#include "chat/harmony_parser.h"

#include <gtest/gtest.h>

#include <random>

#include "base/utf8.h"
#include "chat/test_codec.h"

namespace millrace::chat {
namespace {

using test::Json;
using test::Read;

const std::vector<std::string> kHarmonyTools = {"get_weather", "get_location"};

class HarmonyParserTest : public testing::Test {
 protected:
  Read read(const std::vector<int32_t>& tokens, const std::vector<std::string>& tools = kHarmonyTools) {
    HarmonyParser parser(find_harmony_tokens(codec_), tools);
    std::vector<Delta> deltas;
    for (const int32_t token : tokens) parser.token(token, codec_.plain_text(token), deltas);
    parser.finish("", deltas);
    return test::read_deltas(deltas);
  }
  Read read(const std::string& text, const std::vector<std::string>& tools = kHarmonyTools) {
    return read(codec_.encode(text, true), tools);
  }
  static Read content(const std::string& text) { return {.reasoning = "", .content = text, .calls = {}}; }
  static Read reasoning(const std::string& text) { return {.reasoning = text, .content = "", .calls = {}}; }
  static Read call(const std::string& name, const std::string& arguments) {
    return {.reasoning = "", .content = "", .calls = {{name, arguments}}};
  }

  test::ByteCodec codec_ = test::harmony_codec();
};

// What we make of a message that openai-harmony read.
void add_message(const Json& message, Read& read) {
  const std::string recipient = message["recipient"], text = message["text"];
  if (recipient.compare(0, 10, "functions.") == 0) {
    read.calls.emplace_back(recipient.substr(10), text);
    return;
  }
  std::string& to = message["channel"] == "analysis" ? read.reasoning : read.content;
  to += (to.empty() || text.empty() ? "" : "\n\n") + text;
}

TEST_F(HarmonyParserTest, AsOpenAiHarmony) {
  const Json golden = test::read_json("tests/golden/harmony/parse.json");
  ASSERT_GE(golden["cases"].size(), 18u);
  for (const Json& c : golden["cases"]) {
    std::vector<int32_t> tokens;
    for (const Json& piece : c["pieces"]) {
      if (piece.is_string()) {
        const auto ids = codec_.encode(piece.get<std::string>(), false);
        tokens.insert(tokens.end(), ids.begin(), ids.end());
        continue;
      }
      for (const auto& [name, id] : golden["special"].items()) {
        if (id == piece) tokens.push_back(codec_.id("<|" + name + "|>"));
      }
    }
    Read expected;
    for (const Json& message : c["messages"]) add_message(message, expected);
    EXPECT_EQ(read(tokens), expected) << c["name"];
  }
}

TEST_F(HarmonyParserTest, WithoutHeader) {
  EXPECT_EQ(read("The answer is 4.<|return|>"), content("The answer is 4."));
  EXPECT_EQ(read("<|message|>Hello<|return|>"), content("Hello"));
  EXPECT_EQ(read("final answer: 4"), content("final answer: 4"));
  EXPECT_EQ(read("analysis of it<|end|>"), content("analysis of it"));
  EXPECT_EQ(read("to be or not"), content("to be or not"));
  EXPECT_EQ(read("functions.x is a name"), content("functions.x is a name"));
  EXPECT_EQ(read(" Hello"), content(" Hello"));
  EXPECT_EQ(read("<|return|>"), Read());
  EXPECT_EQ(read(""), Read());
}

TEST_F(HarmonyParserTest, WithoutMessageToken) {
  EXPECT_EQ(read("<|channel|>final Hello you<|return|>"), content("Hello you"));
  EXPECT_EQ(read("<|channel|>analysis hm<|end|><|start|>assistant<|channel|>final<|message|>x"),
            (Read{.reasoning = "hm", .content = "x", .calls = {}}));
  EXPECT_EQ(read("<|channel|>Sure, here<|return|>"), content("Sure, here"));
  EXPECT_EQ(read("<|channel|>Sure I can<|return|>"), content("Sure I can"));
  EXPECT_EQ(read("<|channel|>final json is a format"), content("json is a format"));
  EXPECT_EQ(read("<|channel|>commentary to=functions.get_weather <|constrain|>json{\"a\":1}<|call|>"),
            call("get_weather", "{\"a\":1}"));
  EXPECT_EQ(read("<|channel|>commentary to=functions.get_weather{\"a\":1}<|call|>"),
            call("get_weather", "{\"a\":1}"));
  EXPECT_EQ(read("<|start|>Hello<|end|>"), content("Hello"));
}

TEST_F(HarmonyParserTest, HeadersInOddOrder) {
  const Read expected = call("get_weather", "{\"a\":1}");
  for (const char* header :
       {"<|channel|>commentary<|constrain|>json to=functions.get_weather",
        "<|constrain|>json to=functions.get_weather",
        " to=functions.get_weather<|constrain|>json<|channel|>commentary",
        "<|channel|>commentary functions.get_weather", "<|channel|>commentary to=get_weather json",
        "<|channel|>final to=functions.get_weather",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather",
        "<|channel|>analysis<|channel|>commentary to=functions.get_weather",
        "<|channel|>commentary  to=functions.get_weather \n", "commentary to=functions.get_weather",
        "<|channel|><|channel|>commentary to=tools.get_weather <|constrain|><|constrain|>json"}) {
    EXPECT_EQ(read(std::string(header) + "<|message|>{\"a\":1}<|call|>"), expected) << header;
  }
}

TEST_F(HarmonyParserTest, UnknownChannelsAndRoles) {
  EXPECT_EQ(read("<|channel|>thoughts<|message|>x<|end|>"), content("x"));
  EXPECT_EQ(read("<|channel|>analyse<|message|>x<|end|>"), reasoning("x"));
  EXPECT_EQ(read("<|channel|><|message|>x<|return|>"), content("x"));
  EXPECT_EQ(read("<|channel|>final<|message|>x<|end|><|start|>user<|message|>y<|end|>"),
            (Read{.reasoning = "y", .content = "x", .calls = {}}));
  EXPECT_EQ(read("<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>y<|end|>"),
            reasoning("y"));
}

TEST_F(HarmonyParserTest, MessagesThatRunIntoEachOther) {
  EXPECT_EQ(read("<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>"),
            (Read{.reasoning = "a", .content = "b", .calls = {}}));
  EXPECT_EQ(read("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b"),
            (Read{.reasoning = "a", .content = "b", .calls = {}}));
  EXPECT_EQ(read("<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b"),
            (Read{.reasoning = "a", .content = "b", .calls = {}}));
  EXPECT_EQ(read("<|channel|>analysis<|message|>a<|end|>b and c"),
            (Read{.reasoning = "a", .content = "b and c", .calls = {}}));
  EXPECT_EQ(read("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|reserved|>d<|return|>"),
            content("abcd"));
  EXPECT_EQ(read("<|channel|>final<|message|>a<|end|>\n<|start|>assistant<|channel|>final<|message|>b"),
            content("a\n\nb"));
}

TEST_F(HarmonyParserTest, CallsNeedTools) {
  const std::string answer =
      "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\":1}<|call|>";
  EXPECT_EQ(read(answer), call("f", "{\"a\":1}"));
  EXPECT_EQ(read(answer, {}), content("{\"a\":1}"));
  EXPECT_EQ(read("<|channel|>analysis to=python code<|message|>1<|call|>"), reasoning("1"));
  EXPECT_EQ(read("<|channel|>commentary to=browser.open<|message|>{}<|call|>"), content("{}"));
  EXPECT_EQ(read("<|channel|>commentary to=functions.f<|message|><|call|>"), call("f", "{}"));
}

TEST_F(HarmonyParserTest, SeveralCalls) {
  const std::string one =
      "<|channel|>commentary to=functions.f<|message|>{\"a\":1}<|call|><|start|>assistant";
  EXPECT_EQ(read(one + one),
            (Read{.reasoning = "", .content = "", .calls = {{"f", "{\"a\":1}"}, {"f", "{\"a\":1}"}}}));
}

TEST_F(HarmonyParserTest, TextComesAsSoonAsItIsSure) {
  HarmonyParser parser(find_harmony_tokens(codec_), kHarmonyTools);
  std::vector<Delta> deltas;
  size_t expected = 0;
  for (const int32_t token : codec_.encode("<|channel|>final<|message|>", true)) {
    parser.token(token, codec_.plain_text(token), deltas);
  }
  EXPECT_EQ(deltas.size(), 0u);
  for (const char c : std::string("text")) {
    parser.token(c, std::string(1, c), deltas);
    EXPECT_EQ(deltas.size(), ++expected);
  }
  // Text that was held back comes with the control token behind it and belongs before it.
  parser.token(codec_.id("<|end|>"), "!", deltas);
  EXPECT_EQ(test::read_deltas(deltas), content("text!"));
}

// Random tokens out of control tokens, header words and letters that no header has. Every such letter comes
// out once and in order of its kind, whatever stands around it; and however the text was cut.
TEST_F(HarmonyParserTest, NothingIsLostOfAnything) {
  const std::vector<std::string> pieces = {"<|start|>",
                                           "<|end|>",
                                           "<|message|>",
                                           "<|channel|>",
                                           "<|constrain|>",
                                           "<|return|>",
                                           "<|call|>",
                                           "assistant",
                                           "analysis",
                                           "commentary",
                                           "final",
                                           " to=",
                                           "functions.",
                                           "get_weather",
                                           " ",
                                           "json",
                                           "user",
                                           "\n",
                                           "{",
                                           "}",
                                           "<|reserved|>",
                                           "*",
                                           "*",
                                           "*",
                                           "*",
                                           "tool",
                                           "to=functions.get_location"};
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::vector<int32_t> tokens;
    size_t letters = 0;
    for (size_t i = random() % 24; i > 0; --i) {
      const std::string& piece = pieces[random() % pieces.size()];
      letters += piece == "*" ? 1 : 0;
      const auto ids = codec_.encode(piece, true);
      tokens.insert(tokens.end(), ids.begin(), ids.end());
    }
    const Read got = read(tokens);
    std::string all = got.reasoning + got.content;
    for (const auto& [name, arguments] : got.calls) all += arguments;
    ASSERT_EQ(static_cast<size_t>(std::count(all.begin(), all.end(), '*')), letters) << round << " " << got;

    // The same text in longer pieces.
    HarmonyParser parser(find_harmony_tokens(codec_), kHarmonyTools);
    std::vector<Delta> deltas;
    std::string held;
    for (const int32_t token : tokens) {
      if (!codec_.is_special(token)) {
        held += codec_.token_text(token);
        if (random() % 2 == 0) continue;
      }
      parser.token(codec_.is_special(token) ? token : 0, held, deltas);
      held.clear();
    }
    parser.finish(held, deltas);
    ASSERT_EQ(test::read_deltas(deltas), got) << round;
  }
}

// Each delta becomes an event of its own: none may end within a character that came whole.
TEST_F(HarmonyParserTest, EveryDeltaIsWholeCharacters) {
  const std::vector<std::string> pieces = {
      "<|start|>", "<|end|>",  "<|message|>",  "<|channel|>", "<|constrain|>", "analysis", "final", " to=",
      "fun",       "\xc3\xa9", "\xef\xbf\xbd", "json",        "get_weather",   " ",        "a"};
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    HarmonyParser parser(find_harmony_tokens(codec_), kHarmonyTools);
    std::vector<Delta> deltas;
    for (size_t i = random() % 16; i > 0; --i) {
      const std::string& piece = pieces[random() % pieces.size()];
      const int32_t token = codec_.find_special(piece);
      parser.token(token < 0 ? 0 : token, token < 0 ? piece : "", deltas);
    }
    parser.finish("", deltas);
    for (const Delta& delta : deltas) {
      ASSERT_EQ(valid_utf8(delta.text), delta.text) << round;
      ASSERT_EQ(valid_utf8(delta.name), delta.name) << round;
    }
  }
}

TEST_F(HarmonyParserTest, CutAnywhere) {
  const std::string answer =
      "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
      "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
      "<|constrain|>json<|message|>{\"a\":1}"
      "<|call|>";
  const std::vector<int32_t> tokens = codec_.encode(answer, true);
  const Read whole = read(tokens);
  for (size_t cut = 0; cut <= tokens.size(); ++cut) {
    const Read part = read(std::vector<int32_t>(tokens.begin(), tokens.begin() + static_cast<long>(cut)));
    EXPECT_EQ(whole.reasoning.compare(0, part.reasoning.size(), part.reasoning), 0) << cut;
    EXPECT_EQ(whole.content.compare(0, part.content.size(), part.content), 0) << cut << part;
  }
}

}  // namespace
}  // namespace millrace::chat
