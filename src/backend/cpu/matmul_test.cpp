// How rows are handed out: every row once, whatever their number and the threads'.
#include "backend/cpu/matmul.h"

#include <gtest/gtest.h>

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

// A slow thread may hold a part while the others do all the rest: no part is more than half of a fair share.
TEST(ShrinkingParts, NoneIsMoreThanHalfOfAShare) {
  for (const int threads : {2, 16}) {
    const ShrinkingParts parts(11520, 32, threads);
    EXPECT_LE(parts.part(0).count, 11520 / (2 * threads));
    EXPECT_EQ(parts.part(parts.count() - 1).count, 32);
  }
}

}  // namespace
}  // namespace millrace::cpu
