// How many threads to use where nobody says so. A processor may have fewer cores than it shows threads, cores
// of two kinds, or, in a container, a quota below its processors: which of these counts reads memory fastest
// is measured, by the loop that decoding is held against. Results never depend on the number.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/topology.h"

namespace millrace {

// Of the CPUs that a process may use.
struct CoreCounts {
  int cpus = 1;        // hardware threads
  int cores = 1;       // those that share a core counted once
  int fast_cores = 1;  // cores of the fastest kind
};

// As `root` (as /sys/devices/system/cpu) describes them; what it does not is taken to be alike.
CoreCounts read_cores(const std::string& root, const std::vector<int>& allowed);

// Ascending, without repetition: the counts above below `quota` (CPUs, 0: none), or the whole numbers around
// it.
std::vector<int> thread_candidates(const CoreCounts& cores, double quota);

struct ThreadChoice {
  int threads = 1;
  std::string note;  // why, "8 threads read 41.2 GB/s, 16 read 40.8"; empty where there was no choice
};
// Bytes a second that so many threads read.
using ReadSpeed = std::function<double(int threads)>;
// Measured now: the best of some passes over memory that caches do not hold or, for a quota, the mean over
// two periods of its clock.
ReadSpeed read_speed(const Topology& topology, bool quota);
// The fewest that come within 3% of the best. One candidate is not measured.
ThreadChoice choose_threads(const std::vector<int>& candidates, const ReadSpeed& speed);

// Of this process on the CPUs of a topology, measured now where there is a choice: some 10 ms for each, or
// two periods of the quota's clock.
ThreadChoice choose_threads(const Topology& topology);

}  // namespace millrace
