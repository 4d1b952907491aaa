#include "dist/job_watch.h"

#include <chrono>
#include <utility>

namespace millrace::dist {

SilentRanks::SilentRanks(int rank, int ranks, Post& post, const Watch& calls)
    : rank_(rank), post_(post), calls_(calls), silent_(static_cast<size_t>(ranks)) {}

int SilentRanks::look() {
  const bool says = looks_++ % kLooksPerNote == 0;
  const bool receives = calls_.moving();
  int lost = -1;
  for (int r = 0; r < static_cast<int>(silent_.size()); ++r) {
    int& silent = silent_[static_cast<size_t>(r)];
    if (r == rank_ || silent < 0) continue;
    if (says) post_.send(r, Post::Note::kLives);
    silent += receives ? 0 : 1;
    for (auto note = post_.take(r); note && silent >= 0; note = post_.take(r)) {
      silent = *note == Post::Note::kLeaves ? -1 : 0;
    }
    if (silent >= kSilence + rank_ && lost < 0) lost = r;
  }
  return lost;
}

void SilentRanks::leave() {
  for (int r = 0; r < static_cast<int>(silent_.size()); ++r) {
    if (r != rank_ && silent_[static_cast<size_t>(r)] >= 0) post_.send(r, Post::Note::kLeaves);
  }
}

JobWatch::JobWatch(int rank, int ranks, std::unique_ptr<Post> post, const Watch& calls,
                   std::function<void(int)> lost)
    : post_(std::move(post)),
      ranks_(rank, ranks, *post_, calls),
      lost_(std::move(lost)),
      thread_([this] { run(); }) {}

JobWatch::~JobWatch() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  ended_.notify_one();
  thread_.join();
  ranks_.leave();
}

void JobWatch::run() {
  constexpr std::chrono::milliseconds kLook(1000 / SilentRanks::kLooksPerSecond);
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, kLook, [this] { return ending_; })) {
    const int rank = ranks_.look();
    if (rank >= 0) return lost_(rank);
  }
}

}  // namespace millrace::dist
