#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace millrace {
namespace {

// About 20 us of spinning: longer than the gap between two operations of a step, far shorter than a time
// slice.
constexpr int kSpins = 4000;

// ThreadPool::state_: workers inside (16 bits), open (1 bit), loop number.
constexpr uint64_t kInside = 0xffff, kOpen = 0x10000, kNextLoop = 0x20000, kLoop = ~(kInside | kOpen);

inline void relax() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
  asm volatile("pause" ::: "memory");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : ThreadPool(threads, machine_topology()) {}

ThreadPool::ThreadPool(int threads, const Topology& topology)
    : size_(threads > 0 ? threads : available_cpus()), node_of_cpu_(CPU_SETSIZE, 0) {
  // Threads are dealt to nodes in the ratio of their CPUs; a node without a thread has no share of a loop.
  int64_t cpus = 0, dealt = 0;
  for (const MemoryNode& node : topology) cpus += static_cast<int64_t>(node.cpus.size());
  int64_t seen = 0;
  std::vector<const MemoryNode*> home;  // of each thread
  for (const MemoryNode& node : topology) {
    seen += static_cast<int64_t>(node.cpus.size());
    const int64_t until = cpus == 0 ? size_ : (seen * size_ + cpus / 2) / cpus;
    if (until == dealt) continue;
    for (const int cpu : node.cpus) node_of_cpu_[cpu] = num_nodes_;
    for (; dealt < until; ++dealt) {
      home.push_back(&node);
      node_of_thread_.push_back(num_nodes_);
    }
    threads_until_.push_back(until);
    ++num_nodes_;
  }
  shares_ = std::make_unique<Share[]>(num_nodes_);
  workers_.reserve(size_ - 1);
  for (int t = 1; t < size_; ++t) {
    workers_.emplace_back([this, t, cpus = num_nodes_ > 1 ? home[t]->cpus : std::vector<int>()] {
      // To its node and not to one CPU: which of them is free is the system's to know. Where it refuses, the
      // thread is only sometimes far from its share.
      if (!cpus.empty()) (void)run_on(cpus);
      worker(t);
    });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& w : workers_) w.join();
}

// The share of the own node first, then what the others have not got to.
void ThreadPool::take_chunks(int thread) {
  // The caller's thread is not ours to bind: it helps the node on which it happens to be.
  const int cpu = thread == 0 && num_nodes_ > 1 ? sched_getcpu() : -1;
  const int home = cpu < 0 ? node_of_thread_[thread] : node_of_cpu_[cpu];
  try {
    for (int k = 0; k < num_nodes_; ++k) {
      Share& share = shares_[(home + k) % num_nodes_];
      for (;;) {
        const int64_t begin = share.next.fetch_add(chunk_, std::memory_order_relaxed);
        if (begin >= share.end) break;
        call_(body_, begin, std::min(begin + chunk_, share.end), thread);
      }
    }
  } catch (...) {
    // The others stop at their next chunk.
    for (int k = 0; k < num_nodes_; ++k) shares_[k].next.store(shares_[k].end, std::memory_order_relaxed);
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void ThreadPool::run(int64_t count, int64_t chunk, Call call, void* body) {
  call_ = call;
  body_ = body;
  chunk_ = std::max<int64_t>(1, chunk);
  // Node k has the same part of every loop, whatever its length: rows of a weight stay with the node that
  // touched them first.
  const int64_t chunks = (count + chunk_ - 1) / chunk_;
  int64_t begin = 0;
  for (int k = 0; k < num_nodes_; ++k) {
    const int64_t end = k + 1 == num_nodes_ ? count : chunks * threads_until_[k] / size_ * chunk_;
    shares_[k].next.store(begin, std::memory_order_relaxed);
    shares_[k].end = end;
    begin = end;
  }
  // The loop's fields are published by this release to the acquire of a worker that joins. The order of this
  // store and the load of sleepers_ against a worker's increment and last look (both seq_cst) is what loses
  // no wake-up.
  const uint64_t loop = state_.load(std::memory_order_relaxed) + kNextLoop;
  state_.store(loop | kOpen, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard lock(mutex_);
    }  // a worker between its last look and its sleep has the lock: wait for it
    wake_.notify_all();
  }
  take_chunks(0);
  // No chunk is left to hand out: close the loop, then wait for the workers that are still inside. The
  // acquire pairs with their release on leaving, so that their writes are visible here.
  state_.fetch_and(~kOpen, std::memory_order_relaxed);
  int spins = 0;
  while ((state_.load(std::memory_order_acquire) & kInside) != 0) {
    relax();
    if (++spins > kSpins) std::this_thread::yield();
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

// Enters the current loop if it is open and not the one seen last.
bool ThreadPool::join(uint64_t& seen) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while ((state & kOpen) != 0 && (state & kLoop) != seen) {
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {
      seen = state & kLoop;
      return true;
    }
  }
  return false;
}

void ThreadPool::worker(int thread) {
  uint64_t seen = 0;
  const auto open = [&] {
    const uint64_t state = state_.load(std::memory_order_seq_cst);
    return (state & kOpen) != 0 && (state & kLoop) != seen;
  };
  int idle = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (join(seen)) {
      take_chunks(thread);
      state_.fetch_sub(1, std::memory_order_release);
      idle = 0;
    } else if (++idle < kSpins) {
      relax();
    } else {
      std::unique_lock lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return stop_.load(std::memory_order_relaxed) || open(); });
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      idle = 0;
    }
  }
}

}  // namespace millrace
