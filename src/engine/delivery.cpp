#include "engine/delivery.h"

#include <algorithm>
#include <optional>

#include "engine/failure_event.h"

namespace millrace {
namespace {

Event last_event(FinishReason reason) {
  Event event;
  event.kind = Event::Kind::kFinished;
  event.finish = reason;
  return event;
}

// Why a sample ends with a token that its client has got; nothing: it goes on.
std::optional<FinishReason> reason_to_end(const Sample& sample, bool end_token, bool context_full) {
  const int32_t asked = sample.job->request.max_tokens;
  if (end_token) return FinishReason::kEndToken;
  if (sample.text.stopped()) return FinishReason::kStopString;
  if (asked > 0 && sample.usage.generated_tokens >= asked) return FinishReason::kMaxTokens;
  if (context_full) return FinishReason::kContext;
  return std::nullopt;
}

}  // namespace

// ---------------------------------------------------------------- tokens

bool Delivery::token(Id id, const SampledToken& token, int32_t fed) {
  Sample& sample = samples_[id];
  const Job& job = *sample.job;
  record_token(sample, recorder_.now());
  const bool end_token =
      std::find(job.end_tokens.begin(), job.end_tokens.end(), token.token) != job.end_tokens.end();
  Event event;
  event.kind = Event::Kind::kToken;
  event.sample = sample.index;
  event.token = token.token;
  event.logprob = token.logprob;
  event.top = token.top;
  if (!end_token) event.text = sample.text.push(token.token);
  if (sample.usage.generated_tokens == 1) {
    event.usage = sample.usage;
    event.prompt = job.prompt_logprobs;
    event.prompt_logits = job.prompt_logits;
  }
  job.events->push(std::move(event));

  const std::optional<FinishReason> reason = reason_to_end(sample, end_token, fed >= context_);
  if (reason) end(id, *reason);
  return reason.has_value();
}

void Delivery::record_token(Sample& sample, double now) {
  ++sample.usage.generated_tokens;
  Recorder::add(recorder_.generated_tokens, 1);
  recorder_.generated_rate.add(now, 1);
  if (sample.usage.generated_tokens == 1) {
    sample.usage.first_token_s = now - sample.job->arrival_s;
    recorder_.first_token.add(sample.usage.first_token_s);
  } else {
    recorder_.inter_token.add(now - sample.last_token_s);
  }
  sample.last_token_s = now;
}

void Delivery::embedding(Id id, std::vector<float> embedding) {
  Event event = last_event(FinishReason::kEmbedded);
  event.embedding = std::move(embedding);
  finish(id, std::move(event));
}

// ---------------------------------------------------------------- ends

void Delivery::end(Id id, FinishReason reason) {
  Event event = last_event(reason);
  try {
    event.text = samples_[id].text.finish();
  } catch (...) {
    fail(id, std::current_exception());
    return;
  }
  finish(id, std::move(event));
}

void Delivery::fail(Id id, const std::exception_ptr& error) noexcept {
  loss_.note(error);
  if (loss_.may_recover() && DeviceLoss::is_of_device(error)) return;  // it begins anew
  if (samples_.holds(id)) finish(id, failure_event(error));
}

void Delivery::end_all(FinishReason reason) {
  for (Id id = 0; id < samples_.end(); ++id) {
    if (samples_.holds(id)) end(id, reason);
  }
}

bool Delivery::fail_all(const std::exception_ptr& error) noexcept {
  bool any = false;
  for (Id id = 0; id < samples_.end(); ++id) {
    if (!samples_.holds(id)) continue;
    fail(id, error);
    any = true;
  }
  return any;
}

void Delivery::finish(Id id, Event&& event) noexcept {
  scheduler_.finish(id);
  Sample& sample = samples_[id];
  const std::shared_ptr<Job> job = sample.job;
  sample.usage.total_s = recorder_.now() - job->arrival_s;
  recorder_.request_time.add(sample.usage.total_s);
  event.usage = sample.usage;
  event.sample = sample.index;
  samples_.remove(id);
  const FinishReason reason = event.finish;
  if (event.sample == 0 && !job->forked) finish_unforked(*job, event);
  job->events->finish(std::move(event));
  if (--job->open > 0) return;
  Recorder::add(reason == FinishReason::kCancelled  ? recorder_.cancelled
                : reason == FinishReason::kDeadline ? recorder_.expired
                : reason == FinishReason::kError    ? recorder_.failed
                                                    : recorder_.finished,
                1);
}

// Samples that never came to be end with the one that was to become them.
void Delivery::finish_unforked(Job& job, const Event& first) noexcept {
  for (int32_t i = 1; i < job.request.samples; ++i) {
    Event same;
    same.kind = first.kind;
    same.finish = first.finish;
    same.code = first.code;
    same.sample = i;
    job.events->finish(std::move(same));
    --job.open;
  }
}

void Delivery::fail_job(Job& job, const std::exception_ptr& error) noexcept {
  for (int32_t i = 0; i < job.request.samples; ++i) {
    Event event = failure_event(error);
    event.sample = i;
    job.events->finish(std::move(event));
  }
  Recorder::add(recorder_.failed, 1);
}

void Delivery::fail_fork(Job& job, int32_t index, const std::exception_ptr& error) noexcept {
  Event event = failure_event(error);
  event.sample = index;
  job.events->finish(std::move(event));
  --job.open;
}

}  // namespace millrace
