// EventReader: the engine's answer to one request, for Python: event by event, or whole. Destroying it
// cancels what still runs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "loaded_model.h"
#include "millrace/engine.h"
#include "waker.h"

namespace millrace::python {

class EventReader {
 public:
  EventReader(std::shared_ptr<LoadedModel> model, const Request& request);

  std::optional<Event> poll();  // at once: nothing when none has come
  bool done() const { return events_.done(); }
  void cancel() { events_.cancel(); }
  int fd() const { return waker_->fd(); }
  uint64_t seed() const { return events_.seed(); }
  // Until something may have come, or one slice of time has passed; without the GIL.
  void wait() const { waker_->wait(kSliceMs); }

  // One sample of the whole answer.
  struct Sample {
    std::string text;
    std::vector<int32_t> tokens;
    std::vector<TokenLogprob> logprobs;  // of tokens; empty unless asked for
    Event end;                           // its last event
  };
  struct Answer {
    std::vector<Sample> samples;
    std::shared_ptr<const std::vector<TokenLogprob>> prompt;
    std::shared_ptr<const std::vector<float>> prompt_logits;
  };
  // Takes what has come; true: the answer is whole.
  bool collect(Answer& answer);

 private:
  const std::shared_ptr<LoadedModel> model_;
  const std::shared_ptr<Waker> waker_ = std::make_shared<Waker>();
  const bool logprobs_;
  EventStream events_;
};

}  // namespace millrace::python
