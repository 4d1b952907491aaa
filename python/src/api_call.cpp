#include "api_call.h"

#include <limits>

#include "server/api_error.h"

namespace millrace::python {
namespace {

// A program's own requests have no limits but the machine's.
server::Client own_client() {
  server::Client client;
  client.limits.max_priority = std::numeric_limits<int32_t>::max();
  return client;
}

constexpr size_t kMostAtOnce = 1 << 16;  // bytes of events

}  // namespace

ApiCall::ApiCall(std::shared_ptr<LoadedModel> model, const std::string& path, std::string body)
    : model_(std::move(model)) {
  server::HttpRequest request;
  request.method = "POST";
  request.target = request.path = path;
  request.body = std::move(body);
  server::Reply reply = model_->api().handle(request, own_client());
  if (!reply.answer) {
    take(reply.response);
    done_ = true;
    return;
  }
  answer_ = std::move(reply.answer);
  answer_->on_ready(notifier(waker_));
}

void ApiCall::take(const server::HttpResponse& response) {
  if (response.error) throw server::ApiError(*response.error);
  body_ = response.body;
}

std::string ApiCall::poll() {
  std::string out;
  if (done_) return out;
  waker_->clear();
  const bool all = answer_->advance(out, kMostAtOnce);
  if (!sent_) {
    if (const std::optional<server::HttpResponse> response = answer_->response()) {
      done_ = true;
      take(*response);
      answer_.reset();
      return {};
    }
  }
  sent_ = sent_ || !out.empty();
  if (all) {
    done_ = true;
    answer_.reset();
  } else if (out.size() >= kMostAtOnce) {
    waker_->wake();  // there may be more
  }
  return out;
}

void ApiCall::cancel() {
  done_ = true;
  answer_.reset();
  waker_->wake();  // nothing else will come to whoever waits
}

}  // namespace millrace::python
