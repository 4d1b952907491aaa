// POST /infill: what stands before and behind a gap in, what fills it out. The fields and the answer are
// llama.cpp's, for the editors that speak to it.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "api_error.h"
#include "base/json_writer.h"
#include "endpoints.h"
#include "generation.h"
#include "ids.h"
#include "infill_prompt.h"
#include "prompt_bounds.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

constexpr size_t kMaxFiles = 1024;

struct InfillShape {
  bool stream = false;
  bool only_prompt = false;  // nothing is asked for: the prompt is computed for the next request
  std::optional<double> max_predict_s = {};  // then it ends, once it has a line
};

class InfillAnswer final : public Answer {
 public:
  InfillAnswer(Api& api, ModelLease model, const Request& request, InfillShape shape, Headers headers,
               Timeline::Entry entry)
      : shape_(shape),
        headers_(std::move(headers)),
        id_(entry.id),
        generation_(std::move(model), api.timeline(), {request}, std::move(entry)) {}

  bool streaming() const override { return shape_.stream; }
  void on_ready(std::function<void()> notify) override { generation_.on_ready(notify); }
  Headers headers() const override { return headers_; }
  int64_t generated_tokens() const override { return generation_.totals().generated; }

  bool advance(std::string& out, size_t max_bytes) override {
    while (out.size() < max_bytes) {
      const std::optional<Generation::Item> item = generation_.next();
      if (!item) break;
      take(item->event, out);
    }
    if (!generation_.done()) return false;
    if (shape_.stream && !ended_) {
      ended_ = true;
      out += "data: " + (generation_.failure() ? error_body(*generation_.failure()) : whole("")) + "\n\n";
    }
    return true;
  }
  std::optional<HttpResponse> response() override {
    if (generation_.failure() && !sent_) return error_response(*generation_.failure());
    if (shape_.stream || !generation_.done()) return std::nullopt;
    return HttpResponse{.body = whole(text_), .headers = headers_};
  }

 private:
  void take(const Event& event, std::string& out) {
    if (event.kind != Event::Kind::kToken) {
      finish_ = event.finish;
      usage_ = event.usage;
    }
    if (shape_.only_prompt || event.kind == Event::Kind::kFailed) return;
    if (!event.text.empty()) give(event.text, out);
    if (event.kind == Event::Kind::kToken && time_is_up()) generation_.stop(0);
  }
  void give(const std::string& text, std::string& out) {
    text_ += text;
    if (!shape_.stream) return;
    sent_ = true;
    out += "data: ";
    JsonWriter(out).begin_object().field("content", text).field("stop", false).end_object();
    out += "\n\n";
  }
  bool time_is_up() {
    const auto now = std::chrono::steady_clock::now();
    if (!first_token_) first_token_ = now;
    if (!shape_.max_predict_s || stopped_ || text_.find('\n') == std::string::npos) return false;
    stopped_ = std::chrono::duration<double>(now - *first_token_).count() > *shape_.max_predict_s;
    return stopped_;
  }

  std::string whole(std::string_view content) const {
    const int64_t predicted = shape_.only_prompt ? 0 : usage_.generated_tokens;
    std::string out;
    JsonWriter json(out);
    json.begin_object().field("content", content).field("stop", true).field("id", id_);
    json.field("model", generation_.model().id());
    json.field("stop_type", stopped_                               ? "limit"
                            : finish_ == FinishReason::kEndToken   ? "eos"
                            : finish_ == FinishReason::kStopString ? "word"
                                                                   : "limit");
    json.field("tokens_predicted", predicted).field("tokens_evaluated", usage_.prompt_tokens);
    json.field("tokens_cached", usage_.cached_tokens).field("truncated", false);
    write_timings(json, predicted);
    json.end_object();
    return out;
  }
  void write_timings(JsonWriter& json, int64_t predicted) const {
    const int32_t computed = usage_.prompt_tokens - usage_.cached_tokens;
    const double prompt_s = std::max(0.0, usage_.first_token_s - usage_.queue_s);
    const double rest_s = std::max(0.0, usage_.total_s - usage_.first_token_s);
    const auto rate = [](int64_t tokens, double seconds) {
      return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
    };
    json.key("timings").begin_object();
    json.field("cache_n", usage_.cached_tokens).field("prompt_n", computed);
    json.field("prompt_ms", prompt_s * 1e3).field("prompt_per_second", rate(computed, prompt_s));
    json.field("predicted_n", predicted).field("predicted_ms", rest_s * 1e3);
    json.field("predicted_per_second", rate(std::max<int64_t>(0, predicted - 1), rest_s));
    json.end_object();
  }

  const InfillShape shape_;
  const Headers headers_;
  const std::string id_;
  Generation generation_;
  std::string text_;
  std::optional<std::chrono::steady_clock::time_point> first_token_;
  bool sent_ = false, ended_ = false, stopped_ = false;
  FinishReason finish_ = FinishReason::kMaxTokens;
  Usage usage_;
};

Gap read_gap(const Fields& fields, const Engine& engine) {
  Gap gap{.prefix = fields.required_text("input_prefix"), .suffix = fields.required_text("input_suffix")};
  gap.prefix += fields.text("prompt").value_or("");  // what was typed since
  check_text_may_fit(engine, gap.prefix, "input_prefix");
  check_text_may_fit(engine, gap.suffix, "input_suffix");
  const Json* extra = fields.array("input_extra");
  if (extra == nullptr) return gap;
  if (extra->size() > kMaxFiles) {
    bad_field("input_extra", fmt::format("found {} files, expected at most {}", extra->size(), kMaxFiles),
              "array_above_max_length");
  }
  for (size_t i = 0; i < extra->size(); ++i) {
    const Fields file((*extra)[i], element_path("input_extra", i));
    gap.files.push_back({.name = file.text("filename").value_or(""), .text = file.required_text("text")});
    check_text_may_fit(engine, gap.files.back().text, file.path_of("text"));
  }
  return gap;
}

}  // namespace

Reply infill(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const ModelLease model = api.writer_of(fields);
  if (!model->info().infill.fills()) {
    throw ApiError(501,
                   fmt::format("the model '{}' fills no gaps: its vocabulary has no tokens for what stands "
                               "before and behind one",
                               model->id()),
                   "model", "unsupported_value");
  }
  Request request = read_request(fields, api, *model, client);
  if (request.samples != 1) fields.refuse("n", "expected 1");
  const int64_t predict = fields.integer("n_predict", -1, 1 << 28).value_or(-1);
  request.max_tokens = static_cast<int32_t>(predict < 0 ? 0 : std::max<int64_t>(1, predict));
  InfillShape shape{.stream = fields.boolean("stream").value_or(false), .only_prompt = predict == 0};
  if (const auto ms = fields.number("t_max_predict_ms", 0, 1e9); ms && *ms > 0)
    shape.max_predict_s = *ms / 1e3;
  request.tokens = infill_prompt(model->engine(), read_gap(fields, model->engine()));
  check_context(request.tokens.size(), model->info(), "input_prefix");
  if (!request.ignore_end) request.stop_tokens = model->info().infill.ends;
  Timeline::Entry entry = entry_of(new_id("fill-", 24), "infill", client, shape.stream);
  Headers headers = warn_ignored(
      fields, {"cache_prompt", "samplers", "n_indent", "t_max_prompt_ms", "response_fields", "id_slot"}, api,
      client);
  Reply reply;
  reply.answer =
      std::make_unique<InfillAnswer>(api, model, request, shape, std::move(headers), std::move(entry));
  return reply;
}

}  // namespace millrace::server
