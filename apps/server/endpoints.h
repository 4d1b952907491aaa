// The endpoints: each takes a request and gives its reply, or throws ApiError (or Error, from the engine).
#pragma once

#include <string>
#include <string_view>

#include "api.h"

namespace millrace::server {

Reply chat_completions(Api& api, const HttpRequest& request, const Client& client);
Reply completions(Api& api, const HttpRequest& request, const Client& client);

// /v1/responses and what lies under it
Reply create_response(Api& api, const HttpRequest& request, const Client& client);
Reply count_input_tokens(Api& api, const HttpRequest& request, const Client& client);
Reply get_response(Api& api, const std::string& id, const HttpRequest& request, const Client& client);
Reply get_input_items(Api& api, const std::string& id, const HttpRequest& request, const Client& client);
Reply cancel_response(Api& api, const std::string& id, const Client& client);
Reply delete_response(Api& api, const std::string& id, const Client& client);

// /v1/conversations, and what lies under it: `rest` is ID, ID/items or ID/items/ITEM
Reply create_conversation(Api& api, const HttpRequest& request, const Client& client);
Reply conversation_path(Api& api, const std::string& method, const std::string& rest,
                        const HttpRequest& request, const Client& client);

// anthropic_messages.cpp
Reply create_message(Api& api, const HttpRequest& request, const Client& client);
Reply count_message_tokens(Api& api, const HttpRequest& request, const Client& client);

Reply infill(Api& api, const HttpRequest& request, const Client& client);
Reply rerank(Api& api, const HttpRequest& request, const Client& client);
Reply embeddings(Api& api, const HttpRequest& request, const Client& client);

// Ollama's API, under /api: ollama.cpp, ollama_models.cpp, ollama_pull.cpp and ollama_delete.cpp
Reply ollama_chat(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_generate(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_embed(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_embeddings(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_tags(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_ps(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_show(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_pull(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_delete(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_version(Api& api, const HttpRequest& request, const Client& client);
Reply ollama_not_here(Api& api, const HttpRequest& request, const Client& client);

// models_info.cpp
Reply list_models(Api& api);
Reply get_model(Api& api, const std::string& id);
Reply load_model(Api& api, const HttpRequest& request);
Reply unload_model(Api& api, const HttpRequest& request);

// info.cpp
Reply tokenize(Api& api, const HttpRequest& request);
Reply detokenize(Api& api, const HttpRequest& request);
Reply apply_template(Api& api, const HttpRequest& request);
Reply health(Api& api);
Reply live(Api& api);
Reply ready(Api& api);

// 405 with the methods that there are (api.cpp).
Reply wrong_method(std::string_view allowed);

HttpResponse metrics(Api& api);                                 // Prometheus' text format
HttpResponse stats_json(Api& api, const HttpRequest& request);  // docs/server.md

}  // namespace millrace::server
