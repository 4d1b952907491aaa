// Ollama's /api/pull: fetches a model from Hugging Face's hub (src/hub) and takes it into the server, for as
// long as it runs. On a thread of its own; the answer tells how far it is, a JSON object a line. Only with
// --allow-pull: whoever may ask could fill the disk.
#include <fmt/core.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <utility>

#include "api_error.h"
#include "base/json_writer.h"
#include "endpoints.h"
#include "hub/model_name.h"
#include "hub/puller.h"
#include "hub/settings.h"
#include "json_reply.h"
#include "ollama_answer.h"
#include "ollama_fields.h"

namespace millrace::server {
namespace {

// Shared by the answer and the thread that fetches; either may end first.
class PullState {
 public:
  void add(std::string line) {
    std::function<void()> tell;
    {
      const std::lock_guard lock(mutex_);
      lines_.push_back(std::move(line));
      tell = notify_;
    }
    if (tell) tell();
  }
  void end(std::optional<ApiError> error) {
    std::function<void()> tell;
    {
      const std::lock_guard lock(mutex_);
      error_ = std::move(error);
      done_ = true;
      tell = notify_;
    }
    if (tell) tell();
  }
  void on_ready(std::function<void()> notify) {
    {
      const std::lock_guard lock(mutex_);
      notify_ = notify;
    }
    notify();
  }
  void abandon() {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
    notify_ = nullptr;
  }
  bool abandoned() const {
    const std::lock_guard lock(mutex_);
    return abandoned_;
  }
  bool done() const {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  std::optional<ApiError> error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  // Appends what has come; true once that was all.
  bool take(std::string& out) {
    const std::lock_guard lock(mutex_);
    for (const std::string& line : lines_) out += line;
    lines_.clear();
    return done_;
  }

 private:
  mutable std::mutex mutex_;
  std::deque<std::string> lines_;
  std::function<void()> notify_;
  bool done_ = false, abandoned_ = false;
  std::optional<ApiError> error_;
};

std::string status_line(std::string_view status) {
  std::string out;
  JsonWriter(out).begin_object().field("status", status).end_object();
  return out + "\n";
}

std::string progress_line(const hub::PullProgress& progress) {
  const bool checking = progress.phase == hub::PullProgress::Phase::kChecking;
  if (checking) return status_line("verifying sha256 digest");
  if (progress.phase == hub::PullProgress::Phase::kWaiting) {
    return status_line("waiting for another process that fetches the same file");
  }
  std::string out;
  JsonWriter json(out);
  json.begin_object().field("status", fmt::format("pulling {}", progress.file));
  json.field("digest", progress.file).field("total", progress.total).field("completed", progress.done);
  json.end_object();
  return out + "\n";
}

class PullAnswer final : public Answer {
 public:
  PullAnswer(std::shared_ptr<PullState> state, bool stream) : state_(std::move(state)), stream_(stream) {}
  ~PullAnswer() override { state_->abandon(); }

  bool streaming() const override { return stream_; }
  std::string_view content_type() const override { return "application/x-ndjson"; }
  std::string_view keep_alive() const override { return "{\"status\":\"working\"}\n"; }
  void on_ready(std::function<void()> notify) override { state_->on_ready(std::move(notify)); }
  bool advance(std::string& out, size_t /*max_bytes*/) override {
    const bool done = state_->take(out);
    sent_ = sent_ || !out.empty();
    if (done && stream_ && !std::exchange(ended_, true)) {
      const std::optional<ApiError> error = state_->error();
      out += error ? ollama_error(*error).body + "\n" : status_line("success");
    }
    return done;
  }
  std::optional<HttpResponse> response() override {
    const std::optional<ApiError> error = state_->error();
    if (error && !sent_) return ollama_error(*error);
    if (stream_ || !state_->done()) return std::nullopt;
    return error ? ollama_error(*error) : HttpResponse{.body = R"({"status":"success"})"};
  }

 private:
  const std::shared_ptr<PullState> state_;
  const bool stream_;
  bool sent_ = false, ended_ = false;
};

void fetch(ModelSet& models, const std::string& name, const hub::ModelName& where, PullState& state,
           const std::stop_token& stop) {
  state.add(status_line("pulling manifest"));
  const hub::Settings settings = hub::settings_from_environment();
  const hub::PullPlan plan = hub::plan_pull(where, settings);
  auto next = std::chrono::steady_clock::now();
  const std::optional<std::string> path = hub::pull(plan, settings, [&](const hub::PullProgress& progress) {
    if (state.abandoned() || stop.stop_requested()) return false;
    const auto now = std::chrono::steady_clock::now();
    if (now < next) return true;
    next = now + std::chrono::milliseconds(200);
    state.add(progress_line(progress));
    return true;
  });
  if (!path) throw Error(ErrorCode::kBusy, "the pull was stopped; the next one goes on from there");
  models.take(name, *path);
}

}  // namespace

Reply ollama_pull(Api& api, const HttpRequest& request, const Client& /*client*/) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const std::string name = ollama_model(fields, api);
  if (!api.options().allow_pull) {
    throw ApiError(403, "models are fetched only by a server that was started with --allow-pull", "",
                   "not_allowed");
  }
  const bool stream = ollama_streams(fields);
  auto state = std::make_shared<PullState>();
  if (api.models().has(name)) {
    state->end(std::nullopt);
  } else {
    const hub::ModelName where = name_on_hub(name);
    ModelSet& models = api.models();
    models.in_background([&api, &models, name, where, state](const std::stop_token& stop) {
      try {
        fetch(models, name, where, *state, stop);
        state->end(std::nullopt);
      } catch (const Error& error) {
        state->end(
            to_api_error(error.code() == ErrorCode::kIo ? ErrorCode::kBusy : error.code(), error.what()));
      } catch (const std::exception& error) {
        api.log().write("error", "pull failed", {{"model", name}, {"reason", std::string(error.what())}});
        state->end(ApiError(500, "internal error", "", "internal_error"));
      }
    });
  }
  return {.answer = std::make_unique<PullAnswer>(std::move(state), stream)};
}

}  // namespace millrace::server
