// ApiCall: one request of OpenAI's API to the model, without a socket: what the server would answer, whole or
// as a stream of events. Destroying it cancels what still runs.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "loaded_model.h"
#include "waker.h"

namespace millrace::python {

class ApiCall {
 public:
  // `path`: /v1/chat/completions; `body`: JSON. Throws ApiError for what is refused at once.
  ApiCall(std::shared_ptr<LoadedModel> model, const std::string& path, std::string body);

  // Text that has come: events of a stream; nothing of what comes whole. Throws ApiError for what failed
  // before anything came.
  std::string poll();
  bool done() const { return done_; }
  std::string body() const { return body_; }  // of what comes whole, once done
  int fd() const { return waker_->fd(); }
  void wait() const { waker_->wait(kSliceMs); }
  void cancel();

 private:
  void take(const server::HttpResponse& response);

  const std::shared_ptr<LoadedModel> model_;
  const std::shared_ptr<Waker> waker_ = std::make_shared<Waker>();
  std::unique_ptr<server::Answer> answer_;
  std::string body_;
  bool done_ = false, sent_ = false;
};

}  // namespace millrace::python
