// ThreadPool: persistent workers that share loops. parallel_for hands out chunks dynamically, so a core that
// is stolen by a neighbour delays one chunk and not the loop. Which thread runs a chunk never changes a
// result: chunks write disjoint outputs. Workers spin briefly for the next loop, then sleep: an idle pool
// uses no CPU. On a machine with several memory nodes each node's threads begin with their node's part of a
// loop.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/topology.h"

namespace millrace {

class ThreadPool {
 public:
  // threads counts the caller: a pool of 1 has no workers. 0: available_cpus().
  explicit ThreadPool(int threads);
  ThreadPool(int threads, const Topology& topology);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  int nodes() const { return num_nodes_; }  // memory nodes with threads of this pool

  // Calls body(begin, end, thread) for disjoint ranges of at most `chunk` (a pool of one: a single range)
  // that cover [0, count); returns when all are done. thread is in [0, size()). Not reentrant; one caller at
  // a time. Of several nodes the k-th takes the k-th part of [0, count) first. The first exception of a body
  // is thrown here, once every chunk that had begun is done; chunks not yet begun are dropped.
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

  // A node's part of the current loop.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};  // first index not handed out
    int64_t end = 0;
  };

  int size_;
  int num_nodes_ = 0;
  std::vector<int> node_of_cpu_, node_of_thread_;
  std::vector<int64_t> threads_until_;  // of this node and those before it
  std::unique_ptr<Share[]> shares_;
  std::vector<std::thread> workers_;

  // The current loop. Written by run() while the loop is closed, read by workers that have joined it.
  Call call_ = nullptr;
  void* body_ = nullptr;
  int64_t chunk_ = 0;
  std::exception_ptr failure_;  // guarded by mutex_
  // Loop number, whether it is open, and the workers inside: a worker joins only an open loop, and run()
  // returns once it has closed the loop and the last worker has left. So a worker that has lost its core
  // joins too late and keeps nobody waiting.
  alignas(64) std::atomic<uint64_t> state_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards sleeping and failure_
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
};

}  // namespace millrace
