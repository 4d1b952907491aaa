#include "anthropic_answer.h"

#include "anthropic_error.h"
#include "ids.h"

namespace millrace::server {

AnthropicAnswer::AnthropicAnswer(Api& api, ModelLease model, const MessagesInput& input,
                                 const Request& request, Options options, Timeline::Entry entry)
    : options_(std::move(options)),
      id_(entry.id),
      thinking_(input.thinking),
      omit_thinking_(input.omit_thinking),
      generation_(std::move(model), api.timeline(), {request}, std::move(entry)),
      reader_(generation_.model().engine(), generation_.model().format().parser(input.conversation), false,
              options_.stop) {}

// ---------------------------------------------------------------- events

template <typename WriteMembers>
void AnthropicAnswer::event(std::string& out, std::string_view type, WriteMembers write_members) const {
  if (!options_.stream) return;
  out.append("event: ").append(type).append("\ndata: ");
  JsonWriter json(out);
  json.begin_object().field("type", type);
  write_members(json);
  json.end_object();
  out += "\n\n";
}

void AnthropicAnswer::delta_event(std::string& out, std::string_view type, std::string_view key,
                                  std::string_view text) const {
  event(out, "content_block_delta", [&](JsonWriter& json) {
    json.field("index", blocks_.size() - 1).key("delta").begin_object();
    json.field("type", type).field(key, text).end_object();
  });
}

// ---------------------------------------------------------------- what has come

bool AnthropicAnswer::advance(std::string& out, size_t max_bytes) {
  while (out.size() < max_bytes) {
    const std::optional<Generation::Item> item = generation_.next();
    if (!item) break;
    take(item->event, out);
  }
  return generation_.done();
}

void AnthropicAnswer::take(const Event& event_in, std::string& out) {
  const bool failed = event_in.kind == Event::Kind::kFailed;
  if (failed && !began_) return;  // an HTTP error
  if (event_in.usage.prompt_tokens > 0) {
    prompt_ = event_in.usage.prompt_tokens;
    cached_ = event_in.usage.cached_tokens;
  }
  if (!began_) {
    began_ = true;
    event(out, "message_start", [&](JsonWriter& json) {
      json.key("message");
      write_message(json);
    });
  }
  if (failed) {
    if (options_.stream) {
      out += "event: error\ndata: " + anthropic_error_body(*generation_.failure()) + "\n\n";
    }
    return;
  }
  if (reader_.stopped()) return;
  for (const chat::Delta& delta : reader_.take(event_in)) add_delta(delta, out);
  if (reader_.stopped()) generation_.stop(0);
  if (reader_.finished()) finish(event_in, out);
}

void AnthropicAnswer::add_delta(const chat::Delta& delta, std::string& out) {
  switch (delta.kind) {
    case chat::Delta::Kind::kReasoning:
      if (thinking_) add_text(Block::Kind::kThinking, delta.text, out);
      break;
    case chat::Delta::Kind::kContent:
      add_text(Block::Kind::kText, delta.text, out);
      break;
    case chat::Delta::Kind::kToolCall:
      start({.kind = Block::Kind::kToolUse,
             .text = {},
             .id = new_id("toolu_", 24),
             .name = delta.name,
             .signature = {}},
            out);
      break;
    case chat::Delta::Kind::kToolArguments:
      add_text(Block::Kind::kToolUse, delta.text, out);
      break;
  }
}

void AnthropicAnswer::add_text(Block::Kind kind, const std::string& text, std::string& out) {
  if (!open_ || blocks_.back().kind != kind) {
    const bool thinking = kind == Block::Kind::kThinking;
    start({.kind = kind,
           .text = {},
           .id = {},
           .name = {},
           .signature = thinking ? new_id("sig_", 32) : std::string()},
          out);
  }
  if (kind == Block::Kind::kThinking && omit_thinking_) return;
  blocks_.back().text += text;
  switch (kind) {
    case Block::Kind::kThinking:
      delta_event(out, "thinking_delta", "thinking", text);
      break;
    case Block::Kind::kText:
      delta_event(out, "text_delta", "text", text);
      break;
    case Block::Kind::kToolUse:
      delta_event(out, "input_json_delta", "partial_json", text);
      break;
  }
}

void AnthropicAnswer::start(Block block, std::string& out) {
  stop(out);
  blocks_.push_back(std::move(block));
  open_ = true;
  event(out, "content_block_start", [&](JsonWriter& json) {
    json.field("index", blocks_.size() - 1).key("content_block");
    write_block(json, blocks_.back(), false);
  });
  if (blocks_.size() == 1) event(out, "ping", [](JsonWriter&) {});
}

void AnthropicAnswer::stop(std::string& out) {
  if (!open_) return;
  open_ = false;
  const Block& block = blocks_.back();
  if (block.kind == Block::Kind::kThinking) {
    delta_event(out, "signature_delta", "signature", block.signature);
  }
  event(out, "content_block_stop", [&](JsonWriter& json) { json.field("index", blocks_.size() - 1); });
}

void AnthropicAnswer::finish(const Event& event_in, std::string& out) {
  stop(out);
  const std::string finish = reader_.finish();
  stop_reason_ = reader_.stopped()                           ? "stop_sequence"
                 : finish == "tool_calls"                    ? "tool_use"
                 : finish == "stop"                          ? "end_turn"
                 : event_in.finish == FinishReason::kContext ? "model_context_window_exceeded"
                                                             : "max_tokens";
  event(out, "message_delta", [&](JsonWriter& json) {
    json.key("delta").begin_object().field("stop_reason", stop_reason_);
    json.text_or_null("stop_sequence", reader_.stop_found()).end_object();
    write_usage(json);
  });
  event(out, "message_stop", [](JsonWriter&) {});
}

// ---------------------------------------------------------------- in JSON

void AnthropicAnswer::write_usage(JsonWriter& json) const {
  // What they call input is what was computed of it.
  json.key("usage").begin_object().field("input_tokens", prompt_ - cached_);
  json.field("cache_creation_input_tokens", 0).field("cache_read_input_tokens", cached_);
  json.field("output_tokens", generation_.totals().generated).end_object();
}

// Of a block that starts, only what does not come in deltas.
void AnthropicAnswer::write_block(JsonWriter& json, const Block& block, bool whole) const {
  json.begin_object();
  switch (block.kind) {
    case Block::Kind::kThinking:
      json.field("type", "thinking").field("thinking", whole ? block.text : "");
      json.field("signature", whole ? block.signature : "");
      break;
    case Block::Kind::kText:
      json.field("type", "text").field("text", whole ? block.text : "");
      break;
    case Block::Kind::kToolUse: {
      json.field("type", "tool_use").field("id", block.id).field("name", block.name).key("input");
      const Json input = Json::parse(whole ? block.text : "{}", nullptr, false);
      if (input.is_object()) {
        json.raw(input.dump(-1, ' ', false, Json::error_handler_t::replace));
      } else {  // cut off, or no JSON at all: the tool will say what is wrong with it, and the model hear of
                // it
        json.begin_object();
        if (!block.text.empty()) json.field("raw_arguments", block.text);
        json.end_object();
      }
      break;
    }
  }
  json.end_object();
}

void AnthropicAnswer::write_message(JsonWriter& json) const {
  json.begin_object().field("id", id_).field("type", "message").field("role", "assistant");
  json.field("model", options_.model).key("content").begin_array();
  for (const Block& block : blocks_) write_block(json, block, true);
  json.end_array();
  json.text_or_null("stop_reason", stop_reason_).text_or_null("stop_sequence", reader_.stop_found());
  write_usage(json);
  json.end_object();
}

std::optional<HttpResponse> AnthropicAnswer::response() {
  if (generation_.failure() && (!began_ || !options_.stream)) return error_response(*generation_.failure());
  if (options_.stream || !generation_.done()) return std::nullopt;
  std::string body;
  JsonWriter json(body);
  write_message(json);
  return HttpResponse{.body = std::move(body), .headers = options_.headers};
}

}  // namespace millrace::server
