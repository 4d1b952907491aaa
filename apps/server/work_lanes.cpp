// Two queues and their threads; see work_lanes.h.
#include "work_lanes.h"

#include <fmt/core.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "api_error.h"

namespace millrace::server {
namespace {

// Beside a thread of the engine it gets a tenth of a core, and never takes one over when it wakes.
constexpr int kSlowNice = 10;

// Best effort: where the system refuses, the slow lane is merely not slower.
void lower_priority() {
  const sched_param param{};
  ::sched_setscheduler(0, SCHED_BATCH, &param);
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kSlowNice);
}

ApiError busy(const char* problem) {
  ApiError error(503, problem, "", "busy");
  error.retry_after_s = 2;
  return error;
}

}  // namespace

WorkLanes::WorkLanes(Handler handler, WorkLaneOptions options, std::atomic<int64_t>& queued)
    : handler_(std::move(handler)), options_(options), queued_(queued) {
  for (int i = 0; i < options_.threads; ++i) fast_.threads.emplace_back([this] { run(fast_, false); });
  for (int i = 0; i < options_.slow_threads; ++i) slow_.threads.emplace_back([this] { run(slow_, true); });
}

std::stop_source WorkLanes::submit(HttpRequest request, Client client, Done done) {
  auto job = std::make_shared<Job>(
      Job{.request = std::move(request), .client = std::move(client), .done = std::move(done)});
  std::stop_source source = job->source;
  if (job->request.body.size() > options_.fast_body_bytes) {
    queue_slow(std::move(job));
    return source;
  }
  {
    const std::lock_guard lock(fast_.mutex);
    if (!fast_.ending) fast_.queue.push_back(std::move(job));
  }
  fast_.changed.notify_one();
  return source;
}

void WorkLanes::post(std::function<void()> work) {
  auto job = std::make_shared<Job>();
  job->other = std::move(work);
  {
    const std::lock_guard lock(slow_.mutex);
    if (!slow_.ending) slow_.queue.push_back(std::move(job));
  }
  slow_.changed.notify_one();
}

void WorkLanes::queue_slow(JobPtr job) {
  bool full = false;
  {
    const std::lock_guard lock(slow_.mutex);
    if (slow_.ending) return;
    // Those whose clients have left hold no place.
    std::erase_if(slow_.queue, [&](const JobPtr& waiting) {
      const bool left = waiting->source.stop_requested();
      if (left) slow_.bytes -= waiting->request.body.size();
      return left;
    });
    queued_ = static_cast<int64_t>(slow_.queue.size());
    // One that is alone may be as large as a body may be.
    full = slow_.queue.size() >= options_.slow_requests ||
           (!slow_.queue.empty() && slow_.bytes + job->request.body.size() > options_.slow_bytes);
    if (!full) {
      job->queued = std::chrono::steady_clock::now();
      slow_.bytes += job->request.body.size();
      slow_.queue.push_back(job);
      queued_ = static_cast<int64_t>(slow_.queue.size());
    }
  }
  if (full) {
    job->done({.response = error_response(busy("too many large requests wait to be read: try again later"))});
  } else {
    slow_.changed.notify_one();
  }
}

void WorkLanes::stop() {
  for (Lane* lane : {&fast_, &slow_}) {
    const std::lock_guard lock(lane->mutex);
    lane->ending = true;
    lane->queue.clear();
    for (const JobPtr& job : lane->running) job->source.request_stop();
    lane->changed.notify_all();
  }
  for (Lane* lane : {&fast_, &slow_}) {
    for (std::thread& thread : lane->threads) thread.join();
    lane->threads.clear();
  }
}

// The next job that somebody still waits for; null at the end.
WorkLanes::JobPtr WorkLanes::next(Lane& lane) {
  std::unique_lock lock(lane.mutex);
  while (true) {
    lane.changed.wait(lock, [&] { return lane.ending || !lane.queue.empty(); });
    if (lane.ending) return nullptr;
    JobPtr job = std::move(lane.queue.front());
    lane.queue.pop_front();
    if (&lane == &slow_) {
      lane.bytes -= job->request.body.size();
      queued_ = static_cast<int64_t>(lane.queue.size());
    }
    if (job->source.stop_requested()) continue;
    lane.running.push_back(job);
    return job;
  }
}

void WorkLanes::run(Lane& lane, bool is_slow) {
  ::prctl(PR_SET_NAME, is_slow ? "http-slow" : "http-requests");
  if (is_slow) lower_priority();
  while (const JobPtr job = next(lane)) {
    if (is_slow) {
      work_slow(job);
    } else {
      work_fast(job);
    }
    const std::lock_guard lock(lane.mutex);
    std::erase(lane.running, job);
  }
}

void WorkLanes::work_fast(const JobPtr& job) {
  Reply reply =
      handler_(job->request, job->client, {.slice = options_.slice, .stop = job->source.get_token()});
  if (job->source.stop_requested()) return;
  if (reply.unfinished) {
    queue_slow(job);
  } else {
    job->done(std::move(reply));
  }
}

void WorkLanes::work_slow(const JobPtr& job) {
  if (job->other) return job->other();
  const auto now = std::chrono::steady_clock::now();
  const auto limit = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(options_.timeout_s));
  if (now - job->queued > limit) {
    job->done(
        {.response = error_response(busy("other large requests took too long to read: try again later"))});
    return;
  }
  Reply reply =
      handler_(job->request, job->client, {.deadline = now + limit, .stop = job->source.get_token()});
  job->request.body = {};  // its memory, before the answer begins
  if (!job->source.stop_requested()) job->done(std::move(reply));
}

}  // namespace millrace::server
