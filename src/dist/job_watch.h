// JobWatch: the ranks of an mpirun job watch one another. Each says twice a second, to every other and beside
// whatever it computes or exchanges, that it lives; a rank of which nothing was heard for kSilence hangs or
// is stopped, or the link to it is down, and everybody would wait for it. (Ranks that a front started are
// watched by the front: engine/rank_front.h.)
//
//   rank r's own thread   -- a note each 0.5 s -->   rank s's own thread: counts how long none came
//
// Silence is counted in looks of the watching thread, not by the clock: of a job that is suspended as a
// whole, or a machine that is, nobody has been silent.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "dist/watched_communicator.h"

namespace millrace::dist {

// How notes of one byte go between ranks, beside their messages. Neither call waits.
class Post {
 public:
  enum class Note : uint8_t { kLives, kLeaves };

  virtual ~Post() = default;
  // Left out while an earlier one to this rank has not gone.
  virtual void send(int to, Note note) = 0;
  // The oldest that has come from a rank.
  virtual std::optional<Note> take(int from) = 0;
};

// What one rank knows of the others; its looks are somebody else's to make.
class SilentRanks {
 public:
  static constexpr int kLooksPerSecond = 10;
  static constexpr int kLooksPerNote = 5;
  static constexpr int kSilence =
      3 * kLooksPerSecond;  // in looks; a rank more for each rank: one speaks first

  // `calls`: a rank that receives a long message gets notes behind it. Both must outlive this.
  SilentRanks(int rank, int ranks, Post& post, const Watch& calls);

  // Sends and takes notes. A rank that nothing was heard of for too long, while this one is not receiving
  // what takes its time; -1: there is none.
  int look();
  // This rank waits for nobody any more, and nobody is to wait for it.
  void leave();

 private:
  const int rank_;
  Post& post_;
  const Watch& calls_;
  uint64_t looks_ = 0;
  std::vector<int> silent_;  // [ranks] looks since the last note; -1: it has left
};

class JobWatch {
 public:
  // lost(rank): called once, by the watching thread.
  JobWatch(int rank, int ranks, std::unique_ptr<Post> post, const Watch& calls,
           std::function<void(int)> lost);
  ~JobWatch();  // says so to the others
  JobWatch(const JobWatch&) = delete;
  JobWatch& operator=(const JobWatch&) = delete;

 private:
  void run();

  const std::unique_ptr<Post> post_;
  SilentRanks ranks_;
  const std::function<void(int)> lost_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace millrace::dist
