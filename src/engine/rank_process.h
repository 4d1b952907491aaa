// What a process does that a front started (rank_front.h): it says who it is and what it has, beats, loads
// its part of the model, and computes. Rank 0 has rank 0's executor and takes its orders from the front; the
// others follow it as ever.
#pragma once

#include <string>

#include "millrace/options.h"

namespace millrace {

// Until the front ends the group; the process ends by itself when the front has gone. `front`: "host:port";
// `key`: the group's. False: the front has something against this rank, and says it. Throws Error.
bool run_rank(const EngineOptions& options, const std::string& front, const std::string& key);

}  // namespace millrace
