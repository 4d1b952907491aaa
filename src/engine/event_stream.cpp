#include "engine/event_stream.h"

#include <algorithm>
#include <utility>

namespace millrace {
namespace {

constexpr size_t kFirstEvents = 8;

std::optional<Event> take(EventStream::State& state) {
  if (state.count == 0) return std::nullopt;
  Event event = std::move(state.ring[state.first]);
  state.first = (state.first + 1) % state.ring.size();
  --state.count;
  return event;
}

}  // namespace

// ---------------------------------------------------------------- the engine's end

EventStream::State::State(uint64_t stream_id, uint64_t stream_seed, int32_t samples,
                          std::shared_ptr<Inbox> in)
    : id(stream_id),
      seed(stream_seed),
      inbox(std::move(in)),
      open(samples),
      ring(static_cast<size_t>(samples)) {}

void EventStream::State::put(Event&& event) {
  ring[(first + count) % ring.size()] = std::move(event);
  ++count;
  if (count == 1 && notify) notify();
}

void EventStream::State::push(Event event) {
  {
    const std::lock_guard lock(mutex);
    if (count + static_cast<size_t>(open) >= ring.size()) {
      Buffer<Event> larger(std::max(2 * ring.size(), kFirstEvents + static_cast<size_t>(open)));
      for (size_t i = 0; i < count; ++i) larger[i] = std::move(ring[(first + i) % ring.size()]);
      ring = std::move(larger);
      first = 0;
    }
    put(std::move(event));
  }
  news.notify_one();
}

void EventStream::State::finish(Event&& event) noexcept {
  {
    const std::lock_guard lock(mutex);
    --open;
    put(std::move(event));
  }
  news.notify_all();
}

// ---------------------------------------------------------------- the client's end

EventStream::EventStream(std::shared_ptr<State> state) : state_(std::move(state)) {}
EventStream::EventStream(EventStream&&) noexcept = default;

EventStream& EventStream::operator=(EventStream&& other) noexcept {
  if (this != &other) {
    EventStream old(std::move(state_));
    state_ = std::move(other.state_);
  }
  return *this;
}

EventStream::~EventStream() {
  if (!state_) return;
  bool running;
  {
    const std::lock_guard lock(state_->mutex);
    running = state_->open > 0;
    state_->notify = nullptr;
  }
  if (running) state_->inbox->cancel(state_->id);
}

uint64_t EventStream::id() const { return state_->id; }
uint64_t EventStream::seed() const { return state_->seed; }

std::optional<Event> EventStream::next() {
  std::unique_lock lock(state_->mutex);
  state_->news.wait(lock, [&] { return state_->count > 0 || state_->open == 0; });
  return take(*state_);
}

std::optional<Event> EventStream::next_for(std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  state_->news.wait_for(lock, timeout, [&] { return state_->count > 0 || state_->open == 0; });
  return take(*state_);
}

bool EventStream::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->open == 0 && state_->count == 0;
}

void EventStream::cancel() { state_->inbox->cancel(state_->id); }
void EventStream::cancel_sample(int32_t sample) { state_->inbox->cancel(state_->id, sample); }

void EventStream::on_ready(std::function<void()> notify) {
  const std::lock_guard lock(state_->mutex);
  state_->notify = std::move(notify);
  if (state_->notify && state_->count > 0) state_->notify();
}

}  // namespace millrace
