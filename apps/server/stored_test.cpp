// What is kept of responses and conversations, and what is left out of prompts, without a socket or a model.
#include <gtest/gtest.h>

#include <thread>

#include "anthropic_error.h"
#include "api_error.h"
#include "conversation_store.h"
#include "item_page.h"
#include "json_fields.h"
#include "response_log.h"
#include "response_replay.h"
#include "truncation.h"

namespace millrace::server {
namespace {

StoredConversation conversation(const std::string& id, const std::string& owner, size_t bytes = 0) {
  StoredConversation out;
  out.id = id;
  out.owner = owner;
  if (bytes > 0) out.items.push_back({.id = "i", .json = std::string(bytes, 'x')});
  return out;
}

TEST(ConversationStore, BelongsToItsOwnerAndForgetsTheLongestUntouched) {
  ConversationStore store(3, 1 << 20);
  for (const char* id : {"a", "b", "c"}) store.put(conversation(id, "ada"));
  EXPECT_TRUE(store.find("a", "ada"));
  EXPECT_FALSE(store.find("a", "bob"));
  EXPECT_FALSE(store.erase("a", "bob"));
  EXPECT_FALSE(store.change("a", "bob", [](StoredConversation&) { FAIL(); }));
  EXPECT_TRUE(store.change("a", "ada", [](StoredConversation& c) { c.metadata = "{}"; }));
  store.put(conversation("d", "ada"));
  EXPECT_TRUE(store.find("a", "ada"));
  EXPECT_FALSE(store.find("b", "ada"));
  EXPECT_EQ(store.size(), 3u);
  EXPECT_THROW(store.change("a", "ada",
                            [](StoredConversation& c) {
                              c.metadata = "changed";
                              throw ApiError(400, "no");
                            }),
               ApiError);
  EXPECT_EQ(store.find("a", "ada")->metadata, "{}");
}

TEST(ConversationStore, IsBoundedInBytes) {
  ConversationStore store(1000, 10000);
  for (int i = 0; i < 100; ++i) store.put(conversation(std::to_string(i), "", 1000));
  EXPECT_LT(store.size(), 10u);
  EXPECT_TRUE(store.find("99", ""));
  store.change("99", "",
               [](StoredConversation& c) { c.items.push_back({.id = "j", .json = std::string(9000, 'y')}); });
  EXPECT_EQ(store.size(), 1u);
}

TEST(ItemPage, ListsAsOpenAiDoes) {
  const std::vector<ListedItem> items = {{.id = "1", .json = "{\"id\":\"1\"}"},
                                         {.id = "2", .json = "{\"id\":\"2\"}"},
                                         {.id = "3", .json = "{\"id\":\"3\"}"}};
  const auto page = [&](const std::string& query) {
    HttpRequest request;
    request.query = query;
    const Json list = Json::parse(item_page(items, request));
    std::string ids = list["has_more"].get<bool>() ? "+" : "";
    for (const Json& item : list["data"]) ids += item["id"].get<std::string>();
    return ids;
  };
  EXPECT_EQ(page(""), "321");
  EXPECT_EQ(page("order=asc"), "123");
  EXPECT_EQ(page("order=asc&limit=2"), "+12");
  EXPECT_EQ(page("order=asc&limit=2&after=2"), "3");
  EXPECT_EQ(page("after=1"), "");
  for (const char* bad : {"limit=0", "limit=101", "limit=x", "order=up", "after=9"})
    EXPECT_THROW(page(bad), ApiError);
}

TEST(ResponseLog, IsReadWhileItIsWritten) {
  ResponseLog log;
  size_t next = 0;
  std::string got;
  int told = 0;
  const uint64_t follower = log.follow([&] { ++told; });
  EXPECT_EQ(told, 1);
  log.append("a");
  log.append("b");
  EXPECT_EQ(told, 3);
  EXPECT_FALSE(log.read(next, got, 1));
  EXPECT_EQ(got, "a");
  EXPECT_FALSE(log.read(next, got, 100));
  EXPECT_EQ(got, "ab");
  log.unfollow(follower);
  log.append("c");
  log.end();
  EXPECT_EQ(told, 3);
  EXPECT_TRUE(log.read(next, got, 100));
  EXPECT_EQ(got, "abc");
  size_t late = 7;
  EXPECT_TRUE(log.read(late, got, 100));
  EXPECT_EQ(got, "abc");
}

// A token for each letter of each message.
class LetterFormat final : public chat::Format {
 public:
  std::string_view name() const override { return "letters"; }
  using Format::prompt;
  std::vector<int32_t> prompt(const chat::Conversation& conversation, size_t /*max_tokens*/) const override {
    std::vector<int32_t> tokens;
    for (const chat::Message& message : conversation.messages) {
      for (const char c : message.content) tokens.push_back(c);
    }
    return tokens;
  }
  std::unique_ptr<chat::AnswerParser> parser(const chat::Conversation&) const override { return nullptr; }
  std::vector<int32_t> stop_tokens() const override { return {}; }
  std::shared_ptr<const TokenConstraint> constraint(const chat::Conversation&,
                                                    std::shared_ptr<const grammar::Grammar>) const override {
    return nullptr;
  }
};

std::string cut(std::vector<chat::Message> messages, int32_t context, int32_t max_tokens) {
  const LetterFormat format;
  chat::Conversation conversation;
  conversation.messages = std::move(messages);
  // By a bound of half the letters first, which changes nothing of what is left in the end.
  leave_out_by_bound(
      conversation, [](const chat::Message& message) { return message.content.size() / 2; }, context,
      max_tokens);
  std::vector<int32_t> tokens = format.prompt(conversation);
  truncate_to_fit(format, conversation, tokens, context, max_tokens);
  return {tokens.begin(), tokens.end()};
}

TEST(Truncation, LeavesOutTheOldestTurns) {
  const std::vector<chat::Message> messages = {
      {.role = "system", .content = "SS"},    {.role = "user", .content = "aa"},
      {.role = "assistant", .content = "AA"}, {.role = "developer", .content = "DD"},
      {.role = "user", .content = "bb"},      {.role = "assistant", .content = "BB"},
      {.role = "user", .content = "cc"},      {.role = "tool", .content = "11"},
      {.role = "tool", .content = "22"},      {.role = "assistant", .content = "CC"},
      {.role = "tool", .content = "33"}};
  const std::string all = "SSaaAADDbbBBcc1122CC33";
  EXPECT_EQ(cut(messages, 100, 4), all);
  EXPECT_EQ(cut(messages, 24, 2), all);
  EXPECT_EQ(cut(messages, 23, 2), "SSDDbbBBcc1122CC33");
  EXPECT_EQ(cut(messages, 19, 2), "SSDDcc1122CC33");
  EXPECT_EQ(cut(messages, 15, 2), "SSDDccCC33");
  EXPECT_EQ(cut(messages, 4, 2), "SSDDccCC33");  // too long still, and all that must stay
  EXPECT_EQ(cut({{.role = "user", .content = "aaaa"}}, 4, 2), "aaaa");
  EXPECT_EQ(cut({{.role = "user", .content = "aaaa"},
                 {.role = "assistant", .content = "b"},
                 {.role = "user", .content = "c"}},
                4, 1),
            "c");
}

TEST(Truncation, LeavesOutByABoundWhatCannotFit) {
  chat::Conversation conversation;
  for (int i = 0; i < 1000; ++i) {
    conversation.messages.push_back({.role = "user", .content = "question"});
    conversation.messages.push_back({.role = "assistant", .content = "answer"});
  }
  conversation.messages.push_back({.role = "user", .content = "last"});
  leave_out_by_bound(
      conversation, [](const chat::Message&) { return size_t{1}; }, 16, 2);
  EXPECT_EQ(conversation.messages.size(), 13u);  // six turns of two and the last question, of 14
  EXPECT_EQ(conversation.messages.back().content, "last");
}

TEST(Replay, NumbersTheEventsOfAWholeResponse) {
  const Json response = Json::parse(R"({"id": "resp_1", "status": "completed", "usage": {}, "output": [
      {"id": "rs_1", "type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "status": "completed"},
      {"id": "fc_1", "type": "function_call", "name": "f", "call_id": "c", "arguments": "{}", "status": "completed"}]})");
  const auto log = replay_response(response);
  size_t next = 0;
  std::string text;
  EXPECT_TRUE(log->read(next, text, 1 << 20));
  std::vector<std::string> types;
  int64_t number = 0;
  for (size_t at = 0; (at = text.find("data: ", at)) != std::string::npos; ++at) {
    const Json event = Json::parse(text.substr(at + 6, text.find("\n\n", at) - at - 6));
    EXPECT_EQ(event["sequence_number"], number++);
    types.push_back(event["type"].get<std::string>());
  }
  EXPECT_EQ(types,
            (std::vector<std::string>{
                "response.created", "response.in_progress", "response.output_item.added",
                "response.content_part.added", "response.reasoning_text.delta",
                "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
                "response.output_item.added", "response.function_call_arguments.delta",
                "response.function_call_arguments.done", "response.output_item.done", "response.completed"}));
}

TEST(AnthropicError, HasItsOwnShapeAndPaths) {
  EXPECT_TRUE(is_anthropic_path("/v1/messages"));
  EXPECT_TRUE(is_anthropic_path("/v1/messages/count_tokens"));
  EXPECT_FALSE(is_anthropic_path("/v1/messages_of_mine"));
  const Json body = Json::parse(anthropic_error_body(context_exceeded(10, 5, "messages")));
  EXPECT_EQ(body["type"], "error");
  EXPECT_EQ(body["error"]["type"], "invalid_request_error");
  EXPECT_NE(body["error"]["message"].get<std::string>().find("prompt is too long"), std::string::npos);
  EXPECT_EQ(Json::parse(anthropic_error_body({503, "busy"}))["error"]["type"], "overloaded_error");
}

}  // namespace
}  // namespace millrace::server
