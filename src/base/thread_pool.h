// ThreadPool: persistent workers that share loops. parallel_for hands out chunks dynamically, so a core that
// is stolen by a neighbour delays one chunk and not the loop. Which thread runs a chunk never changes a
// result: chunks write disjoint outputs. Workers spin briefly for the next loop, then sleep: an idle pool
// uses no CPU.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace millrace {

class ThreadPool {
 public:
  // threads counts the caller: a pool of 1 has no workers. 0: available_cpus().
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Calls body(begin, end, thread) for disjoint ranges of at most `chunk` (a pool of one: a single range)
  // that cover [0, count); returns when all are done. thread is in [0, size()). Not reentrant; one caller at
  // a time. The first exception of a body is thrown here, once every chunk that had begun is done; chunks not
  // yet begun are dropped.
  template <class Body>
  void parallel_for(int64_t count, int64_t chunk, Body&& body) {
    if (count <= 0) return;
    if (size_ == 1 || count <= chunk) {
      body(int64_t{0}, count, 0);
      return;
    }
    using Plain = std::remove_reference_t<Body>;
    run(
        count, chunk,
        [](void* b, int64_t begin, int64_t end, int thread) {
          (*static_cast<Plain*>(b))(begin, end, thread);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Call = void (*)(void* body, int64_t begin, int64_t end, int thread);
  void run(int64_t count, int64_t chunk, Call call, void* body);
  void worker(int thread);
  void take_chunks(int thread);
  bool join(uint64_t& seen);

  int size_;
  std::vector<std::thread> workers_;

  // The current loop. Written by run() while the loop is closed, read by workers that have joined it.
  Call call_ = nullptr;
  void* body_ = nullptr;
  int64_t count_ = 0, chunk_ = 0;
  std::exception_ptr failure_;                // guarded by mutex_
  alignas(64) std::atomic<int64_t> next_{0};  // first index not handed out
  // Loop number, whether it is open, and the workers inside: a worker joins only an open loop, and run()
  // returns once it has closed the loop and the last worker has left. So a worker that has lost its core
  // joins too late and keeps nobody waiting.
  alignas(64) std::atomic<uint64_t> state_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards sleeping and failure_
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
};

// CPUs this process may run on: its affinity mask, cut by the cgroup's quota.
int available_cpus();

// The CPUs that the control groups listed in `proc_cgroup` (as /proc/self/cgroup) and mounted at `root`
// grant, of versions 1 and 2, the tightest of all levels; 0: no limit.
double cgroup_cpus(const std::string& proc_cgroup, const std::string& root);

}  // namespace millrace
