// Who may ask, what answers, and the one place where what is thrown becomes a response.
#include "api.h"

#include <fmt/core.h>

#include <new>

#include "anthropic_error.h"
#include "api_error.h"
#include "assets.h"
#include "endpoints.h"
#include "ollama_answer.h"

namespace millrace::server {

void Counters::count(int status) {
  ++requests;
  ++(status < 400 ? status_2xx : status < 500 ? status_4xx : status_5xx);
}

namespace {

// What those ask who watch the server: under any name, and without a key.
bool is_probe(std::string_view path) { return path == "/health" || path == "/ready" || path == "/live"; }

// What needs no key: the page, which asks for the key itself.
bool is_open(const HttpRequest& request) {
  return request.method == "OPTIONS" || find_asset(request.path) != nullptr;
}

}  // namespace

Api::Api(ModelSet& models, const ServerOptions& options)
    : models_(models),
      options_(options),
      log_(options.log_json),
      created_(static_cast<int64_t>(unix_time())),
      timeline_(options.timeline),
      store_(options.stored_responses, options.stored_bytes),
      conversations_(options.stored_responses, options.stored_bytes),
      admission_(options_) {}

Api::~Api() = default;

double Api::uptime_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Api::reload_keys() {
  if (options_.keys_file.empty()) return;
  try {
    const size_t count = admission_.reload_keys();
    log_.write("info", "keys read again", {{"keys", static_cast<double>(count)}});
  } catch (const std::exception& error) {
    log_.write("error", "keys not read, the old ones stay", {{"reason", std::string(error.what())}});
  }
}

std::optional<HttpResponse> Api::admit(const HttpRequest& head, Client& client) {
  admission_.see_through_proxy(head, client);
  if (is_probe(head.path)) return std::nullopt;
  if (auto refusal = admission_.refuse_site(head)) return refusal;
  if (is_open(head)) return std::nullopt;
  if (auto refusal = admission_.refuse_key(head, client)) return refusal;
  if (head.method != "POST") return std::nullopt;
  if (draining_) {
    ApiError error(503, "the server is shutting down", "", "shutting_down");
    error.retry_after_s = 1;
    return error_response(error);
  }
  if (auto refusal = SiteRules::refuse_content_type(head)) return refusal;
  return admission_.refuse_amount(client);
}

void Api::add_headers(HttpResponse& response, const HttpRequest& request) const {
  if (response.error && is_anthropic_path(request.path))
    response.body = anthropic_error_body(*response.error);
  if (response.error && request.path.starts_with("/api/")) response.body = ollama_error(*response.error).body;
  if (options_.cors_origin.empty() || request.header("origin").empty()) return;
  response.headers.emplace_back("access-control-allow-origin", options_.cors_origin);
  if (options_.cors_origin != "*") response.headers.emplace_back("vary", "origin");
  response.headers.emplace_back("access-control-expose-headers", "x-request-id");
  if (request.method != "OPTIONS") return;
  response.headers.emplace_back("access-control-allow-methods", "GET, POST, DELETE, OPTIONS");
  const std::string_view wanted = request.header("access-control-request-headers");
  response.headers.emplace_back("access-control-allow-headers",
                                wanted.empty() ? "authorization, content-type" : std::string(wanted));
  response.headers.emplace_back("access-control-max-age", "600");
}

std::string Api::failure() {
  const std::string failure = models_.failure();
  if (failure.empty()) return {};
  std::call_once(failure_logged_, [&] { log_.write("error", "the device failed", {{"reason", failure}}); });
  return without_paths(failure);
}

std::string Api::fallback() { return without_paths(models_.fallback()); }

ModelLease Api::model_of(const Fields& fields) {
  const Json* stream = fields.find("stream");
  const bool streams = stream != nullptr && stream->is_boolean() && stream->get<bool>();
  return lease(fields.text("model").value_or(""), streams ? StreamForm::kEvents : StreamForm::kNone);
}

ModelLease Api::writer_of(const Fields& fields) {
  ModelLease model = model_of(fields);
  check_writes(model->info());
  return model;
}

void check_writes(const ModelInfo& model) {
  if (!model.encoder) return;
  throw ApiError(400,
                 fmt::format("{} is a text encoder ({}): it writes no text; POST /v1/embeddings serves it",
                             model.name, model.architecture),
                 "model", "unsupported_value");
}

ModelLease Api::lease(const std::string& name, StreamForm stream) {
  if (ModelLease model = models_.lease(name)) return model;
  throw ModelNotLoaded{name, stream};
}

HttpResponse Api::error_for(const HttpRequest& request, const ApiError& error) const {
  if (request.path.starts_with("/api/")) return ollama_error(error);
  HttpResponse response = error_response(error);
  if (is_anthropic_path(request.path)) response.body = anthropic_error_body(error);
  return response;
}

Reply Api::work_ended(const HttpRequest& request, WorkEnded::Why why) const {
  if (why == WorkEnded::Why::kSliceUsed) return {.unfinished = true};
  if (why == WorkEnded::Why::kCancelled) {
    return {.response = error_for(request, {400, "the client has gone", "", "cancelled"})};
  }
  return {.response = error_for(
              request, {400,
                        fmt::format("reading this request took longer than {} s (--request-work-timeout): a "
                                    "smaller one, or a simpler schema, can be answered",
                                    options_.work_timeout_s),
                        "", "request_too_expensive"})};
}

Reply Api::handle(const HttpRequest& request, const Client& client, const WorkLimits& limits) {
  const WorkBudget budget(limits);
  const ClientUse::Scope whose(client.use);
  const auto refuse = [&](const ApiError& error) { return Reply{.response = error_for(request, error)}; };
  try {
    return route(request, client);
  } catch (const WorkEnded& ended) {
    return work_ended(request, ended.why());
  } catch (const ModelNotLoaded& missing) {
    return {.answer = std::make_unique<LoadingAnswer>(*this, missing, request, client)};
  } catch (const ApiError& error) {
    return refuse(error);
  } catch (const Error& error) {
    const ApiError answer = to_api_error(error.code(), error.what());
    if (answer.status == 500) {
      log_.write("error", "request failed",
                 {{"request_id", client.request_id}, {"reason", std::string(error.what())}});
    }
    return refuse(answer);
  } catch (const std::bad_alloc&) {
    return refuse({503, "out of memory", "", "out_of_memory"});
  } catch (const std::exception& error) {
    log_.write(
        "error", "internal error",
        {{"request_id", client.request_id}, {"path", request.path}, {"reason", std::string(error.what())}});
    return refuse({500, "internal error", "", "server_error"});
  }
}

Reply wrong_method(std::string_view allowed) {
  Reply reply{.response = error_response(
                  {405, fmt::format("expected the method {}", allowed), "", "method_not_allowed"})};
  reply.response.headers.emplace_back("allow", std::string(allowed));
  return reply;
}

namespace {

using Handler = Reply (*)(Api&, const HttpRequest&, const Client&);
struct Route {
  std::string_view method, path;
  Handler handler;
};
constexpr Route kRoutes[] = {
    {"POST", "/v1/chat/completions", chat_completions},
    {"POST", "/v1/completions", completions},
    {"POST", "/v1/responses", create_response},
    {"POST", "/v1/responses/input_tokens", count_input_tokens},
    {"POST", "/v1/conversations", create_conversation},
    {"POST", "/v1/messages", create_message},
    {"POST", "/v1/messages/count_tokens", count_message_tokens},
    {"POST", "/v1/embeddings", embeddings},
    {"POST", "/v1/rerank", rerank},
    {"POST", "/v2/rerank", rerank},
    {"POST", "/rerank", rerank},
    {"POST", "/infill", infill},
    {"GET", "/v1/models", [](Api& api, const HttpRequest&, const Client&) { return list_models(api); }},
    {"POST", "/v1/models/load",
     [](Api& api, const HttpRequest& r, const Client&) { return load_model(api, r); }},
    {"POST", "/v1/models/unload",
     [](Api& api, const HttpRequest& r, const Client&) { return unload_model(api, r); }},
    {"POST", "/api/chat", ollama_chat},
    {"POST", "/api/generate", ollama_generate},
    {"POST", "/api/embed", ollama_embed},
    {"POST", "/api/embeddings", ollama_embeddings},
    {"GET", "/api/tags", ollama_tags},
    {"GET", "/api/ps", ollama_ps},
    {"POST", "/api/show", ollama_show},
    {"GET", "/api/version", ollama_version},
    {"POST", "/api/pull", ollama_pull},
    {"POST", "/api/push", ollama_not_here},
    {"POST", "/api/create", ollama_not_here},
    {"POST", "/api/copy", ollama_not_here},
    {"DELETE", "/api/delete", ollama_delete},
    {"POST", "/tokenize", [](Api& api, const HttpRequest& r, const Client&) { return tokenize(api, r); }},
    {"POST", "/detokenize", [](Api& api, const HttpRequest& r, const Client&) { return detokenize(api, r); }},
    {"POST", "/apply-template",
     [](Api& api, const HttpRequest& r, const Client&) { return apply_template(api, r); }},
    {"GET", "/health", [](Api& api, const HttpRequest&, const Client&) { return health(api); }},
    {"GET", "/live", [](Api& api, const HttpRequest&, const Client&) { return live(api); }},
    {"GET", "/ready", [](Api& api, const HttpRequest&, const Client&) { return ready(api); }},
    {"GET", "/metrics",
     [](Api& api, const HttpRequest&, const Client&) {
       return Reply{metrics(api), {}};
     }},
    {"GET", "/stats",
     [](Api& api, const HttpRequest& r, const Client&) {
       return Reply{stats_json(api, r), {}};
     }},
};

// /v1/responses/ID, /v1/responses/ID/cancel, /v1/responses/ID/input_items
Reply route_response(Api& api, const HttpRequest& request, const std::string& method, std::string rest,
                     const Client& client) {
  const size_t slash = rest.find('/');
  const std::string action = slash == std::string::npos ? "" : rest.substr(slash + 1);
  rest.resize(std::min(rest.size(), slash));
  if (action.empty() && slash == std::string::npos) {
    if (method == "GET") return get_response(api, rest, request, client);
    if (method == "DELETE") return delete_response(api, rest, client);
    return wrong_method("GET, DELETE");
  }
  if (action == "cancel") return method == "POST" ? cancel_response(api, rest, client) : wrong_method("POST");
  if (action == "input_items") {
    return method == "GET" ? get_input_items(api, rest, request, client) : wrong_method("GET");
  }
  throw ApiError(404, fmt::format("there is nothing at {}", request.path), "", "not_found");
}

}  // namespace

Reply Api::route(const HttpRequest& request, const Client& client) {
  if (request.method == "OPTIONS") {
    HttpResponse none{.status = 204};
    none.content_type.clear();
    return {.response = none};
  }
  const std::string method = request.method == "HEAD" ? "GET" : request.method;
  std::string path = request.path;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const Route* same_path = nullptr;
  for (const Route& route : kRoutes) {
    if (route.path != path) continue;
    if (route.method == method) return route.handler(*this, request, client);
    same_path = &route;
  }
  if (same_path != nullptr) return wrong_method(same_path->method);
  constexpr std::string_view kModels = "/v1/models/", kResponses = "/v1/responses/",
                             kConversations = "/v1/conversations/";
  if (path.starts_with(kModels)) {
    return method == "GET" ? get_model(*this, path.substr(kModels.size())) : wrong_method("GET");
  }
  if (path.starts_with(kResponses)) {
    return route_response(*this, request, method, path.substr(kResponses.size()), client);
  }
  if (path.starts_with(kConversations)) {
    return conversation_path(*this, method, path.substr(kConversations.size()), request, client);
  }
  if (const Asset* asset = find_asset(request.path)) {
    return method == "GET" ? Reply{.response = asset_response(*asset, request)} : wrong_method("GET");
  }
  throw ApiError(404, fmt::format("there is nothing at {} (see /openapi.json)", request.path.substr(0, 200)),
                 "", "not_found");
}

}  // namespace millrace::server
