// JsonWriter against a parser (nlohmann's), byte by byte where the bytes are a promise.
#include "base/json_writer.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "base/utf8.h"

namespace millrace {
namespace {

using Json = nlohmann::ordered_json;

TEST(JsonWriter, PutsCommasWhereTheyBelong) {
  std::string out = "data: ";
  JsonWriter json(out);
  json.begin_object().field("a", 1).key("b").begin_array().end_array();
  json.key("c").begin_object().end_object();
  json.key("d").begin_array().begin_object().field("x", true).end_object().value("y").value(nullptr);
  json.begin_array().value(2u).value(-3).end_array().end_array();
  json.text_or_null("e", "").text_or_null("f", "g").end_object();
  EXPECT_EQ(out, R"(data: {"a":1,"b":[],"c":{},"d":[{"x":true},"y",null,[2,-3]],"e":null,"f":"g"})");
}

TEST(JsonWriter, TakesWhatIsJsonAlready) {
  std::string list;
  for (int i = 0; i < 3; ++i) JsonWriter::continuing(list).begin_object().field("i", i).end_object();
  EXPECT_EQ(list, R"({"i":0},{"i":1},{"i":2})");
  std::string out;
  JsonWriter json(out);
  json.begin_object().raw(R"("id":"1","n":2)").raw("").key("list").begin_array().raw(list).end_array();
  json.key("none").begin_array().raw("").end_array().end_object();
  EXPECT_EQ(out, R"({"id":"1","n":2,"list":[{"i":0},{"i":1},{"i":2}],"none":[]})");
}

TEST(JsonWriter, StringsComeBackAsTheyWent) {
  std::string all;
  for (int c = 0; c < 128; ++c) all.push_back(static_cast<char>(c));
  all += "\xc3\xa9\xf0\x9f\x98\x80";
  EXPECT_EQ(Json::parse(json_string(all)).get<std::string>(), all);
  EXPECT_EQ(json_string("a\"b\\c\n\r\t\x01\x7f"), R"("a\"b\\c\n\r\t\u0001\u007f")");
  std::string out;
  JsonWriter(out).begin_object().field(all, all).end_object();
  EXPECT_EQ(Json::parse(out)[all].get<std::string>(), all);
}

TEST(JsonWriter, AnyBytesAreAString) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> byte(0, 255), length(0, 12);
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (int n = length(random); n > 0; --n) text.push_back(static_cast<char>(byte(random)));
    ASSERT_EQ(Json::parse(json_string(text)).get<std::string>(), valid_utf8(text));
  }
  EXPECT_EQ(json_string("a\xff\"\xe2\x82"), "\"a\xef\xbf\xbd\\\"\xef\xbf\xbd\"");
}

TEST(JsonWriter, NumbersReadBackTheSame) {
  std::string out;
  JsonWriter json(out);
  json.begin_array();
  json.value(std::numeric_limits<int64_t>::min()).value(std::numeric_limits<uint64_t>::max());
  json.value(0.1).value(0.1f).value(-9999.0).value(1e300).value(-0.0).value(2.5e-7);
  json.value(std::numeric_limits<double>::infinity()).value(std::numeric_limits<float>::quiet_NaN());
  json.value(false).value(int8_t{-7}).value(uint8_t{200}).end_array();
  EXPECT_EQ(out,
            "[-9223372036854775808,18446744073709551615,0.1,0.1,-9999,1e+300,-0,2.5e-07,null,null,"
            "false,-7,200]");
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> exponent(-300, 300);
  for (int i = 0; i < 2000; ++i) {
    const double number = std::pow(10.0, exponent(random));
    std::string text;
    JsonWriter(text).value(number);
    ASSERT_EQ(Json::parse(text).get<double>(), number);
  }
}

TEST(JsonWriter, CallsNoAllocatorWhereThereIsRoom) {
  std::string out;
  out.reserve(1000);
  const char* before = out.data();
  JsonWriter(out).begin_object().field("text", "a \"token\"\n").field("n", 17).field("p", -0.25).end_object();
  EXPECT_EQ(out.data(), before);
  EXPECT_EQ(out, R"({"text":"a \"token\"\n","n":17,"p":-0.25})");
}

}  // namespace
}  // namespace millrace
