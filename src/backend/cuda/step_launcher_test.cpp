#include "backend/cuda/step_launcher.h"

#include <gtest/gtest.h>

#include <optional>

namespace millrace::cuda {
namespace {

TEST(WholeGrid, OneOfAProcessHasIt) {
  std::optional<WholeGrid> first(std::in_place);
  EXPECT_TRUE(first->mine());
  {
    const WholeGrid second;
    EXPECT_FALSE(second.mine());
  }
  EXPECT_FALSE(WholeGrid().mine());  // those without it do not give it back
  first.reset();
  EXPECT_TRUE(WholeGrid().mine());
}

}  // namespace
}  // namespace millrace::cuda
