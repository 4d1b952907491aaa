// Which team of threads takes a row, by the row's length alone: the choice fixes the order of its sums.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/resources.h"

namespace millrace::cuda {

template <int kThreadsOfRow, int kGroupsOfThread>
struct Team {
  static constexpr int kThreads = kThreadsOfRow, kGroups = kGroupsOfThread;
  static constexpr int64_t kCols = int64_t{1} * kThreads * kGroups * kColumns;  // that registers hold
};

// f(Team): 256, 1,024, 4,096 or 16,384 columns in registers, or any number that are read again.
template <class F>
void with_team(int64_t cols, F&& f) {
  if (cols <= Team<32, 1>::kCols) return f(Team<32, 1>{});
  if (cols <= Team<32, 4>::kCols) return f(Team<32, 4>{});
  if (cols <= Team<256, 2>::kCols) return f(Team<256, 2>{});
  if (cols <= Team<512, 4>::kCols) return f(Team<512, 4>{});
  return f(Team<512, 0>{});
}

template <class Team>
unsigned team_ctas(int64_t rows) {
  return static_cast<unsigned>((rows + kTeams<Team::kThreads> - 1) / kTeams<Team::kThreads>);
}
template <class Team>
constexpr unsigned team_cta_threads() {
  return Team::kThreads * kTeams<Team::kThreads>;
}

// CTAs of a kernel whose teams take rows gridDim apart: as many as the GPU holds at once.
template <class Team, class Kernel>
unsigned resident_ctas(Kernel* kernel, int64_t rows, const Device& device) {
  int ctas = 0;  // of an SM
  check_call(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, team_cta_threads<Team>(), 0),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const int64_t resident = int64_t{device.sm_count()} * ctas, all = team_ctas<Team>(rows);
  return static_cast<unsigned>(all < resident ? all : resident);
}

}  // namespace millrace::cuda
