// Api: from a request to its reply. Plain functions on plain data; any thread may call.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "admission.h"
#include "api_error.h"
#include "base/work_budget.h"
#include "conversation_store.h"
#include "http.h"
#include "json_fields.h"
#include "loading_answer.h"
#include "log.h"
#include "model_set.h"
#include "options.h"
#include "response_store.h"
#include "served_model.h"
#include "timeline.h"

namespace millrace::server {

struct Counters {
  std::atomic<int64_t> connections{0}, streams{0};
  // Large requests that wait to be read (work_lanes.h), and how many may.
  std::atomic<int64_t> queued_work{0}, queued_work_limit{0}, body_bytes{0};
  std::atomic<uint64_t> requests{0}, status_2xx{0}, status_4xx{0}, status_5xx{0}, refused_connections{0};
  void count(int status);
};

class Api {
 public:
  Api(ModelSet& models, const ServerOptions& options);
  ~Api();

  // What can be said before the body is read: nothing when the request may go on. Fills in who the client is.
  std::optional<HttpResponse> admit(const HttpRequest& head, Client& client);
  // Never throws: what goes wrong is a response. The limits are for the work until then, not for the answer.
  Reply handle(const HttpRequest& request, const Client& client, const WorkLimits& limits = {});

  // Headers that every response carries (CORS); and errors in the words of the API that the path belongs to.
  void add_headers(HttpResponse& response, const HttpRequest& request) const;

  void reload_keys();  // logs what came of it; the old ones stay when the file is bad
  void set_draining() { draining_ = true; }
  bool draining() const { return draining_; }
  // As many requests wait to be read as may: more are refused.
  bool overloaded() const {
    return counters_.queued_work_limit > 0 && counters_.queued_work >= counters_.queued_work_limit;
  }
  // Of an engine (Engine::failure()), without paths; logged whole when it is first seen.
  std::string failure();
  std::string fallback();  // the same of Engine::fallback()

  // The model that a request names, for as long as its answer lives. Throws ApiError when there is no such
  // model, and ModelNotLoaded when it has to be loaded first: the request is then handled again.
  ModelLease model_of(const Fields& fields);
  // The same, refused where it is a text encoder.
  ModelLease writer_of(const Fields& fields);
  ModelLease lease(const std::string& name, StreamForm stream);
  // An error in the shape that the clients of this path know.
  HttpResponse error_for(const HttpRequest& request, const ApiError& error) const;

  // Set by the server. Runs what takes its time, on one of the threads that handle requests.
  std::function<void(std::function<void()>)> run_work;
  // Runs an answer that nobody waits for to its end.
  std::function<void(std::shared_ptr<Answer>)> run_detached;

  ModelSet& models() { return models_; }
  const ServerOptions& options() const { return options_; }
  Timeline& timeline() { return timeline_; }
  ResponseStore& store() { return store_; }
  ConversationStore& conversations() { return conversations_; }
  Counters& counters() { return counters_; }
  const Log& log() const { return log_; }
  int64_t created() const { return created_; }  // Unix time
  double uptime_s() const;

 private:
  Reply route(const HttpRequest& request, const Client& client);
  Reply work_ended(const HttpRequest& request, WorkEnded::Why why) const;

  ModelSet& models_;
  const ServerOptions options_;
  Log log_;
  std::once_flag failure_logged_;
  int64_t created_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  Timeline timeline_;
  ResponseStore store_;
  ConversationStore conversations_;
  Counters counters_;
  Admission admission_;
  std::atomic<bool> draining_{false};
};

// Throws ApiError for a text encoder: chats and completions are not for it.
void check_writes(const ModelInfo& model);

}  // namespace millrace::server
