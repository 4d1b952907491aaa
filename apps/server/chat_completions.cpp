// POST /v1/chat/completions.
#include <fmt/format.h>

#include "api_error.h"
#include "chat_answer.h"
#include "choices_answer.h"
#include "conversation.h"
#include "endpoints.h"
#include "ids.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

// Under both names that clients look for: OpenRouter's, which gpt-oss's own suite wants, and DeepSeek's.
std::string reasoning_fields(std::string_view text) {
  const std::string value = json_string(text);
  return fmt::format(R"("reasoning":{},"reasoning_content":{})", value, value);
}

class ChatAnswer final : public ChoicesAnswer {
 public:
  ChatAnswer(Api& api, const chat::Conversation& conversation, const Request& request,
             const std::vector<std::string>& stop, StreamOptions stream, Headers headers,
             Timeline::Entry entry)
      : ChoicesAnswer(api, {request}, stream, std::move(headers), std::move(entry),
                      stream.stream ? "chat.completion.chunk" : "chat.completion") {
    for (size_t i = 0; i < generation_.choices(); ++i) {
      readers_.emplace_back(api.engine(), api.format().parser(conversation), logprobs_, stop);
    }
    began_.resize(readers_.size());
  }

 private:
  void take(const Generation::Item& item, std::string& out) override {
    ChatReader& reader = readers_[item.choice];
    if (reader.stopped()) return;
    const std::vector<chat::Delta>& deltas = reader.take(item.event);
    if (reader.stopped()) generation_.stop(item.choice);
    if (!stream_.stream || item.event.kind == Event::Kind::kFailed) return;
    if (!began_[item.choice]) {
      began_[item.choice] = true;
      chunk(out, item.choice, R"("role":"assistant","content":"")");
    }
    for (const chat::Delta& delta : deltas) chunk_of(out, item.choice, reader, delta);
    if (reader.finished()) chunk(out, item.choice, "", reader.finish());
  }

  void chunk_of(std::string& out, size_t choice, ChatReader& reader, const chat::Delta& delta) {
    switch (delta.kind) {
      case chat::Delta::Kind::kReasoning:
        chunk(out, choice, reasoning_fields(delta.text));
        break;
      case chat::Delta::Kind::kContent:
        chunk(out, choice, "\"content\":" + json_string(delta.text), "", reader.take_logprobs());
        break;
      case chat::Delta::Kind::kToolCall:
        chunk(
            out, choice,
            fmt::format(
                R"("tool_calls":[{{"index":{},"id":"{}","type":"function","function":{{"name":{},"arguments":""}}}}])",
                delta.call, reader.calls()[static_cast<size_t>(delta.call)].id, json_string(delta.name)));
        break;
      case chat::Delta::Kind::kToolArguments:
        chunk(out, choice,
              fmt::format(R"("tool_calls":[{{"index":{},"function":{{"arguments":{}}}}}])", delta.call,
                          json_string(delta.text)));
        break;
    }
  }

  void chunk(std::string& out, size_t choice, std::string_view delta, std::string_view finish = {},
             const std::string& logprobs = {}) {
    send(out, fmt::format(
                  R"({{"index":{},"delta":{{{}}},"logprobs":{},"finish_reason":{}}})", choice, delta,
                  logprobs.empty() ? "null" : fmt::format(R"({{"content":[{}],"refusal":null}})", logprobs),
                  finish.empty() ? "null" : fmt::format("\"{}\"", finish)));
  }

  std::string whole_choice(size_t index) override {
    ChatReader& reader = readers_[index];
    std::string message = R"("role":"assistant","content":)";
    message += reader.content().empty() && !reader.calls().empty() ? "null" : json_string(reader.content());
    message += ",\"refusal\":null";
    if (!reader.reasoning().empty()) message += "," + reasoning_fields(reader.reasoning());
    if (!reader.calls().empty()) {
      std::string calls;
      for (const ReadCall& call : reader.calls()) {
        if (!calls.empty()) calls.push_back(',');
        calls += fmt::format(R"({{"id":"{}","type":"function","function":{{"name":{},"arguments":{}}}}})",
                             call.id, json_string(call.name), json_string(call.arguments));
      }
      message += ",\"tool_calls\":[" + calls + "]";
    }
    const std::string logprobs =
        logprobs_ ? fmt::format(R"({{"content":[{}],"refusal":null}})", reader.take_logprobs()) : "null";
    return fmt::format(R"({{"index":{},"message":{{{}}},"logprobs":{},"finish_reason":"{}"}})", index,
                       message, logprobs, reader.finish());
  }

  std::string usage_details() const override {
    int64_t reasoning = 0;
    for (const ChatReader& reader : readers_) reasoning += reader.reasoning_tokens();
    return fmt::format(R"(,"completion_tokens_details":{{"reasoning_tokens":{}}})", reasoning);
  }

  std::vector<ChatReader> readers_;
  std::vector<bool> began_;
};

}  // namespace

Reply chat_completions(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  check_model(fields, api);
  const StreamOptions stream = read_stream_options(fields);
  Request request = read_request(fields, api, client);
  const auto limit = fields.integer("max_completion_tokens", 1, 1 << 28);
  const auto old_limit = fields.integer("max_tokens", 1, 1 << 28);
  request.max_tokens = static_cast<int32_t>(limit.value_or(old_limit.value_or(0)));
  const auto top = fields.integer("top_logprobs", 0, 20);
  if (fields.boolean("logprobs").value_or(false)) {
    request.sampling.logprobs = static_cast<int32_t>(top.value_or(0));
  } else if (top) {
    fields.refuse("top_logprobs", "is only allowed when logprobs is true");
  }
  if (const Json* modalities = fields.array("modalities")) {
    if (*modalities != Json::array({"text"})) fields.refuse("modalities", "expected [\"text\"]");
  }
  chat::Conversation conversation = read_conversation(fields);
  const Constraints::Grammar content = api.constraints().of_request(fields, &conversation);
  request.tokens = api.format().prompt(conversation);
  if (!request.ignore_end) request.stop_tokens = api.format().stop_tokens();
  request.constraint = api.format().constraint(conversation, content);

  const std::vector<std::string> stop = std::exchange(request.stop, {});

  Timeline::Entry entry;
  entry.id = new_id("chatcmpl-", 24);
  entry.request_id = client.request_id;
  entry.endpoint = "chat";
  entry.stream = stream.stream;
  Headers headers = warn_ignored(
      fields,
      {"service_tier", "store", "metadata", "user", "prediction", "verbosity", "web_search_options",
       "prompt_cache_key", "safety_identifier", "functions", "function_call", "audio"},
      api, client);
  Reply reply;
  reply.answer = std::make_unique<ChatAnswer>(api, conversation, request, stop, stream, std::move(headers),
                                              std::move(entry));
  return reply;
}

}  // namespace millrace::server
