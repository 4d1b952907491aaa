// Ollama's /api/chat, /api/generate, /api/embed and /api/embeddings.
#include <algorithm>

#include "api_error.h"
#include "base/json_writer.h"
#include "conversation.h"
#include "embedding_answer.h"
#include "endpoints.h"
#include "ids.h"
#include "infill_prompt.h"
#include "json_reply.h"
#include "ollama_answer.h"
#include "ollama_fields.h"
#include "prompt_bounds.h"
#include "prompts.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

constexpr size_t kMaxEmbedInputs = 2048;

// What chat and generate begin with. A request without anything to answer loads its model, or unloads it.
struct Opening {
  std::string model;
  ModelLease lease;               // null: it was unloaded
  std::optional<Reply> finished;  // there is no more to do
};
Opening open_ollama(const Fields& fields, Api& api, bool chat, bool nothing_to_answer) {
  Opening opening{.model = ollama_model(fields, api), .lease = nullptr, .finished = {}};
  const std::optional<double> stay = read_keep_alive(fields);
  const auto finished = [&](std::string_view reason) {
    Json body = {{"model", opening.model}, {"created_at", rfc3339(unix_time())}};
    if (chat) {
      body["message"] = {{"role", "assistant"}, {"content", ""}};
    } else {
      body["response"] = "";
    }
    body["done"] = true;
    body["done_reason"] = std::string(reason);
    return json_reply(body);
  };
  const bool keep = api.models().status(opening.model).keep;
  if (nothing_to_answer && stay == 0 && !keep) {
    api.models().unload(opening.model);
    opening.finished = finished("unload");
    return opening;
  }
  opening.lease = api.lease(opening.model, ollama_streams(fields) ? StreamForm::kLines : StreamForm::kNone);
  if (stay) api.models().stay(opening.model, *stay);
  if (nothing_to_answer) {
    opening.finished = finished("load");
  } else {
    check_writes(opening.lease->info());
  }
  return opening;
}

Timeline::Entry ollama_entry(std::string endpoint, bool stream, const Client& client) {
  return entry_of(new_id("ollama-", 24), std::move(endpoint), client, stream);
}

// What chat and generate end with. `conversation`: none where the model goes on with a text.
Reply answer_to(const Fields& fields, Api& api, const Client& client, const Opening& opening, bool chat,
                const Request& request, const std::optional<chat::Conversation>& conversation,
                const std::vector<std::string>& stop) {
  const bool stream = ollama_streams(fields);
  Headers headers = ollama_ignored(fields, api, *opening.lease, client);
  Reply reply;
  reply.answer = std::make_unique<OllamaAnswer>(
      api, opening.lease, request, conversation, stop,
      OllamaShape{.model = opening.model, .chat = chat, .stream = stream, .load_s = client.load_s},
      std::move(headers), ollama_entry(chat ? "ollama chat" : "ollama generate", stream, client));
  return reply;
}

void refuse_logprobs(const Fields& fields) {
  if (fields.boolean("logprobs").value_or(false)) fields.refuse("logprobs", "is not supported here");
}

// The prompt and the limits of an answer to a conversation. `path`: the field that it came from.
void set_conversation(const Fields& fields, Request& request, ServedModel& model,
                      chat::Conversation& conversation, std::string_view path) {
  check_conversation_may_fit(model.engine(), conversation, path);
  Constraints::Grammar content = read_ollama_format(fields, model.constraints(), conversation);
  request.images = read_images(conversation, model.info());
  request.tokens = model.format().prompt(conversation, most_counted(model.info().context));
  check_context(request.tokens.size(), model.info(), path);
  request.stop_tokens = model.format().stop_tokens();
  request.constraint = model.format().constraint(conversation, std::move(content));
}

}  // namespace

Reply ollama_chat(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const Json* messages = fields.array("messages");
  Opening opening = open_ollama(fields, api, true, messages == nullptr || messages->empty());
  if (opening.finished) return *std::move(opening.finished);
  ServedModel& model = *opening.lease;
  check_messages_may_fit(model.engine(), messages, "messages");
  chat::Conversation conversation = read_ollama_conversation(fields);
  refuse_logprobs(fields);
  Request request = read_ollama_options(fields, api, model, client);
  set_conversation(fields, request, model, conversation, "messages");
  const std::vector<std::string> stop = std::exchange(request.stop, {});
  return answer_to(fields, api, client, opening, /*chat=*/true, request, conversation, stop);
}

namespace {

// What stands before and behind: the model writes what is between.
void set_gap(const Fields& fields, Request& request, ServedModel& model, const Gap& gap) {
  if (!model.info().infill.fills()) {
    fields.refuse("suffix", "is not supported by this model: its vocabulary has no tokens for it");
  }
  if (fields.has("system")) fields.refuse("system", "is not supported beside suffix");
  check_text_may_fit(model.engine(), gap.prefix, "prompt");
  check_text_may_fit(model.engine(), gap.suffix, "suffix");
  request.tokens = infill_prompt(model.engine(), gap);
  check_context(request.tokens.size(), model.info(), "prompt");
  request.stop_tokens = model.info().infill.ends;
  chat::Conversation nobody;
  request.constraint = model.constraints().for_text(read_ollama_format(fields, model.constraints(), nobody));
}

}  // namespace

Reply ollama_generate(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const std::string prompt = fields.text("prompt").value_or("");
  if (!fields.text("template").value_or("").empty()) {
    fields.refuse("template", "is not supported: the model's own is used, or none with \"raw\": true");
  }
  const std::string suffix = fields.text("suffix").value_or("");
  std::vector<chat::MessageImage> images = read_ollama_images(fields);
  if (fields.has("context")) {
    fields.refuse("context", "is not supported: a conversation goes on at /api/chat, with its messages");
  }
  Opening opening = open_ollama(fields, api, false, prompt.empty());
  if (opening.finished) return *std::move(opening.finished);
  ServedModel& model = *opening.lease;
  refuse_logprobs(fields);
  Request request = read_ollama_options(fields, api, model, client);
  // A model that was never taught to chat goes on with the text.
  const bool chats = model.info().has_chat_template || model.format().name() == "harmony";
  std::optional<chat::Conversation> conversation;
  std::vector<std::string> stop;
  const bool raw = fields.boolean("raw").value_or(false) || !chats;
  if (!images.empty() && (raw || !suffix.empty())) {
    fields.refuse("images", "are read where the model's chat template is used, not with \"raw\" or suffix");
  }
  if (!suffix.empty()) {
    set_gap(fields, request, model, {.prefix = prompt, .suffix = suffix});
  } else if (raw) {
    request.text = fields.text("system").value_or("") + prompt;
    check_text_may_fit(model.engine(), request.text, "prompt");
    chat::Conversation nobody;
    request.constraint =
        model.constraints().for_text(read_ollama_format(fields, model.constraints(), nobody));
  } else {
    conversation.emplace();
    const std::string system = fields.text("system").value_or("");
    if (!system.empty()) conversation->messages.push_back({.role = "system", .content = system});
    conversation->messages.push_back({.role = "user", .content = prompt, .images = std::move(images)});
    read_think(fields, *conversation);
    set_conversation(fields, request, model, *conversation, "prompt");
    stop = std::exchange(request.stop, {});
  }
  return answer_to(fields, api, client, opening, /*chat=*/false, request, conversation, stop);
}

// ---------------------------------------------------------------- embeddings

namespace {

class OllamaEmbeddings final : public EmbeddingAnswer {
 public:
  OllamaEmbeddings(Api& api, ModelLease model, const std::vector<Request>& requests, size_t dimensions,
                   std::string name, bool one, double load_s, Headers headers, Timeline::Entry entry)
      : EmbeddingAnswer(std::move(model), api.timeline(), requests, dimensions, std::move(headers),
                        std::move(entry)),
        name_(std::move(name)),
        one_(one),
        load_s_(load_s) {}

 private:
  HttpResponse failed(const ApiError& error) const override { return ollama_error(error); }

  std::string body() const override {
    std::string out;
    JsonWriter json(out);
    const auto write = [&](size_t input) {
      json.begin_array();
      for (const float x : unit_vector(input)) json.value(x);
      json.end_array();
    };
    json.begin_object();
    if (one_) {
      json.key("embedding");
      write(0);
    } else {
      json.field("model", name_).key("embeddings").begin_array();
      for (size_t i = 0; i < inputs(); ++i) write(i);
      const auto spent = std::chrono::steady_clock::now() - start_;
      const double total = std::chrono::duration<double>(spent).count() + load_s_;
      json.end_array().field("total_duration", static_cast<int64_t>(total * 1e9));
      json.field("load_duration", static_cast<int64_t>(load_s_ * 1e9));
      json.field("prompt_eval_count", generation_.totals().prompt);
    }
    json.end_object();
    return out;
  }

  const std::string name_;
  const bool one_;  // the older endpoint's
  const double load_s_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

Reply embed(Api& api, const HttpRequest& http, const Client& client, bool one) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const std::string name = ollama_model(fields, api);
  const std::optional<double> stay = read_keep_alive(fields);
  const ModelLease model = api.lease(name, StreamForm::kNone);
  if (stay) api.models().stay(name, *stay);
  const ModelInfo& info = model->info();
  if (info.embedding_size == 0) {
    throw ApiError(501, "the model's device gives no hidden states, so there are no embeddings", "",
                   "unsupported");
  }
  const auto dimensions =
      static_cast<size_t>(fields.integer("dimensions", 1, info.embedding_size).value_or(info.embedding_size));
  const bool truncate = fields.boolean("truncate").value_or(true);
  Request base = read_service(fields, api, client);
  base.embedding = info.pooling;
  std::vector<Request> requests;
  for (Prompt& prompt : read_prompts(fields, one ? "prompt" : "input", info.vocab, kMaxEmbedInputs)) {
    Request r = base;
    const auto most = static_cast<size_t>(info.context);
    if (!prompt.text.empty() && !truncate) check_text_may_fit(model->engine(), prompt.text, prompt.path);
    r.tokens = prompt.text.empty() ? std::move(prompt.tokens)
                                   : model->engine().tokenize(prompt.text, true, true, most);
    if (r.tokens.empty()) bad_field(prompt.path, "found no tokens, expected at least one");
    if (std::ssize(r.tokens) > info.context) {
      if (!truncate) throw context_exceeded(r.tokens.size(), info.context, prompt.path);
      r.tokens.resize(most);
    }
    requests.push_back(std::move(r));
  }
  Reply reply;
  reply.answer = std::make_unique<OllamaEmbeddings>(
      api, model, requests, dimensions, name, one, client.load_s, ollama_ignored(fields, api, *model, client),
      ollama_entry("ollama embed", false, client));
  return reply;
}

}  // namespace

Reply ollama_embed(Api& api, const HttpRequest& http, const Client& client) {
  return embed(api, http, client, false);
}
Reply ollama_embeddings(Api& api, const HttpRequest& http, const Client& client) {
  return embed(api, http, client, true);
}

}  // namespace millrace::server
