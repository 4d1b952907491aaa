// Attention over a long context is shared out by spans of 512 positions and merged row by row, the weights of
// many spans at once (cpu/attention.cpp); one thread merges span by span. Both have the same bits.
#include <gtest/gtest.h>

#include "backend/test_support.h"

namespace millrace {
namespace {

using namespace testing_support;

// Past eight spans, which is what is merged at once, with tokens on both sides of a span's end.
constexpr int32_t kSpan = 512, kContext = 11 * kSpan - 1, kAppended = 176;
constexpr int32_t kQueryHeads = 2, kHeadsOfKv = 1, kDim = 32;

// `asking` tokens behind the context.
std::vector<float> attend(Backend& backend, DType kv_type, int32_t window, int32_t asking) {
  ExecutorSpec spec;
  spec.max_tokens = spec.max_logit_rows = kAppended;
  spec.max_context = kContext + asking;
  spec.hidden = spec.vocab = 32;
  spec.heads = kQueryHeads;
  spec.kv_heads = kHeadsOfKv;
  spec.head_dim = kDim;
  spec.kv_type = kv_type;
  spec.kv_groups = {{window, 1, (kContext + asking) / 16 + 2}};
  spec.layers = {{0, 0}};
  const auto executor = backend.make_executor(spec);
  TestSequence sequence;
  std::array<int32_t, kMaxKvGroups> next{};
  std::mt19937 random(3);
  const auto write = [&](Slot slot, int32_t floats, float size) {
    std::vector<float> x = random_floats(random, static_cast<size_t>(floats));
    for (float& value : x) value *= size;
    executor->write_slot(slot, x);
  };
  std::vector<float> attended;
  const auto step = [&](int32_t tokens, bool attends) {
    sequence.reserve(spec, tokens, next);
    const SequenceSlice slice = sequence.slice(0, tokens);
    const std::vector<int32_t> ids(static_cast<size_t>(tokens), 0);
    executor->begin({ids, {&slice, 1}, {}});
    // Larger and larger keys: the largest score is a later split's, again and again.
    const float size = 1.0f + 3.0f * static_cast<float>(sequence.length) / kContext;
    write(Slot::kQuery, tokens * kQueryHeads * kDim, 1.0f);
    write(Slot::kKey, tokens * kHeadsOfKv * kDim, size);
    write(Slot::kValue, tokens * kHeadsOfKv * kDim, 1.0f);
    executor->rope_append_kv({0, {}, 1.0f, false});
    if (attends) {
      executor->attend({0, window, 0.2f, nullptr});
      attended = executor->read_slot(Slot::kAttention);
    }
    sequence.length += tokens;
  };
  while (sequence.length < kContext) step(std::min(kAppended, kContext - sequence.length), false);
  step(asking, true);
  return attended;
}

TEST(LongContext, HasTheSameBitsHoweverManyThreads) {
  // The last has eleven tiles of eleven splits: more than three threads have room for at a time.
  for (const auto& [type, window, asking] : {std::tuple{DType::kBF16, 0, 3},
                                             {DType::kQ8_0, 0, 3},
                                             {DType::kBF16, 700, 3},
                                             {DType::kBF16, 0, 176}}) {
    const std::vector<float> want = attend(*make_cpu_backend({1}), type, window, asking);
    for (const float x : want) ASSERT_TRUE(std::isfinite(x));
    const std::vector<float> got = attend(*make_cpu_backend({3}), type, window, asking);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i]))
          << "window " << window << " [" << i << "]: " << got[i] << ", " << want[i];
    }
  }
}

}  // namespace
}  // namespace millrace
