// Generation: the engine's event streams behind one answer (a prompt or several, each with its samples), read
// as one, with its line in the timeline kept up to date.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api_error.h"
#include "client_limits.h"
#include "millrace/engine.h"
#include "served_model.h"
#include "timeline.h"

namespace millrace::server {

struct Client;

// The line of an answer that begins now; `id` is the answer's own.
Timeline::Entry entry_of(std::string id, std::string endpoint, const Client& client, bool stream = false);

class Generation {
 public:
  // Submits all of them. Throws ApiError for what cannot be served.
  Generation(ModelLease model, Timeline& timeline, const std::vector<Request>& requests,
             Timeline::Entry entry);
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  struct Item {
    size_t choice = 0;  // prompt x samples + sample
    Event event = {};
  };
  void on_ready(const std::function<void()>& notify);
  std::optional<Item> next();  // nothing: none has come, or done()
  bool done() const { return open_ == 0; }
  void cancel();             // from any thread
  void stop(size_t choice);  // what was to be found in it is: no more of it is computed

  size_t choices() const { return choices_; }
  struct Totals {
    int64_t prompt = 0, cached = 0, generated = 0;
  };
  const Totals& totals() const { return totals_; }
  // The first failure; the others of the answer are cancelled with it.
  const std::optional<ApiError>& failure() const { return failure_; }
  ServedModel& model() const { return *model_; }

 private:
  void record(const Item& item, bool first_of_prompt);
  void charge(int64_t tokens, bool at_once);  // to the client's account

  std::shared_ptr<ClientUse> use_ = ClientUse::current();
  std::vector<int64_t> charged_prompts_;  // tokens, or a guess until they are known
  int64_t uncharged_ = 0;
  const ModelLease model_;  // stays for as long as this does; the streams below are its engine's
  Timeline& timeline_;
  std::shared_ptr<Timeline::Entry> entry_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<EventStream> streams_;
  size_t samples_ = 1, choices_ = 0, open_ = 0, turn_ = 0;
  bool first_token_ = true, stopped_ = false;
  Totals totals_;
  std::optional<ApiError> failure_;
};

// "stop" or "length", as OpenAI's clients know them.
std::string_view finish_name(FinishReason reason);

}  // namespace millrace::server
