#include "engine/rank_launcher.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/topology.h"
#include "engine/rank_group.h"

extern char** environ;

namespace millrace {
namespace {

constexpr double kAskedToEnd = 2.0;  // seconds until a launcher that was asked to end is made to

std::vector<std::string> words_of_line(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

bool is_mpirun(const std::string& program) {
  const std::string name = std::filesystem::path(program).filename();
  return name.starts_with("mpirun") || name.starts_with("mpiexec") || name.starts_with("orterun");
}

// The program that ranks run: this one, unless it is somebody else's with the engine in it.
std::string rank_program() {
  std::error_code none;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", none);
  return self.filename().string().starts_with("millrace") ? self.string() : "millrace";
}

// Whether mpirun would start everybody here: there is no job whose hosts it would take, and nobody has said
// where to start ranks or how they talk.
bool is_alone_here() {
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view variable = *at;
    for (const std::string_view known : {"SLURM_JOB_ID=", "PBS_JOBID=", "LSB_JOBID=", "OMPI_MCA_btl=",
                                         "OMPI_MCA_orte_default_hostfile=", "OMPI_MCA_hostfile="}) {
      if (variable.starts_with(known)) return false;
    }
  }
  return true;
}

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : ",") + word;
  return all;
}

// How mpirun is to give ranks to hosts so that they have those of the list: hosts in turn, or, where one that
// is named several times has its ranks one after the other, one host's after another's.
const char* hosts_follow(const std::vector<std::string>& hosts) {
  bool several = false;
  for (size_t r = 1; r < hosts.size(); ++r) several = several || hosts[r] == hosts[r - 1];
  return several ? "slot" : "node";
}

std::string words_of_status(int status) {
  if (WIFSIGNALED(status)) return fmt::format("ended by signal {}", WTERMSIG(status));
  return fmt::format("ended with status {}", WEXITSTATUS(status));
}

}  // namespace

std::vector<std::string> parse_rank_hosts(const EngineOptions& options) {
  std::vector<std::string> hosts;
  std::istringstream in(options.rank_hosts);
  for (std::string host; std::getline(in, host, ',');) hosts.push_back(host);
  return hosts;
}

int most_on_a_host(const EngineOptions& options) {
  const std::vector<std::string> hosts = parse_rank_hosts(options);
  int most = 1;
  for (const std::string& host : hosts) {
    most = std::max(most, static_cast<int>(std::count(hosts.begin(), hosts.end(), host)));
  }
  return most;
}

bool ranks_are_here(const EngineOptions& options) {
  return options.rank_hosts.empty() && words_of_line(options.launcher).size() == 1;
}

RankSet rank_set(const EngineOptions& options, int left_out) {
  RankSet set{options, parse_rank_hosts(options)};
  if (left_out < 0) return set;
  const int in_stage = options.tensor_parallel;
  const bool stages = options.pipeline_parallel > 1;
  (stages ? set.options.pipeline_parallel : set.options.tensor_parallel) -= 1;
  if (set.options.tensor_parallel == 1) set.options.expert_parallel = false;
  // Of stages the whole one goes.
  const int first = stages ? left_out / in_stage * in_stage : left_out, count = stages ? in_stage : 1;
  const auto leave_out = [&](std::vector<std::string>& list) {
    list.erase(list.begin() + first, list.begin() + first + count);
  };
  if (!set.hosts.empty()) leave_out(set.hosts);
  set.options.rank_hosts = joined(set.hosts);
  if (!options.rank_speeds.empty() && options.rank_speeds != "auto") {
    std::vector<std::string> speeds;
    std::istringstream in(options.rank_speeds);
    for (std::string speed; std::getline(in, speed, ',');) speeds.push_back(speed);
    leave_out(speeds);
    set.options.rank_speeds = ranks_of(set.options) > 1 ? joined(speeds) : "";
  }
  return set;
}

std::vector<std::string> launch_command(const RankSet& set, const std::string& front) {
  const EngineOptions& options = set.options;
  std::vector<std::string> command = words_of_line(options.launcher);
  const int ranks = ranks_of(options);
  const bool plain = command.size() == 1, mpirun = is_mpirun(command.front());
  const auto add = [&](std::initializer_list<std::string> words) {
    command.insert(command.end(), words.begin(), words.end());
  };
  if (plain && mpirun) add({"--bind-to", "none"});
  if (plain && mpirun && set.hosts.empty()) add({"--oversubscribe"});
  // By shared memory alone: MPI's TCP, and libfabric's, would listen on other addresses of the machine.
  if (plain && mpirun && set.hosts.empty() && is_alone_here()) {
    add({"--mca", "btl", "^tcp,ofi,openib,usnic", "--mca", "mtl", "^ofi"});
  }
  if (plain && mpirun && geteuid() == 0) add({"--allow-run-as-root"});
  if (mpirun) add({"-x", "MILLRACE_RANK_KEY"});
  if (!set.hosts.empty()) add({"--host", joined(set.hosts), "--map-by", hosts_follow(set.hosts)});
  // All that a rank has to know is on its line: files of settings on its host are not asked.
  add({"-n", std::to_string(ranks), rank_program(), "rank", options.model, "--front", front});
  add({"--config", "/dev/null"});
  add({"--tensor-parallel", std::to_string(options.tensor_parallel)});
  add({"--pipeline-parallel", std::to_string(options.pipeline_parallel)});
  add({"--context-parallel", std::to_string(options.context_parallel)});
  if (options.context_parallel > 1) add({"--context-schedule", options.context_schedule});
  add({options.expert_parallel ? "--expert-parallel" : "--expert-parallel=false"});
  if (!options.rank_speeds.empty()) add({"--rank-speeds", options.rank_speeds});
  for (const std::string& adapter : options.adapters) add({"--adapter", adapter});
  add({"--device", options.device});
  // Ranks of one machine share its processors.
  int threads = options.threads;
  if (threads == 0 && ranks_are_here(options)) {
    threads = std::max(1, available_cpus() / ranks);
  }
  add({"--threads", std::to_string(threads)});
  add({options.lock ? "--lock" : "--lock=false"});
  return command;
}

Launched::Launched(const std::vector<std::string>& command, const std::string& key) {
  std::vector<std::string> variables;
  for (char** at = environ; *at != nullptr; ++at) variables.emplace_back(*at);
  std::erase_if(variables, [](const std::string& v) { return v.starts_with("MILLRACE_RANK_KEY="); });
  variables.push_back("MILLRACE_RANK_KEY=" + key);
  const auto pointers = [](const std::vector<std::string>& words) {
    std::vector<char*> list;
    for (const std::string& word : words) list.push_back(const_cast<char*>(word.c_str()));
    list.push_back(nullptr);
    return list;
  };
  const std::vector<char*> arguments = pointers(command), environment = pointers(variables);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, 2, 1);  // what ranks say belongs to the log
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  // A session of its own: an interrupt from the terminal is the front's to act on.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  const int error =
      posix_spawnp(&pid_, arguments.front(), &files, &attributes, arguments.data(), environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  if (error != 0) {
    pid_ = -1;
    throw_error(ErrorCode::kIo, "{}: cannot be started: {}{}", command.front(), std::strerror(error),
                is_mpirun(command.front()) ? " (install openmpi-bin)" : "");
  }
}

Launched& Launched::operator=(Launched&& other) noexcept {
  if (this == &other) return *this;
  end(0);
  pid_ = other.pid_;
  other.pid_ = -1;
  return *this;
}

std::optional<std::string> Launched::ended() {
  if (pid_ < 0) return "was not started";
  int status = 0;
  const pid_t found = waitpid(pid_, &status, WNOHANG);
  if (found == 0 || (found < 0 && errno == EINTR)) return std::nullopt;
  pid_ = -1;
  return found < 0 ? "ended" : words_of_status(status);  // who ignores SIGCHLD is not told how
}

bool Launched::wait(double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!ended()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

void Launched::end(double patience_s) {
  if (pid_ < 0 || (patience_s > 0 && wait(patience_s))) return;
  if (pid_ < 0) return;
  kill(-pid_, SIGTERM);  // with what a script has started
  if (wait(kAskedToEnd)) return;
  kill(-pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

}  // namespace millrace
