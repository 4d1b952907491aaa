// PageWarmer: a thread that enters pages of mapped files into the page table before they are read, in the
// order in which they were named. The first prompt otherwise stops at every sixteenth page, on all threads.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>

namespace millrace {

// Has the system start to read mapped pages: these and no others, where a touch of one that is not in memory
// reads megabytes around it too. A wish: memory that is no file says EINVAL or does nothing.
void start_reading(const std::byte* data, size_t bytes);

// Reads mapped pages and enters them into the page table. A kernel before 5.14 knows only how to start
// reading. What cannot be read is reported where it is used, and what is mapped no more does nothing.
void populate_pages(const std::byte* data, size_t bytes);

class PageWarmer {
 public:
  PageWarmer() = default;
  ~PageWarmer();  // what is left stays as it is
  PageWarmer(const PageWarmer&) = delete;
  PageWarmer& operator=(const PageWarmer&) = delete;

  void add(const std::byte* data, size_t bytes);
  void wait();  // until all that was added is there; of use to tests

 private:
  struct Range {
    const std::byte* data;
    size_t bytes;
  };
  void run();

  std::mutex mutex_;  // guards ranges_, busy_ and stop_
  std::condition_variable changed_;
  std::deque<Range> ranges_;
  bool busy_ = false, stop_ = false;
  std::thread thread_;  // from the first add() on
};

}  // namespace millrace
