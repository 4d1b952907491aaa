#include "base/page_warmer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace millrace {
namespace {

// The kernel holds the map of the process while it works; others may want it changed.
constexpr size_t kWarmStep = size_t{4} << 20;

// Of the whole pages around these bytes.
int advise(const std::byte* data, size_t bytes, int advice) {
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data) / page * page,
             end = reinterpret_cast<uintptr_t>(data) + bytes;
  return ::madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

}  // namespace

void start_reading(const std::byte* data, size_t bytes) { (void)advise(data, bytes, MADV_WILLNEED); }

void populate_pages(const std::byte* data, size_t bytes) {
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ: not in every libc
  if (advise(data, bytes, kPopulateRead) != 0 && errno == EINVAL) start_reading(data, bytes);
}

PageWarmer::~PageWarmer() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PageWarmer::add(const std::byte* data, size_t bytes) {
  if (data == nullptr || bytes == 0) return;
  {
    const std::lock_guard lock(mutex_);
    ranges_.push_back({data, bytes});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

void PageWarmer::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ranges_.empty() && !busy_; });
}

void PageWarmer::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !ranges_.empty(); });
    if (stop_) return;
    Range& next = ranges_.front();
    const Range step{next.data, std::min(next.bytes, kWarmStep)};
    next.data += step.bytes;
    next.bytes -= step.bytes;
    if (next.bytes == 0) ranges_.pop_front();
    busy_ = true;
    lock.unlock();
    populate_pages(step.data, step.bytes);
    lock.lock();
    busy_ = false;
    if (ranges_.empty()) changed_.notify_all();
  }
}

}  // namespace millrace
