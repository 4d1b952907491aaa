// The parts of the server that need no socket and no model. tests/server_test.py has the rest.
#include <gtest/gtest.h>

#include <functional>

#include "api_error.h"
#include "assets.h"
#include "conversation.h"
#include "ids.h"
#include "json_fields.h"
#include "response_store.h"
#include "timeline.h"

namespace millrace::server {
namespace {

ApiError refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const ApiError& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was refused";
  return {0, ""};
}

TEST(JsonFields, RefusesWhatIsNoJson) {
  const std::string deep = std::string(65, '[') + std::string(65, ']');
  for (const std::string& bad :
       {std::string(), std::string("{"), std::string("{\"a\": 1e999}"), std::string("\"\xff\""),
        std::string("\"\\ud800\""), deep, std::string(1000000, '[')}) {
    EXPECT_EQ(refusal([&] { parse_json(bad); }).status, 400) << bad.substr(0, 20);
  }
  EXPECT_NO_THROW(parse_json(std::string(64, '[') + std::string(64, ']')));
  EXPECT_NO_THROW(parse_json("\"" + std::string(100, '[') + "\\\"" + std::string(100, '{') + "\""));
  EXPECT_EQ(refusal([] { parse_object("[1]"); }).code, "invalid_json");
}

TEST(Fields, NamesTheFieldAndWhatIsWrong) {
  const Json body = parse_object(
      R"({"n": 3, "x": 1.5, "s": "t", "b": true, "none": null, "big": 18446744073709551615, "o": {"i": "no"}, "w": 4.0})");
  const Fields fields(body);
  EXPECT_EQ(fields.integer("n", 1, 5), 3);
  EXPECT_EQ(fields.integer("w", 1, 5), 4);
  EXPECT_EQ(fields.integer("absent", 1, 5), std::nullopt);
  EXPECT_EQ(fields.integer("none", 1, 5), std::nullopt);
  EXPECT_EQ(fields.number("x", 0, 2), 1.5);
  EXPECT_EQ(refusal([&] { fields.integer("n", 4, 5); }).param, "n");
  EXPECT_EQ(refusal([&] { fields.integer("x", 0, 5); }).param, "x");
  EXPECT_EQ(refusal([&] { fields.integer("big", 0, INT64_MAX); }).param, "big");
  EXPECT_EQ(refusal([&] { fields.boolean("n"); }).code, "invalid_type");
  EXPECT_EQ(refusal([&] { fields.choice("s", {"a", "b"}); }).param, "s");
  const ApiError inner = refusal([&] { fields.object("o")->integer("i", 0, 5); });
  EXPECT_EQ(inner.param, "o.i");
  EXPECT_EQ(inner.message, "'o.i': found a string, expected an integer");
  const Json error = Json::parse(error_body(inner));
  EXPECT_EQ(error["error"]["type"], "invalid_request_error");
  EXPECT_EQ(error["error"]["param"], "o.i");
}

TEST(ResponseStore, ForgetsTheOldestAndKeepsKeysApart) {
  ResponseStore store(2, 1 << 20);
  for (const char* id : {"a", "b", "c"}) store.put({.id = id, .owner = "ada", .body = "{}"});
  EXPECT_EQ(store.size(), 2u);
  EXPECT_FALSE(store.find("a", "ada"));
  EXPECT_TRUE(store.find("c", "ada"));
  EXPECT_FALSE(store.find("c", "bob"));
  EXPECT_FALSE(store.erase("c", "bob"));
  EXPECT_TRUE(store.erase("c", "ada"));
  store.put({.id = "b", .owner = "ada", .body = "new"});
  EXPECT_EQ(store.find("b", "ada")->body, "new");
  ResponseStore small(100, 10000);
  for (int i = 0; i < 50; ++i)
    small.put({.id = std::to_string(i), .owner = "", .body = std::string(2000, 'x')});
  EXPECT_LE(small.size(), 3u);
  EXPECT_TRUE(small.find("49", ""));
}

TEST(Timeline, IsBounded) {
  Timeline timeline(true);
  for (size_t i = 0; i < Timeline::kRequests + 10; ++i) timeline.add({.id = std::to_string(i)});
  const Json list = timeline.requests_json();
  EXPECT_EQ(list.size(), Timeline::kRequests);
  EXPECT_EQ(list[0]["id"],
            std::to_string(Timeline::kRequests + 10));  // counted, whatever the answer's own id is
  timeline.add({.id = "resp_0123456789abcdef0123456789abcdef"});
  EXPECT_EQ(timeline.requests_json()[0]["id"], "resp_" + std::to_string(Timeline::kRequests + 11));
  EngineStats stats;
  for (size_t i = 0; i < Timeline::kSamples + 5; ++i) {
    stats.first_token.counts[10] += i % 2;
    timeline.sample(stats, 3);
  }
  const Json history = timeline.history_json();
  EXPECT_EQ(history["running"].size(), Timeline::kSamples);
  EXPECT_TRUE(history["first_token_p50_s"][0].is_null() != history["first_token_p50_s"][1].is_null());
  EXPECT_TRUE(Timeline(false).add({.id = "x"}) != nullptr);
}

TEST(Timeline, MissedSecondsAreGaps) {
  Timeline timeline(true);
  EngineStats stats;
  stats.blocks_cached = 7;
  for (const double second : {0.0, 1.1, 1.9, 6.0}) timeline.sample(stats, 3, 1000 + second);
  const Json history = timeline.history_json();
  EXPECT_EQ(history["streams"].dump(), "[3,3,3,null,null,null,3]");
  EXPECT_EQ(history["blocks_cached"].dump(), "[7,7,7,null,null,null,7]");
  EXPECT_EQ(history["end"], 1006);
  timeline.sample(stats, 4, 1e6);  // a night
  EXPECT_EQ(timeline.history_json()["streams"].size(), Timeline::kSamples);
}

TEST(Conversation, ReadsPartsToolsAndCalls) {
  const Json body = parse_object(R"({"messages": [
      {"role": "developer", "content": "d"},
      {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
      {"role": "assistant", "content": null, "reasoning_content": "r",
       "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]},
      {"role": "tool", "tool_call_id": "c1", "content": "4"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": true}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}}, "reasoning_effort": "minimal"})");
  const chat::Conversation c = read_conversation(Fields(body));
  ASSERT_EQ(c.messages.size(), 4u);
  EXPECT_EQ(c.messages[1].content, "ab");
  EXPECT_EQ(c.messages[2].reasoning, "r");
  EXPECT_EQ(c.messages[2].tool_calls.at(0).arguments, "{\"x\":1}");
  EXPECT_EQ(c.messages[3].tool_call_id, "c1");
  EXPECT_TRUE(c.tools.at(0).strict);
  EXPECT_EQ(c.named_tool, "f");
  EXPECT_EQ(c.reasoning_effort, "low");
  const Json wrong =
      parse_object(R"({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"})");
  EXPECT_EQ(refusal([&] { read_conversation(Fields(wrong)); }).param, "tool_choice");
}

TEST(Http, TargetsAndHeaders) {
  HttpRequest request;
  request.target = "/v1/a%20b%2?x=1+2&flag&y=%41#z";
  HttpRequest::split_target(request);
  EXPECT_EQ(request.path, "/v1/a b%2");
  EXPECT_EQ(request.query_value("x"), "1 2");
  EXPECT_EQ(request.query_value("y"), "A");
  EXPECT_EQ(request.query_value("flag"), "");
  request.headers = {{"X-Request-Id", "abc"},
                     {"Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}};
  EXPECT_EQ(request.header("x-request-id"), "abc");
  EXPECT_EQ(describe_client(request, "::1").request_id, "abc");
  EXPECT_FALSE(describe_client(request, "::1").traceparent.empty());
  request.headers = {{"x-request-id", "a b"}, {"traceparent", "00-xyz"}};
  EXPECT_TRUE(describe_client(request, "").request_id.starts_with("req-"));
  EXPECT_TRUE(describe_client(request, "").traceparent.empty());
}

TEST(Assets, TheDescriptionIsThereAndIsJson) {
  const Asset* asset = find_asset("/openapi.json");
  ASSERT_NE(asset, nullptr);
  EXPECT_EQ(asset->content_type, "application/json");
  const HttpResponse response = asset_response(*asset, {});
  const Json document = parse_object(response.body);
  EXPECT_TRUE(document["paths"].contains("/v1/chat/completions"));
  HttpRequest again;
  again.headers = {{"If-None-Match", std::string(asset->etag)}};
  EXPECT_EQ(asset_response(*asset, again).status, 304);
  EXPECT_NE(find_asset("/"), nullptr);
  EXPECT_EQ(find_asset("/../CMakeLists.txt"), nullptr);
}

}  // namespace
}  // namespace millrace::server
