#include "base/read_before.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/page_warmer.h"
#include "base/topology.h"

namespace millrace {
namespace {

// How much is asked for at a time, and how far before its use: some tenth of a second of a fast disk.
constexpr size_t kStep = size_t{4} << 20, kDistance = size_t{128} << 20;
constexpr size_t kMemoryParts = 8;  // of the memory that may be used, one; the disk's cache needs the rest

}  // namespace

ReadBefore::ReadBefore(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
  const size_t machine =
      static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t memory = std::min(machine, cgroup_memory("/proc/self/cgroup", "/sys/fs/cgroup"));
  distance_ = std::clamp(memory / kMemoryParts, kStep, kDistance);
  size_t sum = 0;
  for (const Range& range : ranges_) {
    starts_.push_back(sum);
    sum += range.bytes;
  }
  thread_ = std::thread([this] { run(); });
}

ReadBefore::~ReadBefore() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ReadBefore::run() {
  for (size_t index = 0; index < ranges_.size(); ++index) {
    const auto [data, bytes] = ranges_[index];
    for (size_t done = 0; done < bytes;) {
      const size_t step = std::min(kStep, bytes - done);
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stop_ || starts_[index] + done < wanted_ + distance_; });
        if (stop_) return;
      }
      populate_pages(data + done, step);
      done += step;
      {
        const std::lock_guard lock(mutex_);
        read_ = starts_[index] + done;
      }
      changed_.notify_all();
    }
  }
}

void ReadBefore::begin(size_t index) {
  {
    const std::lock_guard lock(mutex_);
    wanted_ = std::max(wanted_, starts_[index] + ranges_[index].bytes);
  }
  changed_.notify_all();
}

void ReadBefore::wait_for(size_t index, size_t bytes) {
  const size_t until = starts_[index] + std::min(bytes, ranges_[index].bytes);
  std::unique_lock lock(mutex_);
  wanted_ = std::max(wanted_, until);
  changed_.notify_all();
  if (read_ >= until) return;
  const auto start = std::chrono::steady_clock::now();
  changed_.wait(lock, [&] { return read_ >= until; });
  waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace millrace
