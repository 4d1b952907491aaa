// POST /v1/chat/completions.
#include "api_error.h"
#include "chat_answer.h"
#include "choices_answer.h"
#include "conversation.h"
#include "endpoints.h"
#include "ids.h"
#include "prompt_bounds.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

// Under both names that clients look for: OpenRouter's, which gpt-oss's own suite wants, and DeepSeek's.
void write_reasoning(JsonWriter& json, std::string_view text) {
  json.field("reasoning", text).field("reasoning_content", text);
}

// `items`: logprob objects, joined by commas.
void write_logprobs(JsonWriter& json, std::string_view items) {
  json.key("logprobs").begin_object().key("content").begin_array().raw(items).end_array();
  json.field("refusal", nullptr).end_object();
}

class ChatAnswer final : public ChoicesAnswer {
 public:
  ChatAnswer(Api& api, ModelLease lease, const chat::Conversation& conversation, const Request& request,
             const std::vector<std::string>& stop, StreamOptions stream, Headers headers,
             Timeline::Entry entry)
      : ChoicesAnswer(api, std::move(lease), {request}, stream, std::move(headers), std::move(entry),
                      stream.stream ? "chat.completion.chunk" : "chat.completion") {
    for (size_t i = 0; i < generation_.choices(); ++i) {
      readers_.emplace_back(model().engine(), model().format().parser(conversation), logprobs_, stop);
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
      chunk(out, item.choice, [](JsonWriter& json) { json.field("role", "assistant").field("content", ""); });
    }
    for (const chat::Delta& delta : deltas) chunk_of(out, item.choice, reader, delta);
    if (reader.finished())
      chunk(
          out, item.choice, [](JsonWriter&) {}, reader.finish());
  }

  void chunk_of(std::string& out, size_t choice, ChatReader& reader, const chat::Delta& delta) {
    switch (delta.kind) {
      case chat::Delta::Kind::kReasoning:
        chunk(out, choice, [&](JsonWriter& json) { write_reasoning(json, delta.text); });
        break;
      case chat::Delta::Kind::kContent:
        chunk(
            out, choice, [&](JsonWriter& json) { json.field("content", delta.text); }, "",
            reader.take_logprobs());
        break;
      case chat::Delta::Kind::kToolCall:
        chunk(out, choice, [&](JsonWriter& json) {
          json.key("tool_calls").begin_array().begin_object().field("index", delta.call);
          write_call(json, {.id = reader.calls()[static_cast<size_t>(delta.call)].id,
                            .name = delta.name,
                            .arguments = "",
                            .custom = delta.custom});
          json.end_object().end_array();
        });
        break;
      case chat::Delta::Kind::kToolArguments:
        chunk(out, choice, [&](JsonWriter& json) {
          json.key("tool_calls").begin_array().begin_object().field("index", delta.call);
          const auto [type, text] = names_of_call(delta.custom);
          json.key(type).begin_object().field(text, delta.text).end_object();
          json.end_object().end_array();
        });
        break;
    }
  }

  // An event whose delta has the members that `write_delta` writes.
  template <typename WriteDelta>
  void chunk(std::string& out, size_t choice, WriteDelta write_delta, std::string_view finish = {},
             std::string_view logprobs = {}) {
    send(out, [&](JsonWriter& json) {
      json.begin_object().field("index", choice).key("delta").begin_object();
      write_delta(json);
      json.end_object();
      if (logprobs.empty()) {
        json.field("logprobs", nullptr);
      } else {
        write_logprobs(json, logprobs);
      }
      json.text_or_null("finish_reason", finish).end_object();
    });
  }

  // The type of a call, also the key of what is said of it, and the key of its text.
  static std::pair<std::string_view, std::string_view> names_of_call(bool custom) {
    if (custom) return {"custom", "input"};
    return {"function", "arguments"};
  }

  static void write_call(JsonWriter& json, const ReadCall& call) {
    const auto [type, text] = names_of_call(call.custom);
    json.field("id", call.id).field("type", type).key(type).begin_object();
    json.field("name", call.name).field(text, call.arguments).end_object();
  }

  static void write_message(JsonWriter& json, const ChatReader& reader) {
    json.begin_object().field("role", "assistant");
    if (reader.content().empty() && !reader.calls().empty()) {
      json.field("content", nullptr);
    } else {
      json.field("content", reader.content());
    }
    json.field("refusal", nullptr);
    if (!reader.reasoning().empty()) write_reasoning(json, reader.reasoning());
    if (!reader.calls().empty()) {
      json.key("tool_calls").begin_array();
      for (const ReadCall& call : reader.calls()) {
        json.begin_object();
        write_call(json, call);
        json.end_object();
      }
      json.end_array();
    }
    json.end_object();
  }

  void write_choice(JsonWriter& json, size_t index) override {
    ChatReader& reader = readers_[index];
    json.begin_object().field("index", index).key("message");
    write_message(json, reader);
    if (logprobs_) {
      write_logprobs(json, reader.take_logprobs());
    } else {
      json.field("logprobs", nullptr);
    }
    json.field("finish_reason", reader.finish()).end_object();
  }

  void write_usage_details(JsonWriter& json) const override {
    int64_t reasoning = 0;
    for (const ChatReader& reader : readers_) reasoning += reader.reasoning_tokens();
    json.key("completion_tokens_details").begin_object().field("reasoning_tokens", reasoning).end_object();
  }

  std::vector<ChatReader> readers_;
  std::vector<bool> began_;
};

}  // namespace

Reply chat_completions(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const ModelLease model = api.writer_of(fields);
  const StreamOptions stream = read_stream_options(fields);
  Request request = read_request(fields, api, *model, client);
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
  check_messages_may_fit(model->engine(), fields.find("messages"), "messages");
  chat::Conversation conversation = read_conversation(fields);
  conversation.objects = model->constraints().objects(fields);
  check_conversation_may_fit(model->engine(), conversation, "messages");
  const Constraints::Grammar content = model->constraints().of_request(fields, &conversation);
  request.images = read_images(conversation, model->info());
  request.tokens = blaming(
      "messages", [&] { return model->format().prompt(conversation, most_counted(model->info().context)); });
  check_context(request.tokens.size(), model->info(), "messages");
  if (!request.ignore_end) request.stop_tokens = model->format().stop_tokens();
  request.constraint = blaming("tools", [&] { return model->format().constraint(conversation, content); });

  const std::vector<std::string> stop = std::exchange(request.stop, {});

  Timeline::Entry entry = entry_of(new_id("chatcmpl-", 24), "chat", client, stream.stream);
  Headers headers = warn_ignored(
      fields,
      {"service_tier", "store", "metadata", "user", "prediction", "verbosity", "web_search_options",
       "prompt_cache_key", "safety_identifier", "functions", "function_call", "audio"},
      api, client);
  Reply reply;
  reply.answer = std::make_unique<ChatAnswer>(api, model, conversation, request, stop, stream,
                                              std::move(headers), std::move(entry));
  return reply;
}

}  // namespace millrace::server
