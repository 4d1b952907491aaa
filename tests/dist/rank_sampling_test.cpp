// Tokens that ranks pick by what each says of its part of the vocabulary, against the sampler on all logits:
// random rows with every combination of parameters, ties, infinities, NaN and masks, for any number of ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "base/error.h"
#include "dist/local_communicator.h"
#include "engine/rank_messages.h"
#include "engine/rank_sampler.h"
#include "engine/sampling_cases.h"

namespace millrace {
namespace {

using test::SamplingCase;
using Cases = std::vector<std::unique_ptr<SamplingCase>>;

// Rank 0's tokens; the others get the rows as rank 0 packs them.
std::vector<int32_t> sample_over(int ranks, const Cases& cases, int32_t vocab) {
  auto group = dist::make_local_group(ranks);
  std::vector<SampleRow> rows;
  for (const auto& c : cases) rows.push_back(c->row);
  std::vector<int32_t> tokens;
  std::vector<std::exception_ptr> faults(static_cast<size_t>(ranks));
  const auto run = [&](int rank) {
    const auto backend = make_backend("cpu", {.threads = 1});
    const dist::Range part = dist::Shares::even(rank, ranks).rows(vocab);
    std::vector<float> logits;
    for (const auto& c : cases) {
      logits.insert(logits.end(), c->logits.begin() + part.begin, c->logits.begin() + part.end);
    }
    std::vector<std::byte> message;
    ReceivedRows received;
    pack(rows, part, message);
    received.unpack(message);
    RankSampler sampler;
    const auto found =
        sampler.sample(*group[static_cast<size_t>(rank)], *backend, rank == 0 ? rows : received.rows, logits,
                       part, rank == 0 ? 0 : first_allowed(part), vocab);
    for (const SampledRow& row : found) {
      if (rank == 0) tokens.push_back(row.token);
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        run(r);
      } catch (...) {
        faults[static_cast<size_t>(r)] = std::current_exception();
      }
      group[static_cast<size_t>(r)].reset();
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& fault : faults) {
    if (fault != nullptr) std::rethrow_exception(fault);
  }
  return tokens;
}

int32_t expected_of(const SamplingCase& c) {
  for (const float x : c.logits) {
    if (std::isnan(x)) return SampledRow::kNotANumber;
  }
  Sampler sampler = c.sampler;
  try {
    return sampler.sample(c.logits, c.allowed).token;
  } catch (const Error&) {
    return SampledRow::kNothing;
  }
}

TEST(RankSampling, TokensAreTheSamplers) {
  for (const int32_t vocab : {83, 2000}) {
    Cases cases;
    for (uint32_t i = 0; i < 300; ++i) {
      auto c = std::make_unique<SamplingCase>(i + 7919u * static_cast<uint32_t>(vocab), vocab);
      c->row.logprobs = -1;
      if (RankSampler::of_use(std::span(&c->row, 1), vocab) || c->row.plain_greedy()) {
        cases.push_back(std::move(c));
      }
    }
    ASSERT_GT(cases.size(), 250u);
    std::vector<int32_t> expected;
    for (const auto& c : cases) expected.push_back(expected_of(*c));
    for (const int ranks : {1, 2, 3, 7, 16}) {
      const std::vector<int32_t> found = sample_over(ranks, cases, vocab);
      ASSERT_EQ(found.size(), cases.size());
      size_t left = 0;
      for (size_t i = 0; i < found.size(); ++i) {
        if (found[i] == SampledRow::kLeft) {  // only where top-p keeps more than was sent
          EXPECT_LT(cases[i]->row.top_p, 1.0f);
          ++left;
          continue;
        }
        EXPECT_EQ(found[i], expected[i]) << "row " << i << " of " << vocab << " over " << ranks << " ranks";
      }
      EXPECT_LT(left, cases.size() / 4);
      if (vocab / ranks <= RankSampler::kNucleus) {
        EXPECT_EQ(left, 0u);  // all candidates were sent
      }
    }
  }
}

TEST(RankSampling, WhatIsLeftToWhoeverReadsLogits) {
  SampleRow row;
  row.wanted = row.draw = true;
  const auto of_use = [&] { return RankSampler::of_use(std::span(&row, 1), 5000); };
  EXPECT_TRUE(of_use());
  row.logprobs = 0;
  EXPECT_FALSE(of_use());
  row.logprobs = -1;
  row.top_k = RankSampler::kMostTopK + 1;
  EXPECT_FALSE(of_use());
  row.top_k = 5000;  // all
  EXPECT_TRUE(of_use());
  row.wanted = false;
  EXPECT_FALSE(of_use());
}

}  // namespace
}  // namespace millrace
