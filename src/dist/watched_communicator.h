// A communicator that somebody watches from another thread: what went to and came from each rank so far, and
// for how long the call of now has been waiting. Every call is another communicator's.
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
  std::atomic<int64_t> waiting_since_ns{0};  // of the steady clock; 0: no call is under way

  double waiting_s() const;
};

// `watch` must outlive it. The group has at most kMaxTensorRanks ranks.
std::unique_ptr<Communicator> make_watched(std::unique_ptr<Communicator> inner, Watch& watch);

// Collective: every pair of ranks measures its link, and what concerns this one is noted.
void measure_links(Communicator& group, Watch& watch);

}  // namespace millrace::dist
