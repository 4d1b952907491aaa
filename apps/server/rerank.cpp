// POST /v1/rerank (also /rerank and /v2/rerank): a query and documents in, the documents by how well they
// answer it out, in the shape of Jina's and Cohere's APIs. A document's score is a cross-encoder's of query
// and document, or the cosine of its embedding and the query's.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
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
  size_t top = 0;        // so many of the best are given
  bool texts = false;    // with their texts
  bool pairs = false;    // input i is query and document i; else the query is input 0, document i input i + 1
  bool sigmoid = false;  // of a pair's score
};

class RerankAnswer final : public EmbeddingAnswer {
 public:
  RerankAnswer(Api& api, ModelLease model, const std::vector<Request>& requests, size_t dimensions,
               Ranking ranking, Headers headers, Timeline::Entry entry)
      : EmbeddingAnswer(std::move(model), api.timeline(), requests, dimensions, std::move(headers),
                        std::move(entry)),
        ranking_(std::move(ranking)) {}

 private:
  std::vector<double> scores() const { return ranking_.pairs ? pair_scores() : cosines(); }

  std::vector<double> pair_scores() const {
    std::vector<double> out;
    for (size_t i = 0; i < inputs(); ++i) {
      const double score = vector_of(i).at(0);
      out.push_back(ranking_.sigmoid ? 1.0 / (1.0 + std::exp(-score)) : score);
    }
    return out;
  }

  std::vector<double> cosines() const {
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
    write_usage(json);
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
  std::vector<int32_t> tokens = engine.tokenize(text, true, true, most_counted(context));
  if (tokens.empty()) bad_field(path, "found no tokens, expected at least one");
  if (std::ssize(tokens) > context) throw context_exceeded(tokens.size(), context, path);
  return tokens;
}

// The pair as tokens, with where the document begins.
Request pair_request(const Engine& engine, const Request& base, const std::string& query,
                     const std::string& document, const std::string& path) {
  const int32_t context = engine.model().context;
  if (document.empty()) bad_field(path, "found an empty string, expected some text");
  check_text_may_fit(engine, query, "query");
  check_text_may_fit(engine, document, path);
  Engine::Pair pair = engine.tokenize_pair(query, document, most_counted(context));
  if (std::ssize(pair.tokens) > context) throw context_exceeded(pair.tokens.size(), context, path);
  Request request = base;
  request.tokens = std::move(pair.tokens);
  request.second_text = pair.second_text;
  request.embedding = Pooling::kScores;
  return request;
}

// One request for each pair, or one for each text.
std::vector<Request> read_inputs(const Fields& fields, const ServedModel& model, const Request& base,
                                 const Ranking& ranking) {
  const std::string query = fields.required_text("query");
  std::vector<Request> requests;
  if (ranking.pairs && query.empty()) bad_field("query", "found an empty string, expected some text");
  if (!ranking.pairs) {
    requests.push_back(base);
    requests.back().tokens = tokens_of(model.engine(), query, "query");
  }
  for (size_t i = 0; i < ranking.documents.size(); ++i) {
    const std::string path = element_path("documents", i);
    if (ranking.pairs) {
      requests.push_back(pair_request(model.engine(), base, query, ranking.documents[i], path));
    } else {
      requests.push_back(base);
      requests.back().tokens = tokens_of(model.engine(), ranking.documents[i], path);
    }
  }
  return requests;
}

// A head that ranks, none, or an error.
bool ranks_pairs(Api& api, const ModelLease& model) {
  const ModelInfo& info = model->info();
  if (info.labels == 1) return true;
  if (info.labels == 0 && !api.models().status(model->id()).file.classifies) return false;
  throw ApiError(501,
                 fmt::format("the model '{}' is a classifier {}: rank with a cross-encoder of one label or a "
                             "model for embeddings",
                             model->id(),
                             info.labels > 1 ? fmt::format("of {} labels", info.labels)
                                             : "whose head is not computed here"),
                 "model", "unsupported_value");
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
  Ranking ranking{.id = new_id("rank-", 24), .documents = read_documents(fields)};
  constexpr int64_t kAll = kMaxDocuments;
  ranking.top = static_cast<size_t>(fields.integer("top_n", 1, 1 << 28).value_or(kAll));
  ranking.texts = fields.boolean("return_documents").value_or(false);
  Request base = read_service(fields, api, client);
  base.embedding = info.pooling;
  ranking.pairs = ranks_pairs(api, model);
  ranking.sigmoid = info.score_sigmoid;
  const std::vector<Request> requests = read_inputs(fields, *model, base, ranking);
  if (!ranking.texts) ranking.documents.clear();
  Timeline::Entry entry = entry_of(ranking.id, "rerank", client);
  Headers headers = warn_ignored(
      fields, {"user", "max_tokens_per_doc", "max_chunks_per_doc", "rank_fields", "truncation"}, api, client);
  Reply reply;
  reply.answer = std::make_unique<RerankAnswer>(
      api, model, requests, ranking.pairs ? size_t{1} : static_cast<size_t>(info.embedding_size),
      std::move(ranking), std::move(headers), std::move(entry));
  return reply;
}

}  // namespace millrace::server
