// RankFront: the ranks that this process started and does not belong to. Open MPI ends all ranks when one
// dies, so whoever has clients to answer must be outside: it launches the group, hears from every rank twice
// a second, tells when one is lost, and forms the group anew, with all ranks or without the lost one.
//
//   front                         rank 0              other ranks
//     RankFront   <-- beats ------ beats               beats        every 0.5 s, one connection each
//     engine      <-- replies ---- LeaderExecutor <--- MPI ---->    followers
//                 --- messages -->
//
// A group is lost when a connection ends, when nothing was heard of a rank for kSilence, or when every rank
// has been waiting for another for as long: then a link between them is down. One thread watches; send and
// recv are the engine's thread's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "dist/rank_link.h"
#include "engine/rank_launcher.h"
#include "engine/rank_messages.h"
#include "millrace/options.h"
#include "millrace/stats.h"

namespace millrace {

class RankFront {
 public:
  static constexpr double kSilence = 3.0;  // seconds

  // `claims`: what ranks started with these options have to have (rank_group.h). `wake` is called, from the
  // front's own thread, when a group is lost and when one is there.
  using Claims = std::function<std::vector<dist::Claim>(const EngineOptions&)>;
  RankFront(EngineOptions options, Claims claims, std::function<void()> wake);
  ~RankFront();  // the group ends
  RankFront(const RankFront&) = delete;
  RankFront& operator=(const RankFront&) = delete;

  // The first group; returns when all ranks are there. Throws Error with the reason why they are not. `tick`
  // is called now and then meanwhile, and may throw.
  void start(const std::function<void()>& tick);
  // Is there a group with all its ranks?
  bool up() const;
  // One that has loaded the model?
  bool computing() const { return up() && computes_; }
  // Why the last group has gone.
  std::string loss() const;
  // In the background, as often as it takes: up() says when there is a group again.
  void form_again();

  // A message to rank 0, and what it answers. Throw RanksLost.
  void send(const RankMessage& message, std::span<const std::byte> bytes = {});
  void recv(std::span<std::byte> bytes);
  // Is there something to receive? Throws RanksLost.
  bool answered();
  // The group has loaded its model and can step: from now on it is told to end, not made to, and when it is
  // lost the next one is formed without a pause.
  void computes();
  // Bytes of the model that ranks have loaded, and that they load; 0, 0 before they begin.
  struct Loaded {
    size_t done = 0, all = 0;
  };
  Loaded loaded() const;

  RankGroupStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kIdle, kForming, kUp, kLost, kFailed };
  struct Rank {
    dist::Hello hello;
    dist::Socket socket;
    Clock::time_point heard = {};
    dist::Beat beat = {};
    std::vector<std::byte> part;  // of a beat that has not come whole
  };
  struct Newcomer {  // a connection whose hello has not come whole
    dist::Socket socket;
    std::string line;
    Clock::time_point since;
  };

  void run();
  bool form_at_last(bool first);
  bool paused();
  RankSet next_set() const;
  std::string form(const RankSet& set);
  std::string absent() const;
  std::string watch();
  void end_group(double patience_s);
  void listen_for(int timeout_ms);
  void read_newcomer(Newcomer& newcomer);
  std::string join(Newcomer& newcomer, dist::Hello hello);
  void read_beats(Rank& rank);
  std::string fault() const;
  bool all_joined() const;
  void tell(State state, const std::string& why);
  [[noreturn]] void throw_lost();

  const EngineOptions options_;
  const Claims claims_;
  const std::function<void()> wake_;
  dist::Socket listener_;
  std::string address_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable news_;
  State state_ = State::kIdle;
  bool ordered_ = false;
  std::string why_;          // of kLost and kFailed
  std::vector<Rank> ranks_;  // of the group of now, by rank
  std::shared_ptr<dist::Socket> data_;
  uint64_t restarts_ = 0;

  std::atomic<bool> stopping_{false};  // set under the lock: the front's thread waits for it
  std::atomic<bool> computes_{false};  // the group of now does, or did until it was lost

  // The front's own thread's.
  std::string key_;
  RankSet set_;
  std::vector<dist::Claim> wanted_;
  std::vector<Newcomer> newcomers_;
  std::string refusal_;
  Launched launched_;
  int lost_rank_ = -1;  // of the options' ranks; -1: none in particular
  bool gone_ = false;   // some rank has ended, so that the launcher ends too
  int attempts_ = 0;    // since a group computed

  std::thread thread_;
};

}  // namespace millrace
