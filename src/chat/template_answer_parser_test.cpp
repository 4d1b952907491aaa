// Answers of the template families: thinking, calls streamed byte for byte, and everything that only looks
// like one.
#include "chat/template_answer_parser.h"

#include <gtest/gtest.h>

#include <random>

#include "chat/test_codec.h"

namespace millrace::chat {
namespace {

using test::Read;

const std::vector<std::string> kTemplateTools = {"get_weather", "f"};

Read read_in(const TemplateAnswer& answer, const std::vector<std::string>& pieces) {
  TemplateAnswerParser parser(answer);
  std::vector<Delta> deltas;
  for (const std::string& piece : pieces) {
    const size_t before = deltas.size();
    parser.token(0, piece, deltas);
    EXPECT_LE(deltas.size(), before + 1 + 4 * piece.size());
  }
  parser.finish("", deltas);
  return test::read_deltas(deltas);
}

// The answer whole, byte by byte, and in random pieces: it must not matter.
Read read(Family family, const std::string& text, bool thinking = false,
          const std::vector<std::string>& tools = kTemplateTools) {
  const TemplateAnswer answer = {.family = family, .tools = tools, .thinking = thinking};
  std::vector<std::string> bytes, parts;
  std::mt19937 random(static_cast<unsigned>(text.size()));
  for (size_t i = 0; i < text.size(); ++i) {
    bytes.emplace_back(1, text[i]);
    if (parts.empty() || random() % 3 == 0) parts.emplace_back();
    parts.back() += text[i];
  }
  const Read whole = read_in(answer, {text});
  EXPECT_EQ(read_in(answer, bytes), whole) << text;
  EXPECT_EQ(read_in(answer, parts), whole) << text;
  return whole;
}

Read content(const std::string& text) { return {.reasoning = "", .content = text, .calls = {}}; }
Read call(const std::string& name, const std::string& arguments) {
  return {.reasoning = "", .content = "", .calls = {{name, arguments}}};
}

TEST(JsonScanner, TellsJsonFromTheRest) {
  using State = JsonScanner::State;
  const auto scan = [](const std::string& text) {
    JsonScanner scanner;
    State state = State::kMore;
    for (const char c : text) state = scanner.push(c);
    return state;
  };
  for (const char* text :
       {"{}", "[]", "\"\"", " {\"a\" : [1, -2.5e+3, 0, true, false, null, \"x\\n\\u00e9\"]} ", "[[[]]]",
        "{\"a\":{\"b\":[{}]},\"c\":1e5}", "true", "null"}) {
    EXPECT_EQ(scan(text), State::kDone) << text;
  }
  for (const char* text : {"{", "[1", "\"a", "{\"a\"", "{\"a\":", "tru", "-", "12", "[1.", "{\"a\\u00"}) {
    EXPECT_EQ(scan(text), State::kMore) << text;
  }
  for (const char* text :
       {"}",   "{a",  "[1,]", "{\"a\":1,}", "{,",  "01", "[1 2", "{\"a\" 1", "[\"\\x", "[\"\\uZ", "[1.e",
        "[--", "[+1", "{} {", "truE",       "[1}", "{]", "\"\n", "[1.2.3",   "[1e5.",  "nul]"}) {
    EXPECT_EQ(scan(text), State::kBad) << text;
  }
}

TEST(TemplateAnswerParser, PlainText) {
  EXPECT_EQ(read(Family::kPlain, "Hello <tool_call> {\"name\": \"f\"}\n"),
            content("Hello <tool_call> {\"name\": \"f\"}\n"));
  EXPECT_EQ(read(Family::kHermes, " Hi.\n ", false, {}), content(" Hi.\n "));
  EXPECT_EQ(read(Family::kHermes, ""), Read());
  EXPECT_EQ(read(Family::kHermes, "1 < 2 and <tool_"), content("1 < 2 and <tool_"));
}

TEST(TemplateAnswerParser, Thinking) {
  const Read both = {.reasoning = "Hm.\n\nWell.", .content = "Yes.\n", .calls = {}};
  EXPECT_EQ(read(Family::kPlain, "<think>\nHm.\n\nWell.\n</think>\n\nYes.\n"), both);
  EXPECT_EQ(read(Family::kPlain, "\nHm.\n\nWell.\n</think>\n\nYes.\n", true), both);
  EXPECT_EQ(read(Family::kHermes, "<think>\n\n</think>\n\nYes.\n"), content("Yes.\n"));
  EXPECT_EQ(read(Family::kPlain, "cut off", true),
            (Read{.reasoning = "cut off", .content = "", .calls = {}}));
  EXPECT_EQ(read(Family::kPlain, "Not <think>now</think>"), content("Not <think>now</think>"));
}

TEST(TemplateAnswerParser, HermesCalls) {
  const std::string one =
      "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, {\"b\": \"}\\\"\"}], \"c\": "
      "2}}\n</tool_call>";
  const std::string arguments = "{\"a\": [1, {\"b\": \"}\\\"\"}], \"c\": 2}";
  EXPECT_EQ(read(Family::kHermes, one), call("f", arguments));
  EXPECT_EQ(
      read(Family::kHermes, "Let me see.\n" + one + "\n" + one + "\nDone."),
      (Read{.reasoning = "", .content = "Let me see.Done.", .calls = {{"f", arguments}, {"f", arguments}}}));
  EXPECT_EQ(read(Family::kHermes, "<think>\nx\n</think>\n\n" + one),
            (Read{.reasoning = "x", .content = "", .calls = {{"f", arguments}}}));
  EXPECT_EQ(read(Family::kHermes, "<think>\nx " + one),
            (Read{.reasoning = "x", .content = "", .calls = {{"f", arguments}}}));
  // Other orders and shapes of the same.
  EXPECT_EQ(read(Family::kHermes, "<tool_call>{\"arguments\": {\"a\":1}, \"name\": \"f\"}</tool_call>"),
            call("f", "{\"a\":1}"));
  EXPECT_EQ(read(Family::kHermes, "<tool_call>{\"name\":\"f\",\"parameters\":{}}</tool_call>"),
            call("f", "{}"));
  EXPECT_EQ(read(Family::kHermes, "<tool_call>{\"name\":\"f\"}</tool_call>"), call("f", "{}"));
  EXPECT_EQ(read(Family::kHermes, "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}"),
            call("f", "{\"a\":1}"));
  EXPECT_EQ(read(Family::kHermes,
                 "<tool_call>{\"id\": 5, \"name\":\"f\",\"arguments\":12 , \"x\":[1,2]}</tool_call>"),
            call("f", "12"));
  EXPECT_EQ(read(Family::kHermes,
                 "<tool_call>[{\"name\":\"f\",\"arguments\":{\"a\":1}}, "
                 "{\"name\":\"g\",\"arguments\":{}}]</tool_call>"),
            (Read{.reasoning = "", .content = "", .calls = {{"f", "{\"a\":1}"}, {"g", "{}"}}}));
  EXPECT_EQ(read(Family::kHermes, one.substr(0, one.size() - 12) + one),
            (Read{.reasoning = "", .content = "", .calls = {{"f", arguments}, {"f", arguments}}}));
}

TEST(TemplateAnswerParser, HermesThatIsNone) {
  for (const char* text :
       {"<tool_call>not json</tool_call>", "<tool_call>\n{\"nam\": 1}\n</tool_call>",
        "<tool_call>[]</tool_call>", "a <tool_call>", "<tool_call>{\"name\": 5}", "<tool_call>{\"name\"",
        "<tool_call>{'name': 'f'}</tool_call>", "x<tool_call>[1, 2]"}) {
    EXPECT_EQ(read(Family::kHermes, text), content(text)) << text;
  }
  EXPECT_EQ(read(Family::kHermes, "<tool_call>x<tool_call>{\"name\":\"f\"}</tool_call>"),
            (Read{.reasoning = "", .content = "<tool_call>x", .calls = {{"f", "{}"}}}));
  // A call that breaks off behind its name cannot be taken back; nothing of it is lost.
  EXPECT_EQ(read(Family::kHermes, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":oops}}</tool_call> x"),
            (Read{.reasoning = "", .content = "oops}}</tool_call> x", .calls = {{"f", "{\"a\":"}}}));
  EXPECT_EQ(read(Family::kHermes, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": 1"),
            call("f", "{\"a\": 1"));
}

TEST(TemplateAnswerParser, ArgumentsComeAsTheyAre) {
  TemplateAnswerParser parser({.family = Family::kHermes, .tools = kTemplateTools});
  std::vector<Delta> deltas;
  const auto push = [&](const std::string& text) {
    deltas.clear();
    parser.token(0, text, deltas);
    return test::read_deltas(deltas);
  };
  EXPECT_EQ(push("<tool_call>\n{\"name\": \"f"), Read());
  EXPECT_EQ(push("\","), call("f", ""));
  deltas.clear();
  parser.token(0, " \"arguments\": {\"city\": \"Par", deltas);
  ASSERT_EQ(deltas.size(), 1u);
  EXPECT_EQ(deltas[0].text, "{\"city\": \"Par");
  deltas.clear();
  parser.token(0, "is\"}}\n</tool_call>", deltas);
  ASSERT_EQ(deltas.size(), 1u);
  EXPECT_EQ(deltas[0].text, "is\"}");
}

TEST(TemplateAnswerParser, Llama3Calls) {
  EXPECT_EQ(read(Family::kLlama3, "{\"name\": \"f\", \"parameters\": {\"a\": \"b\"}}"),
            call("f", "{\"a\": \"b\"}"));
  EXPECT_EQ(
      read(Family::kLlama3, "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}"),
      call("f", "{}"));
  EXPECT_EQ(
      read(Family::kLlama3,
           "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"get_weather\", \"parameters\": {\"x\":1}}"),
      (Read{.reasoning = "", .content = "", .calls = {{"f", "{}"}, {"get_weather", "{\"x\":1}"}}}));
  for (const char* text : {"{\"name\": \"Bob\", \"parameters\": {}}", "{\"a\": 1}", "{not json}", "{",
                           "x {\"name\": \"f\", \"parameters\": {}}", "{\"name\": {\"first\": \"f\"}}"}) {
    EXPECT_EQ(read(Family::kLlama3, text), content(text)) << text;
  }
}

TEST(TemplateAnswerParser, MistralCalls) {
  EXPECT_EQ(read(Family::kMistral,
                 "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": \"abcdefghi\"}]"),
            call("f", "{\"a\": 1}"));
  EXPECT_EQ(read(Family::kMistral,
                 "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": "
                 "{\"b\": []}}]"),
            (Read{.reasoning = "", .content = "", .calls = {{"f", "{}"}, {"g", "{\"b\": []}"}}}));
  const Read two = {.reasoning = "", .content = "Hm.", .calls = {{"f", "{\"a\": 1}"}, {"g", "{}"}}};
  EXPECT_EQ(read(Family::kMistral, "Hm.[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[CALL_ID]x12[ARGS]{}"), two);
  EXPECT_EQ(read(Family::kMistral, "Hm.[TOOL_CALLS]f{\"a\": 1}[TOOL_CALLS]g{}"), two);
  EXPECT_EQ(read(Family::kMistral, "[TOOL_CALLS]some words"), content("[TOOL_CALLS]some words"));
}

TEST(TemplateAnswerParser, ControlTokensStandForTheirNames) {
  TemplateAnswer answer = {
      .family = Family::kMistral, .tools = kTemplateTools, .names = {{9, "[TOOL_CALLS]"}, {10, "[ARGS]"}}};
  TemplateAnswerParser parser(answer);
  std::vector<Delta> deltas;
  parser.token(1, "Hm.", deltas);
  parser.token(9, "", deltas);
  parser.token(1, "f", deltas);
  parser.token(10, "", deltas);
  parser.token(1, "{}", deltas);
  parser.finish("", deltas);
  EXPECT_EQ(test::read_deltas(deltas), (Read{.reasoning = "", .content = "Hm.", .calls = {{"f", "{}"}}}));
  // As text they are not shown: they are none.
  TemplateAnswerParser other(answer);
  deltas.clear();
  other.token(9, "", deltas);
  other.token(1, "!", deltas);
  other.finish("", deltas);
  EXPECT_EQ(test::read_deltas(deltas), content("!"));
}

TEST(TemplateAnswerParser, NothingIsLostOfAnything) {
  const std::vector<std::string> pieces = {"<think>",
                                           "</think>",
                                           "<tool_call>",
                                           "</tool_call>",
                                           "[TOOL_CALLS]",
                                           "[ARGS]",
                                           "{",
                                           "}",
                                           "\"name\"",
                                           ":",
                                           "\"f\"",
                                           ",",
                                           "*",
                                           "*",
                                           "\"",
                                           "arguments",
                                           " ",
                                           "\n",
                                           "[",
                                           "]",
                                           "{\"name\": \"f\", \"arguments\": {",
                                           "<|python_tag|>",
                                           "\\",
                                           "1"};
  std::mt19937 random(3);
  for (int round = 0; round < 1000; ++round) {
    std::string text;
    for (size_t i = random() % 20; i > 0; --i) text += pieces[random() % pieces.size()];
    const Family family = static_cast<Family>(random() % 4);
    const Read got = read(family, text, random() % 4 == 0);
    std::string all = got.reasoning + got.content;
    for (const auto& [name, arguments] : got.calls) all += arguments;
    const auto stars = [](const std::string& s) { return std::count(s.begin(), s.end(), '*'); };
    // Stars in a call's other members are no text; everywhere else they are.
    ASSERT_TRUE(!got.calls.empty() || stars(all) == stars(text)) << text;
  }
}

}  // namespace
}  // namespace millrace::chat
