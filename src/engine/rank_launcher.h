// RankLauncher: the command that starts a group of ranks, as a process of its own: mpirun, or what the
// options name in its place, with `millrace rank` behind it.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "millrace/options.h"

namespace millrace {

// Which ranks a group is formed of.
struct RankSet {
  EngineOptions options = {};           // with the number of ranks, and their speeds
  std::vector<std::string> hosts = {};  // one per rank; empty: the launcher decides
};
// Those of the options; without the rank `left_out`, if that is not -1.
RankSet rank_set(const EngineOptions& options, int left_out = -1);

// EngineOptions::rank_hosts, one by one.
std::vector<std::string> parse_rank_hosts(const EngineOptions& options);
// Most of them that are the same host; 1 where the launcher decides.
int most_on_a_host(const EngineOptions& options);
// Are all ranks on this machine, as far as the options say?
bool ranks_are_here(const EngineOptions& options);

// The words of the command; `front`: "host:port", which ranks connect to.
std::vector<std::string> launch_command(const RankSet& set, const std::string& front);

// A process that was started, and ended with this object.
class Launched {
 public:
  Launched() = default;
  // `key` goes into its environment (MILLRACE_RANK_KEY). Throws Error{kIo}.
  Launched(const std::vector<std::string>& command, const std::string& key);
  ~Launched() { end(0); }
  Launched(Launched&& other) noexcept : pid_(other.pid_) { other.pid_ = -1; }
  Launched& operator=(Launched&& other) noexcept;

  // How it ended, in words, once it has; nothing while it runs.
  std::optional<std::string> ended();
  // Waits so long for it to end by itself, then asks it to, then makes it.
  void end(double patience_s);

 private:
  bool wait(double seconds);

  pid_t pid_ = -1;
};

}  // namespace millrace
