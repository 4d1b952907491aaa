#include "engine/inbox.h"

namespace millrace {

void Inbox::cancel(uint64_t id, int32_t sample) {
  {
    const std::lock_guard lock(mutex);
    if (stop && !drain) return;
    cancelled.push_back({id, sample});
  }
  news.notify_one();
}

void Inbox::poke() {
  {
    const std::lock_guard lock(mutex);
    poked = true;
  }
  news.notify_one();
}

}  // namespace millrace
