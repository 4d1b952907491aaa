#include "ollama_answer.h"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <cmath>
#include <ctime>

#include "api_error.h"

namespace millrace::server {
namespace {

int64_t nanoseconds(double seconds) { return std::llround(std::max(0.0, seconds) * 1e9); }

void write_ollama_call(JsonWriter& json, const ReadCall& call) {
  const Json parsed = Json::parse(call.arguments, nullptr, false);
  json.begin_object().field("id", call.id).key("function").begin_object().field("name", call.name);
  // An object, as clients expect it; what a model wrote instead is kept as its text.
  const Json arguments = parsed.is_object() ? parsed : Json({{"arguments", call.arguments}});
  json.key("arguments").raw(arguments.dump(-1, ' ', false, Json::error_handler_t::replace));
  json.end_object().end_object();
}

}  // namespace

std::string rfc3339(double unix_time) {
  const double whole = std::floor(unix_time);
  const auto seconds = static_cast<std::time_t>(whole);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:06}Z", fmt::gmtime(seconds),
                     static_cast<int64_t>((unix_time - whole) * 1e6));
}

HttpResponse ollama_error(const ApiError& error) {
  HttpResponse response = error_response(error);
  response.body.clear();
  JsonWriter(response.body).begin_object().field("error", error.message).end_object();
  return response;
}

OllamaAnswer::OllamaAnswer(Api& api, ModelLease model, const Request& request,
                           const std::optional<chat::Conversation>& conversation,
                           const std::vector<std::string>& stop, OllamaShape shape, Headers headers,
                           Timeline::Entry entry)
    : shape_(std::move(shape)),
      headers_(std::move(headers)),
      generation_(std::move(model), api.timeline(), {request}, std::move(entry)) {
  ServedModel& served = generation_.model();
  if (conversation) reader_.emplace(served.engine(), served.format().parser(*conversation), false, stop);
  send(keep_alive_, {});  // says nothing: clients read every line as JSON
}

void OllamaAnswer::write_piece(JsonWriter& json, const Piece& piece) const {
  if (!shape_.chat) {
    json.field("response", piece.content);
    if (!piece.thinking.empty()) json.field("thinking", piece.thinking);
    return;
  }
  json.key("message").begin_object().field("role", "assistant").field("content", piece.content);
  if (!piece.thinking.empty()) json.field("thinking", piece.thinking);
  if (piece.first_call < piece.last_call) {
    json.key("tool_calls").begin_array();
    for (size_t i = piece.first_call; i < piece.last_call; ++i) write_ollama_call(json, reader_->calls()[i]);
    json.end_array();
  }
  json.end_object();
}

void OllamaAnswer::write_end(JsonWriter& json) const {
  const double total = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  json.field("done", true).field("done_reason", finish_);
  json.field("total_duration", nanoseconds(total + shape_.load_s));
  json.field("load_duration", nanoseconds(shape_.load_s));
  json.field("prompt_eval_count", usage_.prompt_tokens);
  json.field("prompt_eval_duration", nanoseconds(usage_.first_token_s - usage_.queue_s));
  json.field("eval_count", generation_.totals().generated);
  json.field("eval_duration", nanoseconds(usage_.total_s - usage_.first_token_s));
}

void OllamaAnswer::send(std::string& out, const Piece& piece) {
  JsonWriter json(out);
  json.begin_object().field("model", shape_.model).field("created_at", rfc3339(unix_time()));
  write_piece(json, piece);
  json.field("done", false).end_object();
  out += "\n";
}

void OllamaAnswer::send_calls(std::string& out, size_t until) {
  if (until <= calls_sent_) return;
  send(out, {.first_call = calls_sent_, .last_call = until});
  calls_sent_ = until;
}

void OllamaAnswer::take(const Event& event, std::string& out) {
  const bool last = event.kind != Event::Kind::kToken;
  if (last) usage_ = event.usage;
  if (!reader_) {
    text_ += event.text;
    if (last) finish_ = finish_name(event.finish);
    if (shape_.stream && !event.text.empty()) send(out, {.content = event.text});
    sent_ = sent_ || !out.empty();
    return;
  }
  if (reader_->stopped()) return;
  const std::vector<chat::Delta>& deltas = reader_->take(event);
  if (reader_->stopped()) generation_.stop(0);
  if (reader_->finished()) finish_ = reader_->finish() == "length" ? "length" : "stop";
  if (!shape_.stream || event.kind == Event::Kind::kFailed) return;
  for (const chat::Delta& delta : deltas) {
    const size_t begun = reader_->calls().size();
    switch (delta.kind) {
      case chat::Delta::Kind::kReasoning:
        send(out, {.thinking = delta.text});
        break;
      case chat::Delta::Kind::kContent:
        send(out, {.content = delta.text});
        break;
      case chat::Delta::Kind::kToolCall:
        send_calls(out, std::min(begun, static_cast<size_t>(delta.call)));
        break;
      case chat::Delta::Kind::kToolArguments:
        break;
    }
  }
  if (reader_->finished()) send_calls(out, reader_->calls().size());
  sent_ = sent_ || !out.empty();
}

bool OllamaAnswer::advance(std::string& out, size_t max_bytes) {
  while (out.size() < max_bytes) {
    const std::optional<Generation::Item> item = generation_.next();
    if (!item) break;
    take(item->event, out);
  }
  if (!generation_.done()) return false;
  if (shape_.stream && !std::exchange(ended_, true)) {
    if (generation_.failure()) {
      out += ollama_error(*generation_.failure()).body + "\n";
    } else {
      JsonWriter json(out);
      json.begin_object().field("model", shape_.model).field("created_at", rfc3339(unix_time()));
      write_piece(json, {});
      write_end(json);
      json.end_object();
      out += "\n";
    }
  }
  return true;
}

std::optional<HttpResponse> OllamaAnswer::response() {
  if (generation_.failure() && !sent_) return ollama_error(*generation_.failure());
  if (shape_.stream || !generation_.done()) return std::nullopt;
  std::string body;
  JsonWriter json(body);
  json.begin_object().field("model", shape_.model).field("created_at", rfc3339(unix_time()));
  Piece all{.content = text_};
  if (reader_) {
    all = {.content = reader_->content(), .thinking = reader_->reasoning()};
    all.last_call = reader_->calls().size();
  }
  write_piece(json, all);
  write_end(json);
  json.end_object();
  return HttpResponse{.body = std::move(body), .headers = headers_};
}

}  // namespace millrace::server
