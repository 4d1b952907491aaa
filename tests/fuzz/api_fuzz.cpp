// Any bytes through all of the server behind its sockets and a tiny model: every endpoint answers with JSON
// and no fault of its own, within the time it is given; streams are events of JSON, Ollama's lines of it. The
// first byte chooses the model and, for a body alone, the endpoint. What begins like HTTP goes through the
// HTTP parser, request by request, as a connection does it; what has a brace is a body; other bytes are edits
// of a body that is right: pairs of a place in its tree and a value to put there. Answers are followed for a
// few steps and then left, as a client that goes away.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "server/api.h"
#include "server/http/http_parser.h"
#include "server/model_set.h"
#include "touch.h"

namespace {

using namespace millrace;
using namespace millrace::server;

struct World {
  std::unique_ptr<ModelSet> models;
  std::unique_ptr<Api> api;
};

World make_world(const char* model) {
  EngineOptions options;
  options.model = model;
  options.threads = 1;
  options.context = 96;
  options.kv_tokens = 1024;
  options.max_running = 4;
  ServerOptions server;
  server.model_id = "m";
  server.stored_responses = 8;
  server.request_timeout_s = 1;
  const std::vector<ModelSpec> specs = {{.name = server.model_id, .engine = options, .keep = true}};
  World world{std::make_unique<ModelSet>(specs, ModelSetOptions{}, Log(true)), nullptr};
  world.models->adopt(server.model_id, Engine::create(options));
  world.api = std::make_unique<Api>(*world.models, server);
  world.api->run_detached = [](const std::shared_ptr<Answer>&) {};
  return world;
}

World& world(size_t which) {
  static World* const worlds = new World[2]{make_world("tests/golden/models/gpt-oss-w32/model.gguf"),
                                            make_world("tests/golden/models/llama3/model.gguf")};
  return worlds[which];
}

void check(bool good) {
  if (!good) __builtin_trap();
}

void check_response(const HttpResponse& response) {
  // 501: the model fills no gaps.
  check(response.status < 500 || response.status == 501 || response.status == 503);
  check(Json::accept(response.body));
}

// Server-sent events: lines `data: JSON`, `event: name`, comments, and nothing else.
void check_events(std::string_view text) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    check(end != std::string_view::npos);
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (line.starts_with("data: ")) {
      check(line == "data: [DONE]" || Json::accept(line.substr(6)));
    } else {
      check(line.empty() || line.starts_with("event: ") || line.starts_with(":"));
    }
  }
}

// Ollama's streams: each line is JSON.
void check_lines(std::string_view text) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    check(end != std::string_view::npos);
    check(Json::accept(text.substr(0, end)));
    text.remove_prefix(end + 1);
  }
}

void follow(std::unique_ptr<Answer> answer, bool lines) {
  struct News {
    std::mutex mutex;
    std::condition_variable changed;
    bool there = false;
  };
  const auto news = std::make_shared<News>();
  answer->on_ready([news] {
    const std::lock_guard lock(news->mutex);
    news->there = true;
    news->changed.notify_one();
  });
  constexpr int kSteps = 12;
  for (int step = 0; step < kSteps; ++step) {
    std::string out;
    const bool done = answer->advance(out, 1 << 16);
    if (lines) {
      check_lines(out);
    } else {
      check_events(out);
    }
    if (const std::optional<HttpResponse> response = answer->response()) check_response(*response);
    if (done) return;
    std::unique_lock lock(news->mutex);
    check(news->changed.wait_for(lock, std::chrono::seconds(8), [&] { return news->there; }));
    news->there = false;
  }
}

// Every value of the tree, in order, until the `left`-th.
Json* find_place(Json& node, size_t& left) {
  if (left-- == 0) return &node;
  if (!node.is_structured()) return nullptr;
  for (Json& child : node) {
    if (Json* const found = find_place(child, left)) return found;
  }
  return nullptr;
}

// A body with everything in it that an endpoint reads.
constexpr std::string_view kBodies[] = {
    R"({"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text",
     "text": "a"}]}, {"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [{"id": "c", "type": "function",
     "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content": "4"}],
     "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object",
     "properties": {"a": {"type": "string"}}, "required": ["a"]}, "strict": true}}], "tool_choice": "auto", "max_tokens": 4,
     "stream": true, "stream_options": {"include_usage": true}, "n": 2, "seed": 1, "stop": ["x", "yz"], "logprobs": true,
     "top_logprobs": 2, "logit_bias": {"7": -100}, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
     "presence_penalty": 1, "repetition_penalty": 1.1, "reasoning_effort": "low", "response_format": {"type": "text"},
     "chat_template_kwargs": {"a": 1}, "priority": 1, "cache_salt": "s", "parallel_tool_calls": true})",
    R"({"model": "m", "instructions": "i", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
     {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
     {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
     {"type": "function_call_output", "call_id": "c", "output": "o"}], "tools": [{"type": "function", "name": "f",
     "parameters": {"type": "object"}, "strict": false}], "tool_choice": "auto", "max_output_tokens": 4, "stream": false,
     "reasoning": {"effort": "high"}, "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}, "store": true,
     "temperature": 1, "top_logprobs": 1, "include": ["message.output_text.logprobs"], "previous_response_id": null,
     "background": false})",
    R"({"prompt": ["a b", [1, 2, 3]], "n": 2, "max_tokens": 3, "echo": true, "stream": false, "stop": "q", "logprobs": null,
     "ignore_eos": true, "regex": "(ab|c)+", "grammar": null, "suffix": null, "best_of": 2, "user": "u"})",
    R"({"input": [[1, 2], [3], "a b"], "pooling": "last", "dimensions": 5, "encoding_format": "base64", "model": "m"})",
    R"({"content": "a", "add_special": false, "parse_special": true, "messages": null})",
    R"({"tokens": [1, 200, 3], "show_special": false})",
    R"({"messages": [{"role": "user", "content": "a"}], "tools": [], "reasoning_effort": "low"})",
    R"({"model": "m", "max_tokens": 4, "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content":
     [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature":
     ""}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}]}, {"role": "user", "content": [{"type":
     "tool_result", "tool_use_id": "c", "content": "o", "is_error": false}]}], "tools": [{"name": "f", "description": "d",
     "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}], "tool_choice": {"type": "auto",
     "disable_parallel_tool_use": true}, "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 5,
     "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}, "stream": true})",
    R"({"model": "m", "messages": [{"role": "user", "content": "a"}], "system": "s", "tools": []})",
    R"({"input": [{"role": "user", "content": "a"}], "instructions": "i", "truncation": "auto"})",
    R"({"items": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}], "metadata":
     {"a": "b"}})",
    R"({"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": true})",
    R"({"input_prefix": "a", "input_suffix": "b", "prompt": "c", "input_extra": [{"filename": "f", "text": "t"}],
     "n_predict": 3, "t_max_predict_ms": 5, "stream": true})",
    R"({"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls":
     [{"function": {"name": "f", "arguments": {"a": 1}}}]}, {"role": "tool", "tool_name": "f", "content": "o"}], "tools":
     [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "format": "json", "think": true,
     "keep_alive": "5m", "options": {"num_predict": 3, "temperature": 0.5, "stop": ["x"], "seed": 1, "top_k": 3},
     "stream": true})",
    R"({"model": "m", "prompt": "a", "system": "s", "suffix": null, "raw": false, "context": [1, 2], "format": {"type":
     "object"}, "images": [], "template": null, "options": {"num_predict": 2}, "keep_alive": 10, "stream": false})",
    R"({"model": "m", "input": ["a", "b"], "truncate": true, "dimensions": 4, "keep_alive": -1, "options": {}})",
    R"({"model": "m", "verbose": true})"};

std::string edited(std::string_view edits, std::string_view text) {
  Json body = Json::parse(text);
  static const Json kValues = Json::parse(
      R"([null, true, false, 0, 1, 2, -1, 3.5, 1e300, 9223372036854775807, 18446744073709551615, -9223372036854775808,
          "", "a", "auto", "required", "none", "low", "high", "user", "assistant", "tool", "developer", "f", "text",
          "json_object", "json_schema", "function", "\u0000", "<|end|>", "\ud83d\ude00", "[a-", "(a|b)*", "root ::= \"a\"",
          [], {}, [[]], [1, 2, 3], ["a", 1], [null], {"a": 1}, {"type": "text"}, {"type": "object"}, {"type": "string"},
          {"type": "function", "name": "f"}, {"type": "json_object"}, {"effort": "low"}, {"include_usage": true},
          {"role": "user", "content": "a"}, [{"role": "user", "content": "a"}], [{"type": "input_text", "text": "b"}]])");
  for (size_t i = 0; i + 1 < edits.size(); i += 2) {
    size_t left = static_cast<uint8_t>(edits[i]);
    if (Json* const place = find_place(body, left)) {
      *place = kValues[static_cast<uint8_t>(edits[i + 1]) % kValues.size()];
    }
  }
  return body.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Reading a few kilobytes may take no longer than a moment, whatever they ask for.
void answer(Api& api, const HttpRequest& request, const Client& client) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  Reply reply = api.handle(request, client, {.deadline = start + std::chrono::seconds(2)});
  check(Clock::now() - start < std::chrono::seconds(8));
  check(!reply.unfinished);
  if (reply.answer) {
    follow(std::move(reply.answer), request.path.starts_with("/api/"));
  } else if (reply.response.content_type == "application/json") {
    check_response(reply.response);
  } else {
    check(reply.response.status < 500);  // the page, metrics, nothing at all
  }
}

bool begins_like_http(std::string_view bytes) {
  constexpr std::string_view kBegins[] = {"POST /", "GET /", "DELETE /", "OPTIONS ", "HEAD /", "PUT /"};
  return std::any_of(std::begin(kBegins), std::end(kBegins),
                     [&](std::string_view begin) { return bytes.starts_with(begin); });
}

void answer_http(Api& api, std::string bytes) {
  const HttpLimits limits{.header_bytes = 2000, .body_bytes = 8000};
  HttpParser parser(limits);
  while (!bytes.empty()) {
    const HttpParser::State before = parser.state();
    const size_t taken = parser.feed(bytes);
    check(taken <= bytes.size());
    bytes.erase(0, taken);
    if (parser.state() == HttpParser::State::kFailed) {
      check(parser.error_status() >= 400);
      return;
    }
    if (parser.state() == HttpParser::State::kDone) {
      Client client;
      client.request_id = "r";
      client.remote = "127.0.0.1";
      if (const std::optional<HttpResponse> refusal = api.admit(parser.head(), client)) {
        check_response(*refusal);
        return;
      }
      const HttpRequest request = parser.take();
      answer(api, request, client);
      parser = HttpParser(limits);
    } else if (taken == 0 && parser.state() == before) {
      return;  // more would have to come
    }
  }
}

}  // namespace

// Events that nobody has read yet lie in the engine's pool of buffers, where the sanitizer does not look: it
// would take what they hold for lost.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr std::string_view kPaths[] = {"/v1/chat/completions",
                                         "/v1/responses",
                                         "/v1/completions",
                                         "/v1/embeddings",
                                         "/tokenize",
                                         "/detokenize",
                                         "/apply-template",
                                         "/v1/messages",
                                         "/v1/messages/count_tokens",
                                         "/v1/responses/input_tokens",
                                         "/v1/conversations",
                                         "/v1/rerank",
                                         "/infill",
                                         "/api/chat",
                                         "/api/generate",
                                         "/api/embed",
                                         "/api/show"};
  // The first of them have most of the values of a byte, as kept inputs know them.
  constexpr size_t kFirst = 7, kValues = 98;
  static_assert(std::size(kPaths) == std::size(kBodies));
  if (size == 0) return 0;
  Api& api = *world(data[0] >= 128 ? 1 : 0).api;
  const std::string_view rest(reinterpret_cast<const char*>(data + 1), size - 1);
  if (begins_like_http(rest)) {
    answer_http(api, std::string(rest));
    return 0;
  }
  HttpRequest request;
  request.method = "POST";
  const size_t low = data[0] % 128;
  const size_t which =
      low < kValues ? data[0] % kFirst : kFirst + (low - kValues) % (std::size(kPaths) - kFirst);
  request.path = request.target = kPaths[which];
  request.body = rest.find('{') == std::string_view::npos ? edited(rest, kBodies[which]) : std::string(rest);
  Client client;
  client.request_id = "r";
  client.limits.max_priority = 1000000;
  answer(api, request, client);
  return 0;
}
