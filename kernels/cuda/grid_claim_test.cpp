// Who may use the whole of a GPU. No GPU: a claim is the operating system's.
#include "kernels/cuda/grid_claim.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <thread>
#include <vector>

namespace millrace::cuda {
namespace {

constexpr GpuUuid kGpu = {0xfe, 1, 2, 3}, kOther = {0xfe, 1, 2, 4};

TEST(GridClaim, OneOfAProcessHasItPerGpu) {
  std::optional<GridClaim> first(std::in_place, kGpu);
  EXPECT_TRUE(first->held());
  {
    const GridClaim second(kGpu);
    EXPECT_FALSE(second.held());
  }
  EXPECT_FALSE(GridClaim(kGpu).held());  // those without it do not give it back
  EXPECT_TRUE(GridClaim(kOther).held());
  first.reset();
  EXPECT_TRUE(GridClaim(kGpu).held());
}

TEST(GridClaim, OfManyThreadsOneGetsIt) {
  constexpr int kThreads = 16;
  std::vector<std::optional<GridClaim>> claims(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { claims[i].emplace(kGpu); });
  for (std::thread& thread : threads) thread.join();
  int held = 0;
  for (const auto& claim : claims) held += claim->held() ? 1 : 0;
  EXPECT_EQ(held, 1);
}

TEST(GridClaim, AnotherProcessHasItsOwn) {
  const GridClaim mine(kGpu);
  ASSERT_TRUE(mine.held());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(GridClaim(kGpu).held() ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace millrace::cuda
