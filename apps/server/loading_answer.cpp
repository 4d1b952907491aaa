#include "loading_answer.h"

#include <chrono>
#include <mutex>
#include <stop_token>
#include <utility>

#include "api.h"

namespace millrace::server {

// Shared with the thread that loads and the one that handles, which may come to their end after the answer.
struct LoadingAnswer::State {
  State(Api& the_api, HttpRequest the_request, Client the_client)
      : api(the_api), request(std::move(the_request)), client(std::move(the_client)) {}

  void finish(Reply made) {
    std::function<void()> tell;
    {
      const std::lock_guard lock(mutex);
      reply = std::move(made);
      ready = true;
      tell = notify;
    }
    if (tell) tell();
  }

  Api& api;
  const HttpRequest request;
  Client client;
  const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  std::mutex mutex;
  std::function<void()> notify;
  bool ready = false, abandoned = false;
  std::stop_source stop;  // of the work when it is abandoned
  Reply reply;            // once ready it is the answer's alone
};

LoadingAnswer::LoadingAnswer(Api& api, const ModelNotLoaded& missing, const HttpRequest& request,
                             const Client& client)
    : form_(missing.stream),
      named_events_(request.path.starts_with("/v1/responses") || request.path.starts_with("/v1/messages")),
      state_(std::make_shared<State>(api, request, client)) {
  api.models().load(missing.name, [state = state_](const ModelLease& lease, std::optional<ApiError> error) {
    {
      const std::lock_guard lock(state->mutex);
      if (state->abandoned) return;
    }
    if (error) {
      state->finish({.response = state->api.error_for(state->request, *error)});
      return;
    }
    // The lease keeps the model in its place until the request has its own.
    state->api.run_work([state, lease] {
      {
        const std::lock_guard lock(state->mutex);
        if (state->abandoned) return;
      }
      state->client.load_s =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - state->start).count();
      const double seconds = state->api.options().work_timeout_s;
      state->finish(state->api.handle(
          state->request, state->client,
          {.deadline = WorkLimits::Clock::now() + std::chrono::duration_cast<WorkLimits::Clock::duration>(
                                                      std::chrono::duration<double>(seconds)),
           .stop = state->stop.get_token()}));
    });
  });
}

LoadingAnswer::~LoadingAnswer() {
  state_->stop.request_stop();
  const std::lock_guard lock(state_->mutex);
  state_->abandoned = true;
  state_->notify = nullptr;
}

bool LoadingAnswer::undecided() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->ready;
}

Answer* LoadingAnswer::inner() const {
  const std::lock_guard lock(state_->mutex);
  return state_->ready ? state_->reply.answer.get() : nullptr;
}

void LoadingAnswer::on_ready(std::function<void()> notify) {
  notify_ = notify;
  bool now = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->notify = notify;
    now = state_->ready;
  }
  if (now) notify();
}

bool LoadingAnswer::advance(std::string& out, size_t max_bytes) {
  if (undecided()) return false;
  if (Answer* answer = inner()) {
    if (!std::exchange(began_, true)) answer->on_ready(notify_);
    return answer->advance(out, max_bytes);
  }
  // It came to nothing. The head of the stream may have been sent, so the error is an event too.
  if (streaming() && !std::exchange(ended_, true)) {
    const std::string& body = state_->reply.response.body;
    if (form_ == StreamForm::kLines) {
      out.append(body).append("\n");
    } else {
      out.append(named_events_ ? "event: error\ndata: " : "data: ").append(body).append("\n\n");
    }
  }
  return true;
}

std::optional<HttpResponse> LoadingAnswer::response() {
  if (undecided()) return std::nullopt;
  Answer* answer = inner();
  return answer != nullptr ? answer->response() : state_->reply.response;
}

Headers LoadingAnswer::headers() const {
  const Answer* answer = inner();
  return answer != nullptr ? answer->headers() : Headers();
}

std::string_view LoadingAnswer::content_type() const {
  return form_ == StreamForm::kLines ? "application/x-ndjson" : Answer::content_type();
}

std::string_view LoadingAnswer::keep_alive() const {
  if (const Answer* answer = inner()) return answer->keep_alive();
  return form_ == StreamForm::kLines ? std::string_view() : Answer::keep_alive();
}

int64_t LoadingAnswer::generated_tokens() const {
  const Answer* answer = inner();
  return answer != nullptr ? answer->generated_tokens() : 0;
}

}  // namespace millrace::server
