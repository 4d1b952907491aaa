// POST /v1/embeddings: texts or tokens in, a vector of length one for each out, as numbers or as base64 of
// little-endian float32 (what OpenAI's own clients ask for).
#include <fmt/core.h>

#include <bit>
#include <span>

#include "api_error.h"
#include "base/json_writer.h"
#include "embedding_answer.h"
#include "endpoints.h"
#include "ids.h"
#include "prompt_bounds.h"
#include "prompts.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

constexpr size_t kMaxInputs = 2048;  // OpenAI's

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

class OpenAiEmbeddings final : public EmbeddingAnswer {
 public:
  OpenAiEmbeddings(Api& api, ModelLease model, const std::vector<Request>& requests, size_t dimensions,
                   bool base64, Headers headers, Timeline::Entry entry)
      : EmbeddingAnswer(std::move(model), api.timeline(), requests, dimensions, std::move(headers),
                        std::move(entry)),
        base64_(base64) {}

 private:
  std::string body() const override {
    std::string out;
    JsonWriter json(out);
    json.begin_object().field("object", "list").key("data").begin_array();
    for (size_t i = 0; i < inputs(); ++i) {
      json.begin_object().field("object", "embedding").field("index", i).key("embedding");
      write(json, unit_vector(i));
      json.end_object();
    }
    json.end_array().field("model", generation_.model().id());
    write_usage(json);
    json.end_object();
    return out;
  }
  void write(JsonWriter& json, const std::vector<float>& vector) const {
    if (base64_) {
      json.value(base64_of(vector));
      return;
    }
    json.begin_array();
    for (const float x : vector) json.value(x);
    json.end_array();
  }

  const bool base64_;
};

}  // namespace

Reply embeddings(Api& api, const HttpRequest& request, const Client& client) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const ModelLease model = api.model_of(fields);
  const int32_t size = model->info().embedding_size;
  if (size == 0) {
    throw ApiError(
        501,
        fmt::format("the device {} gives no hidden states, so there are no embeddings", model->info().device),
        "", "unsupported_value");
  }
  Request base = read_service(fields, api, client);
  const auto pooling = fields.choice("pooling", {"mean", "last", "cls"});
  base.embedding = pooling == "mean"   ? Pooling::kMean
                   : pooling == "last" ? Pooling::kLast
                   : pooling == "cls"  ? Pooling::kFirst
                                       : model->info().pooling;
  const auto dimensions = static_cast<size_t>(fields.integer("dimensions", 1, size).value_or(size));
  const bool base64 = fields.choice("encoding_format", {"float", "base64"}) == "base64";
  std::vector<Request> requests;
  for (Prompt& prompt : read_prompts(fields, "input", model->info().vocab, kMaxInputs)) {
    Request r = base;
    r.tokens = prompt_tokens(prompt, model->engine());
    requests.push_back(std::move(r));
  }
  Timeline::Entry entry = entry_of(new_id("embd-", 24), "embeddings", client);
  Reply reply;
  reply.answer =
      std::make_unique<OpenAiEmbeddings>(api, model, requests, dimensions, base64,
                                         warn_ignored(fields, {"user"}, api, client), std::move(entry));
  return reply;
}

}  // namespace millrace::server
