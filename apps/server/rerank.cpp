// POST /v1/rerank (also /rerank and /v2/rerank): a query and documents in, the documents by how well they
// answer it out, in the shape of Jina's and Cohere's APIs. A document's score is the cosine of its embedding
// and the query's.
#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "api_error.h"
#include "base/json_writer.h"
#include "embedding_answer.h"
#include "endpoints.h"
#include "ids.h"
#include "prompt_bounds.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

constexpr size_t kMaxDocuments = 2048;  // as many as /v1/embeddings takes

struct Ranking {
  std::string id = {};
  std::vector<std::string> documents = {};
  size_t top = 0;      // so many of the best are given
  bool texts = false;  // with their texts
};

class RerankAnswer final : public EmbeddingAnswer {
 public:
  RerankAnswer(Api& api, ModelLease model, const std::vector<Request>& requests, size_t dimensions,
               Ranking ranking, Headers headers, Timeline::Entry entry)
      : EmbeddingAnswer(std::move(model), api.timeline(), requests, dimensions, std::move(headers),
                        std::move(entry)),
        ranking_(std::move(ranking)) {}

 private:
  // The query is input 0, document i input i + 1.
  std::vector<double> scores() const {
    const std::vector<float> query = unit_vector(0);
    std::vector<double> out;
    for (size_t i = 1; i < inputs(); ++i) {
      const std::vector<float> document = unit_vector(i);
      out.push_back(std::inner_product(query.begin(), query.end(), document.begin(), 0.0));
    }
    return out;
  }

  std::string body() const override {
    const std::vector<double> scores = this->scores();
    std::vector<size_t> order(scores.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    order.resize(std::min(order.size(), ranking_.top));
    std::string out;
    JsonWriter json(out);
    json.begin_object().field("id", ranking_.id).field("object", "list");
    json.field("model", generation_.model().id()).key("results").begin_array();
    for (const size_t i : order) {
      json.begin_object().field("index", i).field("relevance_score", scores[i]);
      if (ranking_.texts) {
        json.key("document").begin_object().field("text", ranking_.documents[i]).end_object();
      }
      json.end_object();
    }
    json.end_array();
    const int64_t tokens = generation_.totals().prompt;
    json.key("usage")
        .begin_object()
        .field("prompt_tokens", tokens)
        .field("total_tokens", tokens)
        .end_object();
    json.end_object();
    return out;
  }

  const Ranking ranking_;
};

// A string, or an object with one under `text`.
std::string read_document(const Json& value, const std::string& path) {
  if (value.is_object()) return Fields(value, path).required_text("text");
  if (!value.is_string()) wrong_type(path, value, "a string or an object with a text");
  return value.get<std::string>();
}

std::vector<std::string> read_documents(const Fields& fields) {
  const Json* list = fields.array("documents");
  if (list == nullptr) bad_field("documents", "is missing, expected an array", "missing_required_parameter");
  if (list->empty()) bad_field("documents", "found an empty array, expected at least one", "empty_array");
  if (list->size() > kMaxDocuments) {
    bad_field("documents",
              fmt::format("found {} documents, expected at most {}", list->size(), kMaxDocuments),
              "array_above_max_length");
  }
  std::vector<std::string> documents;
  for (size_t i = 0; i < list->size(); ++i) {
    documents.push_back(read_document((*list)[i], element_path("documents", i)));
  }
  return documents;
}

std::vector<int32_t> tokens_of(const Engine& engine, const std::string& text, const std::string& path) {
  const int32_t context = engine.model().context;
  if (text.empty()) bad_field(path, "found an empty string, expected some text");
  check_text_may_fit(engine, text, path);
  std::vector<int32_t> tokens = engine.tokenize(text, true, true, static_cast<size_t>(context));
  if (tokens.empty()) bad_field(path, "found no tokens, expected at least one");
  if (std::ssize(tokens) > context) throw context_exceeded(tokens.size(), context, path);
  return tokens;
}

}  // namespace

Reply rerank(Api& api, const HttpRequest& http, const Client& client) {
  const Json body = parse_object(http.body);
  const Fields fields(body);
  const ModelLease model = api.model_of(fields);
  const ModelInfo& info = model->info();
  if (info.embedding_size == 0) {
    throw ApiError(501,
                   fmt::format("the device {} gives no hidden states, so nothing can be ranked", info.device),
                   "", "unsupported_value");
  }
  if (api.models().status(model->id()).file.classifies) {
    throw ApiError(
        501,
        fmt::format("the model '{}' is a cross-encoder, whose head is not computed here: rank with a "
                    "model for embeddings",
                    model->id()),
        "model", "unsupported_value");
  }
  Ranking ranking{.id = new_id("rank-", 24), .documents = read_documents(fields)};
  constexpr int64_t kAll = kMaxDocuments;
  ranking.top = static_cast<size_t>(fields.integer("top_n", 1, 1 << 28).value_or(kAll));
  ranking.texts = fields.boolean("return_documents").value_or(false);
  Request base = read_service(fields, api, client);
  base.embedding = info.pooling;
  std::vector<Request> requests(1 + ranking.documents.size(), base);
  requests[0].tokens = tokens_of(model->engine(), fields.required_text("query"), "query");
  for (size_t i = 0; i < ranking.documents.size(); ++i) {
    requests[i + 1].tokens = tokens_of(model->engine(), ranking.documents[i], element_path("documents", i));
  }
  if (!ranking.texts) ranking.documents.clear();
  Timeline::Entry entry;
  entry.id = ranking.id;
  entry.request_id = client.request_id;
  entry.endpoint = "rerank";
  Headers headers = warn_ignored(
      fields, {"user", "max_tokens_per_doc", "max_chunks_per_doc", "rank_fields", "truncation"}, api, client);
  Reply reply;
  reply.answer =
      std::make_unique<RerankAnswer>(api, model, requests, static_cast<size_t>(info.embedding_size),
                                     std::move(ranking), std::move(headers), std::move(entry));
  return reply;
}

}  // namespace millrace::server
