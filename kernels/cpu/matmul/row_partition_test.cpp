// How rows are handed out: every row once, whatever their number and the number of threads.
#include "kernels/cpu/matmul/row_partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace millrace::cpu {
namespace {

TEST(ShrinkingParts, CoverEveryRowOnceInWholeUnits) {
  for (const int threads : {1, 2, 3, 16, 64}) {
    for (const int64_t rows : {1, 31, 32, 33, 100, 2880, 5120, 11520, 201088}) {
      const int64_t unit = rows % 3 == 0 ? 16 : 32;
      const ShrinkingParts parts(rows, unit, threads);
      int64_t next = 0, before = rows;
      for (int64_t i = 0; i < parts.count(); ++i) {
        const auto [first, count] = parts.part(i);
        ASSERT_EQ(first, next) << rows << " rows, " << threads << " threads, part " << i;
        ASSERT_GT(count, 0);
        ASSERT_LE(count, before) << "parts become smaller";
        ASSERT_TRUE(count % unit == 0 || first + count == rows);
        if (i < threads && parts.count() > threads) {
          ASSERT_EQ(count, parts.first_rows());
        }
        before = count;
        next = first + count;
      }
      EXPECT_EQ(next, rows) << threads << " threads";
    }
  }
}

// Parts as ThreadPool::parallel_parts hands them out to threads of these speeds (units of a row in a unit of
// time): the own part first, the next one claimed before it is begun, and taken by others when nothing else
// is left. The time until the last is done, over the time that a perfect division would take.
double time_over_best(const ShrinkingParts& parts, int64_t rows, const std::vector<double>& speeds) {
  const auto threads = std::ssize(speeds);
  int64_t next = threads;
  const auto claim = [&] { return next < parts.count() ? next++ : -1; };
  std::vector<double> free_at(speeds.size());
  std::vector<int64_t> ahead(speeds.size(), -1);
  const auto work = [&](int64_t thread, int64_t part) {
    ahead[thread] = claim();
    free_at[thread] += static_cast<double>(parts.part(part).count) / speeds[thread];
  };
  for (int64_t t = 0; t < threads; ++t) work(t, t);
  double last = 0;
  for (std::vector<bool> done(speeds.size());;) {
    int64_t first = -1;  // the thread that is free first
    for (int64_t t = 0; t < threads; ++t) {
      if (!done[t] && (first < 0 || free_at[t] < free_at[first])) first = t;
    }
    if (first < 0) break;
    int64_t part = std::exchange(ahead[first], -1);
    if (part < 0) part = claim();
    for (int64_t t = 0; t < threads && part < 0; ++t) part = std::exchange(ahead[t], -1);
    if (part >= 0) {
      work(first, part);
    } else {
      done[first] = true;
      last = std::max(last, free_at[first]);
    }
  }
  return last * std::accumulate(speeds.begin(), speeds.end(), 0.0) / static_cast<double>(rows);
}

// A thread whose processor is taken away half of the time keeps the others waiting little.
TEST(ShrinkingParts, OneSlowThreadCostsLittle) {
  for (const int64_t rows : {5120, 11520, 59040, 201088}) {
    const ShrinkingParts parts(rows, 16, 16);
    std::vector<double> speeds(16, 1.0);
    EXPECT_LT(time_over_best(parts, rows, speeds), 1.07) << rows;
    speeds[3] = 0.5;
    EXPECT_LT(time_over_best(parts, rows, speeds), 1.12) << rows;
  }
}

}  // namespace
}  // namespace millrace::cpu
