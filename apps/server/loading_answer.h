// LoadingAnswer: what a request is answered with while its model is being loaded. When it is there the
// request is handled anew, on a worker thread, and this becomes what came of it. It keeps no thread waiting.
#pragma once

#include <memory>
#include <string>

#include "http.h"

namespace millrace::server {

class Api;

// How an answer is streamed, for those who asked for that.
enum class StreamForm {
  kNone,
  kEvents,  // server-sent events
  kLines,   // a JSON object a line
};

// Thrown by whoever wants a model that is not loaded (Api::lease); caught where requests are handled.
struct ModelNotLoaded {
  std::string name;
  StreamForm stream;
};

class LoadingAnswer final : public Answer {
 public:
  LoadingAnswer(Api& api, const ModelNotLoaded& missing, const HttpRequest& request, const Client& client);
  ~LoadingAnswer() override;

  bool streaming() const override { return form_ != StreamForm::kNone; }
  bool undecided() const override;
  void on_ready(std::function<void()> notify) override;
  bool advance(std::string& out, size_t max_bytes) override;
  std::optional<HttpResponse> response() override;
  Headers headers() const override;
  std::string_view content_type() const override;
  std::string_view keep_alive() const override;
  int64_t generated_tokens() const override;

 private:
  struct State;
  Answer* inner() const;  // null: none yet, or a response instead

  const StreamForm form_;
  const bool named_events_;  // an error in the stream is an event with a name
  std::shared_ptr<State> state_;
  std::function<void()> notify_;
  bool began_ = false, ended_ = false;
};

}  // namespace millrace::server
