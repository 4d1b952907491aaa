// One prompt's attention over several processes: every rank has the keys and values of its own tokens, and
// gets the bits that one device would have given.
//
//   mpirun -n 4 context_parallel --tokens 8192 --schedule mesh
//   context_parallel --threads 4 --tokens 8192 --mbit 1000          ranks are threads, over a link of 1
//   Gbit/s
//
// Options: --schedule ring, mesh (--a of its a x b) or wallfacer; --heads, --kv-heads, --head-dim; --backward
// 1; --latency-us with --mbit;
// --repeat; --check 0 leaves out the comparison with one device. One line of JSON a rank 0 comes out, with
// the time and the bytes; bench/scaling.py reads it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "dist/context_attention.h"
#include "dist/delayed_communicator.h"
#include "dist/local_communicator.h"
#include "dist/mpi_communicator.h"
#include "millrace/error.h"

namespace dist = millrace::dist;
using dist::PartialMath;

namespace {

struct Options {
  std::map<std::string, int> numbers = {
      {"tokens", 4096}, {"heads", 8},  {"kv-heads", 2}, {"head-dim", 64},   {"threads", 0}, {"backward", 0},
      {"check", 1},     {"repeat", 1}, {"mbit", 0},     {"latency-us", 50}, {"a", 0}};
  std::string schedule = "ring";
  int operator[](const char* name) const { return numbers.at(name); }
};

[[noreturn]] void bad(const std::string& line) {
  throw millrace::Error(millrace::ErrorCode::kBadInput, line);
}

Options read_options(int count, char** words) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string word = words[i], name = word.rfind("--", 0) == 0 ? word.substr(2) : "";
    if (i + 1 >= count) bad(word + " needs a value");
    const std::string value = words[i + 1];
    if (name == "schedule") {
      if (value != "ring" && value != "mesh" && value != "wallfacer") {
        bad("--schedule is " + value + ", expected ring, mesh or wallfacer");
      }
      options.schedule = value;
      continue;
    }
    const auto found = options.numbers.find(name);
    if (found == options.numbers.end())
      bad(word + " is no option; the first lines of examples/context_parallel.cpp list them");
    char* end = nullptr;
    const long number = std::strtol(value.c_str(), &end, 10);
    if (value.empty() || *end != '\0' || number < 0 || number > 1 << 24)
      bad(word + " is " + value + ", expected a number from 0");
    found->second = static_cast<int>(number);
  }
  if (options["repeat"] < 1) bad("--repeat is 0, expected 1 or more");
  return options;
}

double seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Row `token` of a tensor, of bf16, the same whoever asks: ranks make their own tokens and no others.
void fill_row(uint16_t* to, int64_t count, unsigned tensor, int64_t token) {
  std::minstd_rand random(static_cast<unsigned>(token) * 4u + tensor + 1u);
  for (int64_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(random() % 2001u) / 500.0f - 2.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to[i] = static_cast<uint16_t>(bits >> 16);
  }
}
std::vector<uint16_t> rows_of(const std::vector<dist::TokenRun>& runs, int64_t row, unsigned tensor) {
  int64_t rows = 0;
  for (const dist::TokenRun& run : runs) rows += run.rows();
  std::vector<uint16_t> data(static_cast<size_t>(rows * row));
  uint16_t* at = data.data();
  for (const dist::TokenRun& run : runs) {
    for (int64_t token = run.first; token < run.last; ++token, at += row) fill_row(at, row, tensor, token);
  }
  return data;
}

// The largest team whose square divides the ranks.
int team_of(int ranks) {
  int team = 1;
  for (int c = 2; c * c <= ranks; ++c) {
    if (ranks % (c * c) == 0) team = c;
  }
  return team;
}

dist::ContextSchedule schedule_of(const Options& options, const dist::ContextLayout& layout,
                                  const dist::ContextProblem& problem) {
  if (options.schedule == "ring") return dist::ring_schedule(layout);
  if (options.schedule == "mesh") {
    const int a = options["a"] > 0 ? options["a"] : dist::best_mesh(problem.shape(), layout.ranks);
    return dist::mesh_schedule(layout, a);
  }
  return dist::wallfacer_schedule(layout, team_of(layout.ranks));
}

// Rows whose bits one device gives otherwise. A row does not depend on the others of a call, so a run of
// queries is computed against all keys up to its end.
int64_t differing_rows(mr_device* device, const dist::ContextProblem& problem,
                       const std::vector<dist::TokenRun>& runs, const std::vector<uint16_t>& out) {
  int64_t wrong = 0;
  const int64_t q_row = int64_t{problem.heads} * problem.head_dim,
                k_row = int64_t{problem.kv_heads} * problem.head_dim;
  const uint16_t* got = out.data();
  for (const dist::TokenRun& run : runs) {
    std::vector<uint16_t> q = rows_of({run}, q_row, 0), k = rows_of({{0, 0, run.last}}, k_row, 1),
                          v = rows_of({{0, 0, run.last}}, k_row, 2), want(q.size());
    mr_flash_problem p{};
    p.type = MR_BF16;
    p.batch = 1;
    p.heads = problem.heads;
    p.kv_heads = problem.kv_heads;
    p.head_dim = p.value_dim = problem.head_dim;
    p.max_q = static_cast<int32_t>(run.rows());
    p.max_k = static_cast<int32_t>(run.last);
    p.window_left = -1;
    PartialMath math(device, problem.heads, problem.kv_heads, problem.head_dim, problem.head_dim);
    size_t bytes = 0;
    void* workspace = math.workspace(p, bytes);
    PartialMath::check(
        mr_flash_forward(device, &p, {q.data(), 0, q_row, problem.head_dim},
                         {k.data(), 0, k_row, problem.head_dim}, {v.data(), 0, k_row, problem.head_dim},
                         {want.data(), 0, q_row, problem.head_dim}, nullptr, workspace, bytes, nullptr));
    for (int64_t row = 0; row < run.rows(); ++row, got += q_row) {
      if (std::memcmp(got, want.data() + row * q_row, static_cast<size_t>(q_row) * 2) != 0) ++wrong;
    }
  }
  return wrong;
}

struct CloseDevice {
  void operator()(mr_device* device) const { mr_device_close(device); }
};

void run_rank(const Options& options, dist::Communicator& group) {
  const mr_device_options cpu{1, nullptr};
  mr_device* opened = nullptr;
  PartialMath::check(mr_device_open("cpu", &cpu, &opened));
  const std::unique_ptr<mr_device, CloseDevice> device(opened);
  dist::ContextProblem problem;
  problem.heads = options["heads"];
  problem.kv_heads = options["kv-heads"];
  problem.head_dim = problem.value_dim = options["head-dim"];
  const dist::ContextLayout layout = dist::zigzag_layout({options["tokens"]}, group.size());
  const dist::ContextSchedule schedule = schedule_of(options, layout, problem);
  dist::ContextAttention attention(device.get(), group, problem, layout, schedule);
  const std::vector<dist::TokenRun> runs = layout.runs(group.rank());
  const int64_t q_row = int64_t{problem.heads} * problem.head_dim,
                k_row = int64_t{problem.kv_heads} * problem.head_dim;
  const std::vector<uint16_t> q = rows_of(runs, q_row, 0), k = rows_of(runs, k_row, 1),
                              v = rows_of(runs, k_row, 2);
  std::vector<uint16_t> out(q.size()), d_q(q.size()), d_k(k.size()), d_v(v.size());
  std::vector<float> lse(static_cast<size_t>(layout.rows(group.rank()) * problem.heads));
  if (group.rank() == 0) {
    attention.on_step = [&](size_t done, size_t steps) {
      std::fprintf(stderr, "\r%s: step %zu of %zu%s", schedule.name.c_str(), done, steps,
                   done == steps ? "\n" : "");
    };
  }
  const dist::ContextInputs in{q.data(), k.data(), v.data()};
  double best = 0;
  dist::Traffic before{}, after{};
  for (int i = 0; i < options["repeat"]; ++i) {
    group.barrier();
    before = group.traffic();
    const double start = seconds();
    attention.forward(in, out.data(), lse.data());
    after = group.traffic();
    if (options["backward"] != 0) {
      attention.backward(in,
                         {out.data(), lse.data(), out.data(), d_q.data(), d_k.data(), d_v.data(), nullptr});
    }
    group.barrier();
    const double took = seconds() - start;
    best = i == 0 ? took : std::min(best, took);
  }
  float wrong =
      options["check"] != 0 ? static_cast<float>(differing_rows(device.get(), problem, runs, out)) : 0;
  group.all_reduce({&wrong, 1});
  if (group.rank() == 0) {
    std::printf(
        "{\"ranks\": %d, \"link\": \"%s\", \"schedule\": \"%s\", \"tokens\": %d, \"heads\": %d, "
        "\"kv_heads\": %d, "
        "\"head_dim\": %d, \"backward\": %d, \"seconds\": %.6f, \"bytes_received\": %llu, "
        "\"rows_that_differ\": %s}\n",
        group.size(), std::string(group.name()).c_str(), schedule.name.c_str(), options["tokens"],
        problem.heads, problem.kv_heads, problem.head_dim, options["backward"], best,
        static_cast<unsigned long long>(after.bytes_received - before.bytes_received),
        options["check"] != 0 ? std::to_string(static_cast<long>(wrong)).c_str() : "null");
  }
  if (wrong != 0) throw millrace::Error(millrace::ErrorCode::kInternal, "rows differ from one device's");
}

std::unique_ptr<dist::Communicator> slowed(std::unique_ptr<dist::Communicator> group,
                                           const Options& options) {
  if (options["mbit"] == 0) return group;
  return dist::make_delayed(std::move(group), {options["latency-us"] * 1e-6, options["mbit"] * 125e3});
}

int run(const Options& options) {
  if (options["threads"] == 0) {
    const auto group = slowed(dist::make_mpi_world(), options);
    try {
      run_rank(options, *group);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "context_parallel: rank %d: %s\n", group->rank(), error.what());
      dist::abort_mpi(1);
      return 1;
    }
    return 0;
  }
  auto groups = dist::make_local_group(options["threads"]);
  std::vector<std::thread> threads;
  int status = 0;
  for (auto& own : groups) {
    own = slowed(std::move(own), options);
    threads.emplace_back([&options, &own, &status] {
      try {
        run_rank(options, *own);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "context_parallel: %s\n", error.what());
        status = 1;
        own.reset();  // the others stop waiting
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return status;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(read_options(count, words));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "context_parallel: %s\n", error.what());
    return 1;
  }
}
