#include "generation.h"

#include <algorithm>
#include <string_view>

#include "http.h"

namespace millrace::server {
namespace {

// With the field of the request that the engine's words begin with: "attention: found sparse, expected ..".
ApiError refusal_of(const Error& error) {
  ApiError refusal = to_api_error(error.code(), error.what());
  const std::string_view message = error.what(),
                         name = message.substr(0, message.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"));
  if (message.substr(name.size()).starts_with(": found ")) refusal.param = name;
  return refusal;
}

}  // namespace

std::string_view finish_name(FinishReason reason) {
  return reason == FinishReason::kEndToken || reason == FinishReason::kStopString ? "stop" : "length";
}

Timeline::Entry entry_of(std::string id, std::string endpoint, const Client& client, bool stream) {
  Timeline::Entry entry;
  entry.id = std::move(id);
  entry.request_id = client.request_id;
  entry.endpoint = std::move(endpoint);
  entry.stream = stream;
  return entry;
}

Generation::Generation(ModelLease model, Timeline& timeline, const std::vector<Request>& requests,
                       Timeline::Entry entry)
    : model_(std::move(model)), timeline_(timeline) {
  samples_ = static_cast<size_t>(requests.front().samples);
  choices_ = samples_ * requests.size();
  open_ = choices_;
  entry.start = unix_time();
  entry.model = model_->id();
  entry.samples = static_cast<int32_t>(choices_);
  if (use_) use_->count_prompts(static_cast<int32_t>(requests.size()), requests.front().samples);
  try {
    for (Request request : requests) {
      request.adapter = model_->adapter();
      streams_.push_back(model_->engine().submit(request));
    }
  } catch (const PromptTooLong& error) {
    throw ApiError(400, error.what(), "", "context_length_exceeded");
  } catch (const Error& error) {
    throw refusal_of(error);
  }
  entry_ = timeline_.add(std::move(entry));
  // At once: who leaves before the first token has had it computed all the same.
  constexpr size_t kBytesPerToken = 8;
  for (const Request& request : requests) {
    const size_t tokens =
        request.tokens.empty() ? request.text.size() / kBytesPerToken : request.tokens.size();
    charged_prompts_.push_back(static_cast<int64_t>(tokens));
    charge(charged_prompts_.back(), true);
  }
}

Generation::~Generation() {
  charge(0, true);
  timeline_.update(*entry_, [&](Timeline::Entry& e) {
    if (e.total_s) return;
    e.total_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    e.state = "cancelled";
    e.finish = "client gone";
  });
}

void Generation::on_ready(const std::function<void()>& notify) {
  for (EventStream& stream : streams_) stream.on_ready(notify);
}

void Generation::cancel() {
  for (EventStream& stream : streams_) stream.cancel();
}

void Generation::stop(size_t choice) {
  stopped_ = true;
  streams_[choice / samples_].cancel_sample(static_cast<int32_t>(choice % samples_));
}

std::optional<Generation::Item> Generation::next() {
  for (size_t tried = 0; tried < streams_.size(); ++tried) {
    const size_t s = (turn_ + tried) % streams_.size();
    std::optional<Event> event = streams_[s].next_for(std::chrono::milliseconds(0));
    if (!event) continue;
    turn_ = (s + 1) % streams_.size();
    Item item{.choice = s * samples_ + static_cast<size_t>(event->sample), .event = *std::move(event)};
    record(item, item.event.sample == 0);
    return item;
  }
  return std::nullopt;
}

// Not one by one: each takes a lock that all of the server's answers share.
void Generation::charge(int64_t tokens, bool at_once) {
  constexpr int64_t kSome = 32;
  uncharged_ += tokens;
  if (uncharged_ == 0 || (!at_once && uncharged_ < kSome)) return;
  if (use_) use_->charge_tokens(uncharged_);
  uncharged_ = 0;
}

void Generation::record(const Item& item, bool first_of_prompt) {
  const Event& event = item.event;
  if (event.kind == Event::Kind::kToken) {
    ++totals_.generated;
    charge(1, false);
    timeline_.update(*entry_, [&](Timeline::Entry& e) {
      e.generated_tokens = totals_.generated;
      if (event.usage.generated_tokens > 0 && first_of_prompt) {
        e.prompt_tokens += event.usage.prompt_tokens;
        e.cached_tokens += event.usage.cached_tokens;
      }
      if (!first_token_) return;
      e.state = "running";
      e.queue_s = event.usage.queue_s;
      e.first_token_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    });
    first_token_ = false;
    return;
  }
  --open_;
  if (first_of_prompt) {
    totals_.prompt += event.usage.prompt_tokens;
    totals_.cached += event.usage.cached_tokens;
    charge(std::max<int64_t>(0, event.usage.prompt_tokens - charged_prompts_[item.choice / samples_]), true);
  }
  if (event.kind == Event::Kind::kFailed && !failure_) {
    failure_ = to_api_error(event.code, event.error.empty() ? "the request failed" : event.error);
    if (open_ > 0) cancel();
  }
  timeline_.update(*entry_, [&](Timeline::Entry& e) {
    e.prompt_tokens = std::max(e.prompt_tokens, totals_.prompt);
    e.cached_tokens = std::max(e.cached_tokens, totals_.cached);
    e.preemptions += event.usage.preemptions;
    if (first_of_prompt && !e.queue_s) e.queue_s = event.usage.queue_s;
    if (open_ > 0) return;
    e.total_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const bool stopped = stopped_ && event.finish == FinishReason::kCancelled;
    e.finish = failure_ ? failure_->message
                        : std::string(to_string(stopped ? FinishReason::kStopString : event.finish));
    e.state = failure_                                               ? "failed"
              : event.finish == FinishReason::kCancelled && !stopped ? "cancelled"
                                                                     : "done";
  });
}

}  // namespace millrace::server
