#include "embedding_answer.h"

#include <cmath>
#include <span>

#include "api_error.h"

namespace millrace::server {

bool EmbeddingAnswer::advance(std::string& /*out*/, size_t /*max_bytes*/) {
  while (std::optional<Generation::Item> item = generation_.next()) {
    vectors_[item->choice] = std::move(item->event.embedding);
  }
  return generation_.done();
}

std::optional<HttpResponse> EmbeddingAnswer::response() {
  if (generation_.failure()) return failed(*generation_.failure());
  if (!generation_.done()) return std::nullopt;
  try {
    return HttpResponse{.body = body(), .headers = headers_};
  } catch (const ApiError& error) {
    return failed(error);
  }
}

void EmbeddingAnswer::write_usage(JsonWriter& json) const {
  const int64_t tokens = generation_.totals().prompt;
  json.key("usage").begin_object();
  json.field("prompt_tokens", tokens).field("total_tokens", tokens).end_object();
}

const std::vector<float>& EmbeddingAnswer::vector_of(size_t input) const {
  if (vectors_[input].empty()) {
    throw ApiError(503, "the request was cancelled or took longer than the server allows", "", "timeout");
  }
  return vectors_[input];
}

std::vector<float> EmbeddingAnswer::unit_vector(size_t input) const {
  const std::span<const float> embedding = std::span(vector_of(input)).first(dimensions_);
  double squares = 0;
  for (const float x : embedding) squares += static_cast<double>(x) * x;
  if (!std::isfinite(squares)) throw ApiError(500, "the model's hidden states overflow", "", "overflow");
  const double scale = squares > 0 ? 1 / std::sqrt(squares) : 0.0;
  std::vector<float> unit;
  unit.reserve(embedding.size());
  for (const float x : embedding) unit.push_back(static_cast<float>(x * scale));
  return unit;
}

}  // namespace millrace::server
