#include "base/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace millrace {
namespace {

// Longer than the gap between two operations of a step, far shorter than a time slice: a pause takes 10 to 50
// ns.
constexpr int kSpins = 4000;
// The same of workers that stay awake, who let others have the core meanwhile.
constexpr int kSpinsAwake = 25 * kSpins;

constexpr uint64_t kOpen = 1, kNextLoop = 2;

constexpr int64_t kPrefetchStep = 1 << 10;  // bytes that are prefetched between looks at the loop

// What a waiting thread prefetches in all: a quarter of its second-level cache, where it should still be when
// the loop comes. Half of that cache may be a neighbour's, and the loop has other things to read.
int64_t max_prefetch_bytes() {
  const int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE);  // 0 or less: not known
  return cache <= 0 ? 128 << 10 : std::clamp<int64_t>(cache / 4, 64 << 10, 1 << 20);
}

inline void relax() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
  asm volatile("pause" ::: "memory");
#endif
}

}  // namespace

// How far a thread has come with its prefetches, and for how long it has waited.
struct ThreadPool::Waiting {
  FirstReads reads;
  uint64_t number = 0;
  int piece = 0;
  int64_t at = 0, left = 0;  // bytes
  int idle = 0;
  void update(const FirstReads& what, uint64_t its_number, int64_t max_bytes) {
    if (number == its_number) return;
    reads = what;
    number = its_number;
    piece = 0;
    at = 0;
    left = max_bytes;
  }
  // Prefetches some lines; false when none are left.
  bool prefetch(int thread) {
    if (piece >= reads.count || left <= 0) return false;
    const std::byte* from = reads.data[piece] + thread * reads.stride + at;
    const int64_t some = std::min(kPrefetchStep, reads.bytes - at);
    for (int64_t line = 0; line < some; line += 64) __builtin_prefetch(from + line, 0, 2);
    at += some;
    left -= some;
    if (at < reads.bytes) return true;
    ++piece;
    at = 0;
    return true;
  }
};

ThreadPool::ThreadPool(int threads) : ThreadPool(threads, machine_topology()) {}

ThreadPool::ThreadPool(int threads, const Topology& topology)
    : size_(threads > 0 ? threads : available_cpus()),
      max_prefetch_bytes_(max_prefetch_bytes()),
      node_of_cpu_(CPU_SETSIZE, 0),
      used_(size_),
      crew_(size_) {
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
  seats_ = std::make_unique<Seat[]>(size_);
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
  back_to_work_.notify_all();
  for (std::thread& w : workers_) w.join();
}

// The share of the own node first, then what the others have not got to.
void ThreadPool::take_chunks(int thread) {
  // The caller's thread is not ours to bind: it helps the node on which it happens to be.
  const int cpu = thread == 0 && num_nodes_ > 1 ? sched_getcpu() : -1;
  const int home = cpu < 0 ? node_of_thread_[thread] : node_of_cpu_[cpu];
  for (int k = 0; k < num_nodes_; ++k) {
    Share& share = shares_[(home + k) % num_nodes_];
    for (;;) {
      const int64_t begin = share.next.fetch_add(loop_.chunk, std::memory_order_relaxed);
      if (begin >= share.end) break;
      loop_.call(loop_.body, begin, std::min(begin + loop_.chunk, share.end), thread);
    }
  }
}

// The part of a thread that has not come, -1: all are taken.
int64_t ThreadPool::abandoned_part(int thread) {
  const uint64_t loop = loop_.state.load(std::memory_order_relaxed) & ~kOpen;
  for (int k = 0; k < size_; ++k) {
    const int other = (thread + k) % size_;
    std::atomic<uint64_t>& taken = seats_[other].taken;
    if (other >= loop_.parts || taken.load(std::memory_order_relaxed) == loop) continue;
    if (taken.exchange(loop, std::memory_order_relaxed) != loop) return other;
  }
  return -1;
}

// What another thread has before it and has not begun, -1: nothing.
int64_t ThreadPool::part_of_another(int thread) {
  for (int k = 1; k < size_; ++k) {
    std::atomic<int64_t>& ahead = seats_[(thread + k) % size_].ahead;
    if (ahead.load(std::memory_order_relaxed) < 0) continue;
    const int64_t part = ahead.exchange(-1, std::memory_order_relaxed);
    if (part >= 0) return part;
  }
  return -1;
}

// The own part first. What follows it is claimed at once, from those that are nobody's own, for the others
// may be on their way; from then on, parts that are still untouched come first: they are large.
void ThreadPool::take_parts(int thread) {
  const uint64_t loop = loop_.state.load(std::memory_order_relaxed) & ~kOpen;
  bool all_came = false;
  const auto claim = [&](bool look) -> int64_t {
    if (look && !all_came) {
      const int64_t part = abandoned_part(thread);
      if (part >= 0) return part;
      all_came = true;
    }
    const int64_t part = next_part_.fetch_add(1, std::memory_order_relaxed);
    return part < loop_.parts ? part : -1;
  };
  const bool own =
      thread < loop_.parts && seats_[thread].taken.exchange(loop, std::memory_order_relaxed) != loop;
  std::atomic<int64_t>& ahead = seats_[thread].ahead;
  LoopPart part{own ? thread : claim(true), -1, false};
  for (bool look = !own; part.index >= 0; look = true) {
    part.next = claim(look);
    ahead.store(part.next, std::memory_order_relaxed);
    loop_.part_call(loop_.body, part, thread);
    part.index = ahead.exchange(-1, std::memory_order_relaxed);
    part.prefetched = part.index >= 0;
    if (part.index < 0) part.index = claim(true);
    if (part.index < 0) part.index = part_of_another(thread);
  }
}

void ThreadPool::work(int thread) {
  try {
    if (loop_.parts > 0) {
      take_parts(thread);
    } else {
      take_chunks(thread);
    }
  } catch (...) {
    // The others stop at their next chunk or part.
    for (int k = 0; k < num_nodes_; ++k) shares_[k].next.store(shares_[k].end, std::memory_order_relaxed);
    next_part_.store(loop_.parts, std::memory_order_relaxed);
    while (loop_.parts > 0 && (abandoned_part(thread) >= 0 || part_of_another(thread) >= 0)) {
    }
    seats_[thread].ahead.store(-1, std::memory_order_relaxed);
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void ThreadPool::prefetch_while_waiting(const FirstReads& reads) {
  first_reads_ = reads;
  ++loop_.first_reads_number;
}

void ThreadPool::wait_a_little(Waiting& waiting, int thread) const {
  if (!waiting.prefetch(thread)) {
    ++waiting.idle;
    relax();
  }
}

void ThreadPool::share_out(int64_t count, int64_t chunk) {
  loop_.parts = 0;
  loop_.chunk = chunk = std::max<int64_t>(1, chunk);
  // Node k has the same part of every loop, whatever its length: rows of a weight stay with the node that
  // touched them first.
  const int64_t chunks = (count + chunk - 1) / chunk;
  int64_t begin = 0;
  for (int k = 0; k < num_nodes_; ++k) {
    const int64_t end = k + 1 == num_nodes_ ? count : chunks * threads_until_[k] / size_ * chunk;
    shares_[k].next.store(begin, std::memory_order_relaxed);
    shares_[k].end = end;
    begin = end;
  }
}

void ThreadPool::use(int threads) {
  {
    std::lock_guard lock(mutex_);
    used_.store(std::clamp(threads, 1, size_), std::memory_order_relaxed);
  }
  back_to_work_.notify_all();
}

// At the end of a stretch of work: how much of it was stolen.
void ThreadPool::look_around() {
  const auto now = Clock::now();
  if (now < next_look_) return;
  const bool worked = now < next_look_ + stretch_;  // and did not pause for most of it
  const double least = 0.5 * used() * std::chrono::duration<double>(stretch_).count();
  const std::optional<double> stolen = stolen_time_.share(least);
  // Hundreds of processors and interrupts make a long file: looking may take a thousandth of the time.
  stretch_ = std::max<Clock::duration>(Crew::kStretch, 1000 * (Clock::now() - now));
  next_look_ = now + stretch_;
  if (!worked || !stolen) return;
  const int before = crew_.size();
  crew_.observe(*stolen);
  if (crew_.size() != before) use(crew_.size());
}

void ThreadPool::run(Call call, void* body) {
  look_around();
  loop_.call = call;
  loop_.body = body;
  // The loop's fields are published by this release to the acquire of a worker that joins. The order of this
  // store and the load of sleepers_ against a worker's increment and last look (both seq_cst) is what loses
  // no wake-up.
  const uint64_t loop = loop_.state.load(std::memory_order_relaxed) + kNextLoop;
  loop_.state.store(loop | kOpen, std::memory_order_seq_cst);
  if (awake_.load(std::memory_order_relaxed)) awake_.store(false, std::memory_order_relaxed);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard lock(mutex_);
    }  // a worker between its last look and its sleep has the lock: wait for it
    wake_.notify_all();
  }
  work(0);
  // Nothing is left to hand out: close the loop, then wait for the workers that are still inside. The acquire
  // pairs with their release on leaving, so that their writes are visible here.
  loop_.state.store(loop, std::memory_order_seq_cst);
  Waiting waiting;
  waiting.update(first_reads_, loop_.first_reads_number, max_prefetch_bytes_);
  for (int t = 1; t < size_; ++t) {
    while (seats_[t].inside.load(std::memory_order_seq_cst) == loop) {
      wait_a_little(waiting, 0);
      if (waiting.idle > kSpins) std::this_thread::yield();
    }
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::worker(int thread) {
  uint64_t seen = 0;
  std::atomic<uint64_t>& inside = seats_[thread].inside;
  const auto open = [&] {
    const uint64_t state = loop_.state.load(std::memory_order_seq_cst);
    return (state & kOpen) != 0 && state != (seen | kOpen);
  };
  Waiting waiting;
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint64_t state = loop_.state.load(std::memory_order_acquire);
    if ((state & kOpen) != 0 && state != (seen | kOpen)) {
      inside.store(state & ~kOpen, std::memory_order_seq_cst);
      if (loop_.state.load(std::memory_order_seq_cst) == state) {
        seen = state & ~kOpen;
        work(thread);
        waiting.update(first_reads_, loop_.first_reads_number, max_prefetch_bytes_);
      }
      inside.store(0, std::memory_order_release);
      waiting.idle = 0;
    } else if (thread >= used()) {
      std::unique_lock lock(mutex_);
      back_to_work_.wait(lock, [&] { return stop_.load(std::memory_order_relaxed) || thread < used(); });
    } else if (waiting.idle < kSpins) {
      wait_a_little(waiting, thread);
    } else if (waiting.idle < kSpinsAwake && awake_.load(std::memory_order_relaxed)) {
      wait_a_little(waiting, thread);
      if (waiting.idle % 64 == 0) std::this_thread::yield();
    } else {
      std::unique_lock lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return stop_.load(std::memory_order_relaxed) || open(); });
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      waiting.idle = 0;
    }
  }
}

}  // namespace millrace
