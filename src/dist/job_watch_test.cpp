// Who watches is told of a rank that says nothing, and of nobody else. Looks are made by hand: no clock.
#include "dist/job_watch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>

namespace millrace::dist {
namespace {

constexpr int kRanks = 3;
using Note = Post::Note;
using Boxes = std::array<std::array<std::deque<Note>, kRanks>, kRanks>;  // [to][from]

class BoxPost final : public Post {
 public:
  BoxPost(Boxes& boxes, int rank) : boxes_(boxes), rank_(static_cast<size_t>(rank)) {}
  void send(int to, Note note) override { boxes_[static_cast<size_t>(to)][rank_].push_back(note); }
  std::optional<Note> take(int from) override {
    auto& box = boxes_[rank_][static_cast<size_t>(from)];
    if (box.empty()) return std::nullopt;
    const Note note = box.front();
    box.pop_front();
    return note;
  }

 private:
  Boxes& boxes_;
  const size_t rank_;
};

struct Job {
  Boxes boxes;
  std::array<Watch, kRanks> calls;
  std::vector<BoxPost> posts;
  std::vector<SilentRanks> ranks;

  Job() {
    for (int r = 0; r < kRanks; ++r) posts.emplace_back(boxes, r);
    for (int r = 0; r < kRanks; ++r) {
      ranks.emplace_back(r, kRanks, posts[static_cast<size_t>(r)], calls[static_cast<size_t>(r)]);
    }
  }
  SilentRanks& operator[](int r) { return ranks[static_cast<size_t>(r)]; }
};

TEST(JobWatch, ARankThatSaysNothingIsFound) {
  Job job;
  for (int i = 0; i < 10 * SilentRanks::kSilence; ++i) {
    for (int r = 0; r < kRanks; ++r) ASSERT_EQ(job[r].look(), -1) << "look " << i << " of rank " << r;
  }
  int looks = 0, found = -1;
  for (; found < 0 && looks < 10 * SilentRanks::kSilence; ++looks) {
    found = job[0].look();
    EXPECT_EQ(job[2].look(), -1) << "rank 0 is to speak first";
  }
  EXPECT_EQ(found, 1);
  EXPECT_LE(looks, SilentRanks::kSilence + 1);
  // Rank 0 itself: the next one finds it.
  Job other;
  found = -1;
  for (looks = 0; found < 0 && looks < 10 * SilentRanks::kSilence; ++looks) {
    found = other[1].look();
    EXPECT_EQ(other[2].look(), -1);
  }
  EXPECT_EQ(found, 0);
}

TEST(JobWatch, ARankThatHasLeftIsNotWaitedFor) {
  Job job;
  for (int r = 0; r < kRanks; ++r) job[r].look();
  job[2].leave();
  for (int i = 0; i < 3 * SilentRanks::kSilence; ++i) {
    ASSERT_EQ(job[0].look(), -1);
    ASSERT_EQ(job[1].look(), -1);
  }
}

TEST(JobWatch, NotesComeBehindALongMessage) {
  Job job;
  // As of a call whose bytes are not to be there for an hour.
  job.calls[0].waiting_since_ns = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < 3 * SilentRanks::kSilence; ++i) ASSERT_EQ(job[0].look(), -1);
  job.calls[0].waiting_since_ns = 0;
  int found = -1;
  for (int i = 0; i <= SilentRanks::kSilence; ++i) found = std::max(found, job[0].look());
  EXPECT_GE(found, 1);
}

TEST(JobWatch, WhoEndsLeaves) {
  Boxes boxes;
  const Watch calls;
  {
    const JobWatch watch(0, kRanks, std::make_unique<BoxPost>(boxes, 0), calls,
                         [](int rank) { ADD_FAILURE() << "rank " << rank; });
  }
  for (const size_t other : {1, 2}) EXPECT_EQ(boxes[other][0].back(), Note::kLeaves);
}

}  // namespace
}  // namespace millrace::dist
