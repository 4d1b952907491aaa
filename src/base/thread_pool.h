// ThreadPool: persistent workers that share loops. parallel_for hands out chunks dynamically, so a core that
// is stolen by a neighbour delays one chunk and not the loop. Which thread runs a chunk never changes a
// result: chunks write disjoint outputs. Workers spin briefly for the next loop, then sleep: an idle pool
// uses no CPU: before it sleeps, a worker prefetches what its next loop begins with (FirstReads), so that
// memory is not idle either while one thread does what cannot be shared. On a machine with several memory
// nodes each node's threads begin with their node's part of a loop. Where a hypervisor takes processors away,
// some threads rest (stolen_time.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/stolen_time.h"
#include "base/topology.h"

namespace millrace {

// What threads will read first in a later loop: thread t reads `bytes` bytes from data[i] + t * stride on,
// for i < count. Only prefetched, never loaded: it need not be mapped.
struct FirstReads {
  static constexpr int kMaxRanges = 8;
  const std::byte* data[kMaxRanges] = {};
  int64_t stride = 0, bytes = 0;
  int count = 0;
};

// A part of a loop as a thread gets it.
struct LoopPart {
  int64_t index;
  int64_t next;     // what this thread takes afterwards unless another is quicker; -1: not known, or nothing
  bool prefetched;  // this one was `next` of the part before
};

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

  // The threads that take part, from the next loop or two on: the first so many; the others rest. The pool
  // changes this by itself when processor time is stolen. Of use to tests.
  void use(int threads);
  int used() const { return used_.load(std::memory_order_relaxed); }

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
    share_out(count, chunk);
    run([](void* b, int64_t begin, int64_t end,
           int thread) { (*static_cast<Plain*>(b))(begin, end, thread); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Calls body(LoopPart, thread) once for every part in [0, parts). Thread t begins with part t; the rest is
  // handed out as threads come for it, a part ahead, so that a body can prefetch the next one's memory; when
  // nothing is left, parts that others have before them are taken. For loops whose first parts are large and
  // whose last are small. As parallel_for otherwise; memory nodes do not matter.
  template <class Body>
  void parallel_parts(int64_t parts, Body&& body) {
    if (size_ == 1 || parts <= 1) {
      for (int64_t i = 0; i < parts; ++i) body(LoopPart{i, i + 1 < parts ? i + 1 : -1, i > 0}, 0);
      return;
    }
    using Plain = std::remove_reference_t<Body>;
    loop_.parts = parts;
    loop_.part_call = [](void* b, const LoopPart& part, int thread) {
      (*static_cast<Plain*>(b))(part, thread);
    };
    next_part_.store(size_, std::memory_order_relaxed);
    run(nullptr, const_cast<void*>(static_cast<const void*>(&body)));
  }

  // From the end of the next loop on, until this is called again, threads that wait prefetch this.
  void prefetch_while_waiting(const FirstReads& reads);

  // The next loop comes behind something that takes longer than workers spin, but not longer than it takes to
  // wake them all (what ranks exchange): until it begins they do not sleep, for some milliseconds at most.
  void stay_awake() { awake_.store(true, std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;
  using Call = void (*)(void* body, int64_t begin, int64_t end, int thread);
  using PartCall = void (*)(void* body, const LoopPart& part, int thread);
  struct Waiting;
  void share_out(int64_t count, int64_t chunk);
  void run(Call call, void* body);
  void look_around();
  void worker(int thread);
  void work(int thread);
  void take_chunks(int thread);
  void take_parts(int thread);
  int64_t abandoned_part(int thread);
  int64_t part_of_another(int thread);
  void wait_a_little(Waiting& waiting, int thread) const;

  // A node's part of the current loop.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};  // first index not handed out
    int64_t end = 0;
  };
  // A thread's own line, written by others only when it does not come or is slow.
  struct alignas(64) Seat {
    std::atomic<uint64_t> inside{0};  // the loop that the worker is in
    std::atomic<uint64_t> taken{0};   // the last loop whose part of this thread's number was taken
    std::atomic<int64_t> ahead{-1};   // the part that this thread has before it
  };

  int size_;
  int64_t max_prefetch_bytes_;  // of a waiting thread
  int num_nodes_ = 0;
  std::vector<int> node_of_cpu_, node_of_thread_;
  std::vector<int64_t> threads_until_;  // of this node and those before it
  std::unique_ptr<Share[]> shares_;
  std::unique_ptr<Seat[]> seats_;
  std::vector<std::thread> workers_;

  // The current loop: number (even) and, while it is open, one. A worker says in its seat that it is inside
  // and then looks whether the loop is still open; run() closes the loop and then waits for every seat: one
  // of both sees the other, and no line is written by many. So a worker that has lost its core comes too late
  // and keeps nobody waiting. The rest is written by run() while the loop is closed, read by who is inside.
  struct alignas(64) Loop {
    std::atomic<uint64_t> state{0};
    Call call = nullptr;
    PartCall part_call = nullptr;
    void* body = nullptr;
    int64_t chunk = 0, parts = 0;     // parts: 0 where chunks are handed out
    uint64_t first_reads_number = 0;  // how often first_reads_ was written
  };
  Loop loop_;
  alignas(64) FirstReads first_reads_;
  alignas(64) std::atomic<int64_t> next_part_{0};
  std::exception_ptr failure_;  // guarded by mutex_
  alignas(64) std::atomic<bool> stop_{false};
  std::atomic<bool> awake_{false};  // stay_awake() was called since the last loop
  std::atomic<int> used_;
  std::mutex mutex_;  // guards sleeping and failure_
  std::condition_variable wake_;
  std::condition_variable back_to_work_;  // of threads that are not used
  std::atomic<int> sleepers_{0};

  StolenTime stolen_time_;
  Crew crew_;
  Clock::time_point next_look_{};
  Clock::duration stretch_ = Crew::kStretch;
};

}  // namespace millrace
