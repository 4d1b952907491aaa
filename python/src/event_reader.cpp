#include "event_reader.h"

namespace millrace::python {

EventReader::EventReader(std::shared_ptr<LoadedModel> model, const Request& request)
    : model_(std::move(model)),
      logprobs_(request.sampling.logprobs.has_value()),
      events_(model_->engine().submit(request)) {
  events_.on_ready(notifier(waker_));
}

std::optional<Event> EventReader::poll() {
  waker_->clear();
  std::optional<Event> event = events_.next_for(std::chrono::milliseconds(0));
  // It is woken when the stream stops being empty, so while it is not it stays awake.
  if (event && !events_.done()) waker_->wake();
  return event;
}

bool EventReader::collect(Answer& answer) {
  waker_->clear();
  while (std::optional<Event> event = events_.next_for(std::chrono::milliseconds(0))) {
    const auto index = static_cast<size_t>(event->sample);
    if (answer.samples.size() <= index) answer.samples.resize(index + 1);
    Sample& sample = answer.samples[index];
    sample.text += event->text;
    if (event->prompt) answer.prompt = event->prompt;
    if (event->prompt_logits) answer.prompt_logits = event->prompt_logits;
    if (event->kind != Event::Kind::kToken) {
      sample.end = *std::move(event);
      continue;
    }
    sample.tokens.push_back(event->token);
    if (logprobs_) sample.logprobs.push_back({event->token, event->logprob, std::move(event->top)});
  }
  return events_.done();
}

}  // namespace millrace::python
