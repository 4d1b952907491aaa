#include "engine/stop_matcher.h"

#include <gtest/gtest.h>

namespace millrace {
namespace {

// Feeds `text` in pieces of `size` bytes.
std::string run(std::vector<std::string> stops, std::string_view text, size_t size, bool* stopped) {
  StopMatcher matcher(std::move(stops));
  std::string out;
  for (size_t i = 0; i < text.size(); i += size) out += matcher.push(text.substr(i, size));
  if (!matcher.stopped()) out += matcher.finish();
  *stopped = matcher.stopped();
  return out;
}

TEST(StopMatcher, CutsAtTheFirstStopHoweverTextIsCut) {
  for (size_t size = 1; size < 12; ++size) {
    bool stopped = false;
    EXPECT_EQ(run({"###", "END"}, "one two EN ## END three", size, &stopped), "one two EN ## ");
    EXPECT_TRUE(stopped);
    EXPECT_EQ(run({"aab"}, "aaab and more", size, &stopped), "a");
    EXPECT_TRUE(stopped);
    EXPECT_EQ(run({"xyz"}, "nothing here, not even xy", size, &stopped), "nothing here, not even xy");
    EXPECT_FALSE(stopped);
    EXPECT_EQ(run({""}, "an empty stop stops nothing", size, &stopped), "an empty stop stops nothing");
    EXPECT_FALSE(stopped);
    EXPECT_EQ(run({"ab", "b"}, "xxab", size, &stopped), "xx") << "the earliest start wins";
  }
}

TEST(StopMatcher, HoldsBackOnlyWhatCouldBeAStop) {
  StopMatcher matcher({"\n\nUser:"});
  EXPECT_EQ(matcher.push("hello\n"), "hello");
  EXPECT_EQ(matcher.push("\nUs"), "");
  EXPECT_EQ(matcher.push("e it"), "\n\nUse it");
  EXPECT_EQ(matcher.push("\n\nUser"), "");
  EXPECT_EQ(matcher.push(": x"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.push("y"), "");
  EXPECT_EQ(matcher.finish(), "");
}

}  // namespace
}  // namespace millrace
