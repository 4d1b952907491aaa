// A communicator that somebody watches from another thread: what went to and came from each rank so far, and
// for how long the call of now has been waiting. A long message over a slow link is no waiting: a call is
// given twice the time that its bytes take on the slowest link, once that was measured. Every call is another
// communicator's. Parts of the group (split) are watched with it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "dist/communicator.h"
#include "dist/shares.h"

namespace millrace::dist {

// One thread writes, the one that makes the calls; any other reads.
struct Watch {
  std::array<std::atomic<uint64_t>, kMaxTensorRanks> sent{}, received{};        // bytes, by rank
  std::array<std::atomic<double>, kMaxTensorRanks> latency_s{}, bytes_per_s{};  // measure_links
  std::atomic<uint64_t> calls{0};
  std::atomic<double> slowest_bytes_per_s{0};  // of this rank's links; 0: not measured
  std::atomic<int64_t> waiting_since_ns{0};    // of the steady clock; 0: no call is under way

  double waiting_s() const;  // since the call should have been over; 0 before
  bool moving() const;       // is there a call, and may its bytes still be on their way?
};

// `watch` must outlive it. The group has at most kMaxTensorRanks ranks.
std::unique_ptr<Communicator> make_watched(std::unique_ptr<Communicator> inner, Watch& watch);

// Collective: every pair of ranks measures its link, and what concerns this one is noted.
void measure_links(Communicator& group, Watch& watch);

}  // namespace millrace::dist
