// EventStream::State: the events of one request, pushed by the engine, taken by its client. It grows when the
// client does not read: the engine never waits for one.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "base/buffer_pool.h"
#include "engine/inbox.h"
#include "millrace/engine.h"

namespace millrace {

struct EventStream::State {
  State(uint64_t id, uint64_t seed, int32_t samples, std::shared_ptr<Inbox> inbox);

  void push(Event event);
  // The last event of its sample; never fails for lack of memory.
  void finish(Event&& event) noexcept;

  const uint64_t id, seed;
  const std::shared_ptr<Inbox> inbox;

  std::mutex mutex;
  std::condition_variable news;
  std::function<void()> notify;
  int32_t open;  // samples whose last event has not come
  // A ring that always has room for the last events of all open samples.
  Buffer<Event> ring;
  size_t first = 0, count = 0;

 private:
  void put(Event&& event);  // mutex held, room is there
};

}  // namespace millrace
