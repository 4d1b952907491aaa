// Spellings of calls that are learned from a template, and answers in them.
#include "chat/call_shape.h"

#include <gtest/gtest.h>

#include <random>

#include "chat/call_values.h"
#include "chat/template_format.h"
#include "chat/template_traits.h"
#include "chat/test_codec.h"

namespace millrace::chat {
namespace {

using test::Json;

std::string dumped(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

std::string in_tags(const Json& arguments, const std::string& begin, const std::string& middle,
                    const std::string& end) {
  std::string out;
  for (const auto& [key, value] : arguments.items()) out += begin + key + middle + dumped(value) + end;
  return out;
}

std::string in_python(const Json& arguments) {
  std::string out;
  for (const auto& [key, value] : arguments.items()) {
    out += (out.empty() ? "" : ", ") + key + "=" + (value.is_null() ? "None" : value.dump());
  }
  return out;
}

struct Spelling {
  const char* name;
  CallShape::Kind kind;
  std::string open, between, close;
  std::function<std::string(size_t, const std::string&, const Json&)> call;
};

std::vector<Spelling> spellings() {
  using Kind = CallShape::Kind;
  const auto object = [](const std::string& name, const Json& arguments) {
    return Json{{"name", name}, {"arguments", arguments}}.dump();
  };
  return {
      {"functions and parameters", Kind::kTagged, "", "\n", "",
       [](size_t, const std::string& name, const Json& arguments) {
         return "<tool_call>\n<function=" + name + ">\n" +
                in_tags(arguments, "<parameter=", ">\n", "\n</parameter>\n") + "</function>\n</tool_call>";
       }},
      {"keys and values", Kind::kTagged, "", "", "",
       [](size_t, const std::string& name, const Json& arguments) {
         return "<tool_call>" + name +
                in_tags(arguments, "<arg_key>", "</arg_key><arg_value>", "</arg_value>") + "</tool_call>";
       }},
      {"one mark around all", Kind::kTagged, "<x:calls>\n", "", "</x:calls>",
       [](size_t, const std::string& name, const Json& arguments) {
         return "<invoke name=\"" + name + "\">\n" +
                in_tags(arguments, "<parameter name=\"", "\">", "</parameter>\n") + "</invoke>\n";
       }},
      {"types", Kind::kTagged, "<calls>", "", "</calls>",
       [](size_t, const std::string& name, const Json& arguments) {
         std::string out = "<invoke name=\"" + name + "\">";
         for (const auto& [key, value] : arguments.items()) {
           out += "<parameter name=\"" + key + "\" string=\"" + (value.is_string() ? "true" : "false") +
                  "\">" + dumped(value) + "</parameter>";
         }
         return out + "</invoke>";
       }},
      {"numbered", Kind::kNamed, "<|section|>", "", "<|section_end|>",
       [](size_t i, const std::string& name, const Json& arguments) {
         return "<|call|>functions." + name + ":" + std::to_string(i) + "<|arguments|>" + arguments.dump() +
                "<|call_end|>";
       }},
      {"a block of code", Kind::kNamed, "<calls>", "\n", "</calls>",
       [](size_t, const std::string& name, const Json& arguments) {
         return "<call>function<sep>" + name + "\n```json\n" + arguments.dump() + "\n```</call>";
       }},
      {"the name is the key", Kind::kNamed, "<|tools|>[", ", ", "]<|tools_end|>",
       [](size_t, const std::string& name, const Json& arguments) {
         return Json{{name, arguments}}.dump();
       }},
      {"Python", Kind::kPython, "<|calls|>[", ", ", "]<|calls_end|>",
       [](size_t, const std::string& name, const Json& arguments) {
         return name + "(" + in_python(arguments) + ")";
       }},
      {"a list", Kind::kObject, "<TOOLCALL>[", ", ", "]</TOOLCALL>",
       [object](size_t, const std::string& name, const Json& arguments) { return object(name, arguments); }},
      {"lines", Kind::kObject, "<tool_calls>\n", "\n", "\n</tool_calls>",
       [object](size_t, const std::string& name, const Json& arguments) { return object(name, arguments); }},
  };
}

std::string written(const Spelling& spelling, const Json& calls) {
  std::string out = spelling.open;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i > 0) out += spelling.between;
    out += spelling.call(i, calls[i]["function"]["name"], calls[i]["function"]["arguments"]);
  }
  return out + spelling.close;
}

// A template that writes calls so.
test::ByteCodec codec_of(const Spelling& spelling) {
  test::ByteCodec codec({{"<end>", 300}});
  codec.ends = {300};
  codec.render_template = [spelling](std::string_view variables) {
    const Json in = Json::parse(variables);
    std::string out;
    if (in.contains("tools")) out += "Tools: " + in["tools"].dump() + "\n";
    for (const Json& message : in["messages"]) {
      out += "[" + message["role"].get<std::string>() + "]\n" + message.value("content", "");
      if (message.contains("tool_calls")) out += written(spelling, message["tool_calls"]);
      out += "<end>\n";
    }
    return out;
  };
  return codec;
}

const Json kTools = {{"move", {{"to", "string"}, {"by", "integer"}, {"all", "boolean"}, {"path", "array"}}},
                     {"say.it-2", {{"text", "string"}, {"how", "object"}}}};

TemplateAnswer answer_of(const TemplateTraits& traits) {
  TemplateAnswer out = {.family = traits.family, .shape = traits.shape};
  for (const auto& [name, keys] : kTools.items()) {
    out.tools.push_back(name);
    for (const auto& [key, type] : keys.items()) out.strings[name][key] = type == "string";
  }
  return out;
}

// Whole, byte by byte, and in random pieces: it must not matter.
test::Read read(const TemplateAnswer& answer, const std::string& text, unsigned seed) {
  std::mt19937 random(seed);
  std::optional<test::Read> first;
  for (const unsigned most : {1u << 30, 1u, 7u}) {
    TemplateAnswerParser parser(answer);
    std::vector<Delta> deltas;
    for (size_t at = 0; at < text.size();) {
      const size_t length = most == 7 ? 1 + random() % most : most;
      parser.token(0, std::string_view(text).substr(at, length), deltas);
      at += std::min(length, text.size() - at);
    }
    parser.finish("", deltas);
    const test::Read read = test::read_deltas(deltas);
    EXPECT_EQ(read, first.value_or(read)) << text;
    first = read;
  }
  return *first;
}

Json random_call(std::mt19937& random) {
  static const std::vector<std::string> kTexts = {
      "", "Oslo", "41", "two words", "a\nb", " <b> & [1] ", "true?", "x=1", "\\n", "\xc3\xa9\xe2\x82\xac"};
  const auto text = [&] { return kTexts[random() % kTexts.size()]; };
  Json arguments = Json::object();
  const bool move = random() % 2 == 0;
  if (move) {
    if (random() % 4 > 0) arguments["to"] = text();
    if (random() % 2 > 0) arguments["by"] = static_cast<int>(random() % 100) - 50;
    if (random() % 2 > 0) arguments["path"] = {1, 2.5, "x y", {{"k", "v"}}};
  } else {
    arguments["text"] = text();
    if (random() % 2 > 0) arguments["how"] = {{"loud", 3}, {"words", {"a", "b"}}};
  }
  return {{"function", {{"name", move ? "move" : "say.it-2"}, {"arguments", arguments}}}};
}

test::Read as_content(const std::string& text) { return {.reasoning = "", .content = text, .calls = {}}; }
test::Read as_call(const std::string& name, const std::string& arguments) {
  return {.reasoning = "", .content = "", .calls = {{name, arguments}}};
}

TEST(CallShape, IsLearnedAndReadBack) {
  for (const Spelling& spelling : spellings()) {
    SCOPED_TRACE(spelling.name);
    const test::ByteCodec codec = codec_of(spelling);
    const TemplateTraits traits = probe_template(codec);
    ASSERT_EQ(traits.shape.kind, spelling.kind);
    EXPECT_TRUE(traits.native_tools);
    const TemplateAnswer answer = answer_of(traits);
    for (unsigned seed = 1; seed <= 60; ++seed) {
      std::mt19937 random(seed);
      Json calls = Json::array();
      for (size_t n = 1 + random() % 3; n > 0; --n) calls.push_back(random_call(random));
      const std::string before = random() % 2 == 0 ? "" : "I look at <it>.\n";
      const test::Read got = read(answer, before + written(spelling, calls), seed);
      EXPECT_EQ(got.content, before.substr(0, before.find('\n')));
      ASSERT_EQ(got.calls.size(), calls.size()) << written(spelling, calls) << got;
      for (size_t i = 0; i < calls.size(); ++i) {
        EXPECT_EQ(got.calls[i].first, calls[i]["function"]["name"]);
        EXPECT_EQ(Json::parse(got.calls[i].second, nullptr, false), calls[i]["function"]["arguments"])
            << written(spelling, calls);
      }
    }
  }
}

// Every beginning of a call is read without a crash, and nothing that is no call is lost.
TEST(CallShape, WhatIsNoCallIsText) {
  for (const Spelling& spelling : spellings()) {
    SCOPED_TRACE(spelling.name);
    const test::ByteCodec codec = codec_of(spelling);
    const TemplateAnswer answer = answer_of(probe_template(codec));
    const Json calls = {{{"function", {{"name", "move"}, {"arguments", {{"to", "Oslo"}, {"by", 3}}}}}}};
    const std::string whole = written(spelling, calls);
    for (size_t cut = 0; cut < whole.size(); ++cut) {
      const std::string part = whole.substr(0, cut);
      const test::Read got = read(answer, part, 1);
      EXPECT_LE(got.calls.size(), 1u);
      if (got.calls.empty()) {
        EXPECT_EQ(trimmed(got.content), trimmed(part)) << cut;
      }
    }
    const std::string opener = answer.shape.openers()[0].mark;
    for (const std::string& text :
         {opener + " is how calls begin.", "1 < 2 " + opener, opener + opener + "?"}) {
      const test::Read got = read(answer, text, 2);
      EXPECT_EQ(got, as_content(text)) << got;
    }
  }
}

// Models leave marks out, or write JSON where arguments are held to a schema.
TEST(CallShape, TakesWhatModelsWrite) {
  const TemplateAnswer tagged = answer_of(probe_template(codec_of(spellings()[0])));
  const test::Read expected = as_call("move", R"({"to": "Oslo", "by": 3})");
  EXPECT_EQ(
      read(tagged,
           "<function=move>\n<parameter=to>\nOslo\n</parameter>\n<parameter=by>3</parameter></function>", 1),
      expected);
  EXPECT_EQ(read(tagged,
                 "<tool_call><function=move><parameter=to>Oslo</parameter><parameter=by>\n3\n</parameter>\n"
                 "</function></tool_call>\n",
                 1),
            expected);
  EXPECT_EQ(read(tagged,
                 "<tool_call>\n<function=move>\n{\"to\": \"Oslo\", \"by\": 3}\n</function>\n</tool_call>", 1),
            expected);
  EXPECT_EQ(read(tagged, "<tool_call>\n<function=move>\n</function>\n</tool_call>", 1),
            as_call("move", "{}"));
  const TemplateAnswer python = answer_of(probe_template(codec_of(spellings()[7])));
  EXPECT_EQ(read(python, "<|calls|>[move({\"to\": \"Oslo\"})]<|calls_end|>", 1),
            as_call("move", R"({"to": "Oslo"})"));
  EXPECT_EQ(read(python, "<|calls|>[move(to=Oslo)]<|calls_end|>", 1).calls.size(), 0u);
}

// An answer that does not come back as what it was is not taken for the template's spelling.
TEST(CallShape, OfObjectsWithKeysOfTheirOwnNothingIsLearned) {
  const Spelling spelling = {
      "keys",
      CallShape::Kind::kNone,
      "<actions>[",
      ", ",
      "]</actions>",
      [](size_t i, const std::string& name, const Json& arguments) {
        return Json{{"id", std::to_string(i)}, {"tool", name}, {"parameters", arguments}}.dump();
      }};
  const TemplateTraits traits = probe_template(codec_of(spelling));
  EXPECT_FALSE(traits.native_tools);
  EXPECT_TRUE(traits.told_otherwise);
  EXPECT_EQ(traits.shape.kind, CallShape::Kind::kNone);
  const auto note = [](test::ByteCodec codec) {
    return std::string(
        make_template_format(std::make_shared<test::ByteCodec>(std::move(codec)), nullptr)->note());
  };
  EXPECT_NE(note(codec_of(spelling)), "");
  EXPECT_EQ(note(codec_of(spellings()[0])), "");
}

TEST(CallValues, AreJson) {
  for (const auto& [text, expected] :
       std::vector<std::pair<std::string, std::string>>{{"41", "41"},
                                                        {" [1, 2] ", "[1, 2]"},
                                                        {"true", "true"},
                                                        {"True", "true"},
                                                        {"None", "null"},
                                                        {"{'a': [1, 'x']}", R"({"a":[1,"x"]})"},
                                                        {"free text", "\"free text\""},
                                                        {"\"q\"", R"("\"q\"")"},
                                                        {"", "\"\""},
                                                        {"[1, 2", "\"[1, 2\""}}) {
    EXPECT_EQ(tagged_value(text, std::nullopt), expected);
  }
  EXPECT_EQ(tagged_value("41", true), "\"41\"");
  EXPECT_EQ(tagged_value("\"q\"", false), "\"q\"");
  EXPECT_EQ(tagged_value("\xff", true), "\"\xef\xbf\xbd\"");
  EXPECT_EQ(python_arguments("a='it\\'s', b=\"\\u00e9\\x41\\n\", c=(1, -2.5e3,), d={}, e=None"),
            R"({"a":"it's","b":"éA\n","c":[1,-2500.0],"d":{},"e":null})");
  EXPECT_EQ(python_arguments(""), "{}");
  for (const char* bad : {"a", "a=", "a=b", "a=1 b=2", "'a'", "=1", "a='x", "a=[1", "a=1,,b=2"}) {
    EXPECT_EQ(python_arguments(bad), std::nullopt) << bad;
  }
}

}  // namespace
}  // namespace millrace::chat
