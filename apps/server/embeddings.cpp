// POST /v1/embeddings: texts or tokens in, a vector of length one for each out, as numbers or as base64 of
// little-endian float32 (what OpenAI's own clients ask for).
#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <span>

#include "api_error.h"
#include "base/json_writer.h"
#include "endpoints.h"
#include "generation.h"
#include "ids.h"
#include "prompt_bounds.h"
#include "prompts.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

constexpr size_t kMaxInputs = 2048;  // OpenAI's

struct Shape {
  size_t dimensions = 0;
  bool base64 = false;
};

std::string base64_of(std::span<const float> values) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  static_assert(std::endian::native == std::endian::little);
  const std::span<const std::byte> bytes = std::as_bytes(values);
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    uint32_t bits = 0;
    for (size_t b = 0; b < 3; ++b)
      bits = bits << 8 | (b < count ? std::to_integer<uint32_t>(bytes[i + b]) : 0);
    for (size_t d = 0; d < 4; ++d) out.push_back(d <= count ? kDigits[bits >> (18 - 6 * d) & 63] : '=');
  }
  return out;
}

// The first `dimensions` numbers at length one.
void write_embedding(JsonWriter& json, std::span<const float> embedding, const Shape& shape) {
  embedding = embedding.first(shape.dimensions);
  double squares = 0;
  for (const float x : embedding) squares += static_cast<double>(x) * x;
  if (!std::isfinite(squares)) throw ApiError(500, "the model's hidden states overflow", "", "overflow");
  const double scale = squares > 0 ? 1 / std::sqrt(squares) : 0.0;
  std::vector<float> unit;
  unit.reserve(embedding.size());
  for (const float x : embedding) unit.push_back(static_cast<float>(x * scale));
  if (shape.base64) {
    json.value(base64_of(unit));
    return;
  }
  json.begin_array();
  for (const float x : unit) json.value(x);
  json.end_array();
}

class EmbeddingAnswer final : public Answer {
 public:
  EmbeddingAnswer(Api& api, const std::vector<Request>& requests, Shape shape, Headers headers,
                  Timeline::Entry entry)
      : api_(api),
        shape_(shape),
        generation_(api.engine(), api.timeline(), requests, std::move(entry)),
        headers_(std::move(headers)),
        vectors_(requests.size()) {}

  bool streaming() const override { return false; }
  void on_ready(std::function<void()> notify) override { generation_.on_ready(notify); }
  Headers headers() const override { return headers_; }

  bool advance(std::string& /*out*/, size_t /*max_bytes*/) override {
    while (std::optional<Generation::Item> item = generation_.next()) {
      vectors_[item->choice] = std::move(item->event.embedding);
    }
    return generation_.done();
  }

  std::optional<HttpResponse> response() override {
    if (generation_.failure()) return error_response(*generation_.failure());
    if (!generation_.done()) return std::nullopt;
    try {
      return HttpResponse{.body = body(), .headers = headers_};
    } catch (const ApiError& error) {
      return error_response(error);
    }
  }

 private:
  std::string body() const {
    std::string out;
    JsonWriter json(out);
    json.begin_object().field("object", "list").key("data").begin_array();
    for (size_t i = 0; i < vectors_.size(); ++i) {
      if (vectors_[i].empty()) {
        throw ApiError(503, "the request was cancelled or took longer than the server allows", "", "timeout");
      }
      json.begin_object().field("object", "embedding").field("index", i).key("embedding");
      write_embedding(json, vectors_[i], shape_);
      json.end_object();
    }
    const int64_t tokens = generation_.totals().prompt;
    json.end_array().field("model", api_.model_id());
    json.key("usage")
        .begin_object()
        .field("prompt_tokens", tokens)
        .field("total_tokens", tokens)
        .end_object();
    json.end_object();
    return out;
  }

  const Api& api_;
  const Shape shape_;
  Generation generation_;
  const Headers headers_;
  std::vector<std::vector<float>> vectors_;  // by input; as the engine gave them
};

// Its tokens, checked here so that the complaint says which of many inputs it is.
std::vector<int32_t> input_tokens(Prompt& prompt, const Api& api, Engine& engine) {
  const int32_t context = api.engine_info().context;
  std::vector<int32_t> tokens = std::move(prompt.tokens);
  if (!prompt.text.empty()) {
    check_text_may_fit(engine, prompt.text, prompt.path);
    tokens = engine.tokenize(prompt.text, true, true, static_cast<size_t>(context));
  }
  if (tokens.empty()) bad_field(prompt.path, "found no tokens, expected at least one");
  if (std::ssize(tokens) > context) {
    bad_field(prompt.path,
              fmt::format("found {} tokens, expected at most the context of {}", tokens.size(), context),
              "context_length_exceeded");
  }
  return tokens;
}

}  // namespace

Reply embeddings(Api& api, const HttpRequest& request, const Client& client) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  check_model(fields, api);
  const int32_t size = api.engine_info().embedding_size;
  if (size == 0) {
    throw ApiError(501,
                   fmt::format("the device {} gives no hidden states, so there are no embeddings",
                               api.engine_info().device),
                   "", "unsupported");
  }
  Request base = read_service(fields, api, client);
  base.embedding = fields.choice("pooling", {"mean", "last"}) == "last" ? Pooling::kLast : Pooling::kMean;
  const Shape shape{.dimensions = static_cast<size_t>(fields.integer("dimensions", 1, size).value_or(size)),
                    .base64 = fields.choice("encoding_format", {"float", "base64"}) == "base64"};
  std::vector<Request> requests;
  for (Prompt& prompt : read_prompts(fields, "input", api.engine_info().vocab, kMaxInputs)) {
    Request r = base;
    r.tokens = input_tokens(prompt, api, api.engine());
    requests.push_back(std::move(r));
  }
  Timeline::Entry entry;
  entry.id = new_id("embd-", 24);
  entry.request_id = client.request_id;
  entry.endpoint = "embeddings";
  Reply reply;
  reply.answer = std::make_unique<EmbeddingAnswer>(
      api, requests, shape, warn_ignored(fields, {"user"}, api, client), std::move(entry));
  return reply;
}

}  // namespace millrace::server
