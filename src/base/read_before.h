// ReadBefore: a thread that prefetches parts of a mapped file from disk, in the order they will be used and
// some way before it, so that who uses them does not wait for a page while the disk has nothing to do.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace millrace {

class ReadBefore {
 public:
  struct Range {
    const std::byte* data;
    size_t bytes;
  };
  // Ranges may overlap (rows of two tensors in turns): what is there already costs nothing.
  explicit ReadBefore(std::vector<Range> ranges);
  ~ReadBefore();
  ReadBefore(const ReadBefore&) = delete;
  ReadBefore& operator=(const ReadBefore&) = delete;

  // Waits until the first `bytes` of range `index` are in memory. What was read may leave again if memory is
  // short; it is then read as any page of a mapping is.
  void wait_for(size_t index, size_t bytes);
  // Range `index` is being used: reads on to its end and some way beyond. Waits for nothing.
  void begin(size_t index);
  double waited() const { return waited_; }  // seconds, in wait_for()

 private:
  void run();

  std::vector<Range> ranges_;
  size_t distance_ = 0;         // bytes to be ahead at most
  std::vector<size_t> starts_;  // of each range, in bytes of all before it
  std::mutex mutex_;            // guards read_, wanted_ and stop_
  std::condition_variable changed_;
  size_t read_ = 0, wanted_ = 0;  // bytes of all ranges, in their order
  bool stop_ = false;
  double waited_ = 0.0;
  std::thread thread_;
};

}  // namespace millrace
