#include "base/stolen_time.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

namespace millrace {
namespace {

class StolenTimeTest : public testing::Test {
 protected:
  void write(const std::string& text) { std::ofstream(path_) << text; }
  std::string path_ = fmt::format("{}/stolen_time_stat_{}", testing::TempDir(), ::getpid());
};

TEST_F(StolenTimeTest, IsTheShareOfWantedTimeSinceTheLastLook) {
  write("cpu  100 0 50 4000 30 1 2 10 0 0\ncpu0 1 2 3\n");
  StolenTime time(path_);
  EXPECT_EQ(time.share(), std::nullopt) << "nothing to compare with";
  write("cpu  160 5 60 9000 90 2 6 30 7 7\ncpu0 1 2 3\n");  // 60 + 5 + 10 + 1 + 4 worked, 20 stolen
  EXPECT_DOUBLE_EQ(time.share().value(), 0.2);
  EXPECT_EQ(time.share(), std::nullopt) << "no time has passed";
  write("cpu  260 5 60 9000 90 2 6 30 7 7\n");
  EXPECT_DOUBLE_EQ(time.share().value(), 0.0);
  write("cpu  270 5 60 9000 90 2 6 40 7 7\n");
  EXPECT_EQ(time.share(1000.0), std::nullopt) << "too little to say";
}

TEST_F(StolenTimeTest, IsUnknownWhereTheSystemDoesNotSay) {
  EXPECT_EQ(StolenTime(path_ + ".not_there").share(), std::nullopt);
  for (const char* text : {"", "cpu", "intr 5\n", "cpu  1 2 3\n", "cpu  1 2 x 4 5 6 7 8\n"}) {
    write(text);
    StolenTime time(path_);
    EXPECT_EQ(time.share(), std::nullopt) << text;
    EXPECT_EQ(time.share(), std::nullopt) << text;
  }
}

// A machine whose host takes away what `stolen` says of a crew's size: the sizes, second by second.
template <class Stolen>
std::vector<int> work(Crew& crew, int seconds, const Stolen& stolen) {
  std::vector<int> sizes;
  for (int second = 0; second < seconds; ++second) {
    const double share = stolen(crew.size());
    for (int stretch = 0; stretch < 5; ++stretch) crew.observe(share);
    sizes.push_back(crew.size());
  }
  return sizes;
}

TEST(Crew, OneRestsWhereThatStopsTheLoss) {
  Crew crew(16);
  const std::vector<int> sizes = work(crew, 1000, [](int size) { return size > 15 ? 0.26 : 0.002; });
  EXPECT_EQ(sizes[0], 14) << "after a second";
  EXPECT_GT(std::count(sizes.begin(), sizes.end(), 15), 980) << "tries sixteen more and more rarely";
  EXPECT_GT(std::count(sizes.begin(), sizes.end(), 16), 5) << "but it does try";
  const std::vector<int> after = work(crew, 200, [](int) { return 0.0; });  // the host has room again
  EXPECT_EQ(after.back(), 16);
}

TEST(Crew, SeveralRestWhereOneIsNotEnoughAndNeverMoreThanAQuarter) {
  Crew crew(16);
  std::vector<int> sizes = work(crew, 1000, [](int size) { return size > 13 ? 0.05 * (size - 13) : 0.01; });
  EXPECT_EQ(*std::min_element(sizes.begin(), sizes.end()), 13);
  EXPECT_GT(std::count(sizes.begin(), sizes.end(), 13), 950);
  Crew lost(16);
  sizes = work(lost, 1000, [](int) { return 0.3; });
  EXPECT_EQ(sizes[0], 14) << "half of what was lost";
  EXPECT_EQ(sizes[1], 12);
  EXPECT_EQ(*std::min_element(sizes.begin(), sizes.end()), 12);
}

TEST(Crew, IgnoresShortAndSmallLosses) {
  Crew crew(16);
  for (int i = 0; i < 100; ++i) crew.observe(0.02);
  EXPECT_EQ(crew.size(), 16) << "less than a thread is worth";
  for (int i = 0; i < 100; ++i) crew.observe(i % 50 == 0 ? 0.14 : 0.0);
  EXPECT_EQ(crew.size(), 16) << "a fifth of a second";
  Crew two(2);
  for (int i = 0; i < 100; ++i) two.observe(0.9);
  EXPECT_EQ(two.size(), 2);
}

}  // namespace
}  // namespace millrace
