// For the tests of "same bits": a small model of a few tensors, run step by step over paged sequences, its
// logits kept by sequence and compared bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "backend/test_support.h"

namespace millrace::testing_support {

struct RandomModel {
  std::map<std::string, OwnedTensor> tensors;  // each backend loads them for itself
  std::vector<float> inv_freq;

  RandomModel(uint32_t seed, float scale, int32_t head_dim) : random_(seed), scale_(scale) {
    for (int i = 0; i < head_dim / 2; ++i)
      inv_freq.push_back(static_cast<float>(std::pow(1e4, -2.0 * i / head_dim)));
  }
  void matrix(const std::string& name, DType type, int64_t rows, int64_t cols, int64_t experts = 0) {
    tensors[name] = random_tensor(random_, type, rows, cols, experts, scale_);
  }
  void vector(const std::string& name, int64_t size, float middle) {
    tensors[name] = random_vector(random_, size, middle, 0.1f);
  }

 private:
  std::mt19937 random_;
  float scale_;
};

// What a model adds is its forward pass.
class StepRunner {
 public:
  StepRunner(Backend& backend, const RandomModel& model, const ExecutorSpec& spec)
      : model_(model), spec_(spec), executor_(backend.make_executor(spec)) {
    for (const auto& [name, tensor] : model.tensors) {
      const bool is_vector = tensor.view.shape[0] == 1 && tensor.view.rank == 2;
      const WeightUse use = is_vector             ? WeightUse::kVector
                            : name == "embedding" ? WeightUse::kEmbedding
                                                  : WeightUse::kMatrix;
      weights_[name] = backend.load_weight(tensor.view, dequantized_where(backend, tensor.view, use));
    }
  }
  virtual ~StepRunner() = default;

  struct Piece {
    int sequence;
    std::vector<int32_t> tokens;
    size_t unread = 0;  // so many of the first tokens have no logits
  };

  // One step; logits of every row that has some are appended to their sequence's.
  void step(const std::vector<Piece>& pieces) {
    std::vector<int32_t> tokens, rows;
    std::vector<SequenceSlice> slices;
    bool some_unread = false;
    for (const Piece& piece : pieces) {
      sequences_[piece.sequence].reserve(spec_, static_cast<int32_t>(piece.tokens.size()), next_);
    }
    for (const Piece& piece : pieces) {
      const auto count = static_cast<int32_t>(piece.tokens.size());
      slices.push_back(sequences_[piece.sequence].slice(static_cast<int32_t>(tokens.size()), count));
      slices.back().sparse_pages = sparse_pages_[piece.sequence];
      for (size_t i = 0; i < piece.tokens.size(); ++i) {
        if (i >= piece.unread) rows.push_back(static_cast<int32_t>(tokens.size()));
        tokens.push_back(piece.tokens[i]);
      }
      some_unread |= piece.unread > 0;
    }
    executor_->begin({tokens, slices, rows, {}, some_unread});
    forward(*executor_);
    const std::span<const int32_t> greedy = executor_->greedy_tokens();
    const std::span<const float> all = executor_->logits();
    const auto vocab = static_cast<size_t>(spec_.vocab);
    size_t at = 0;
    for (const Piece& piece : pieces) {
      const auto from = all.begin() + static_cast<int64_t>(at * vocab);
      std::vector<float>& to = logits_[piece.sequence];
      const size_t read = piece.tokens.size() - std::min(piece.unread, piece.tokens.size());
      to.insert(to.end(), from, from + static_cast<int64_t>(read * vocab));
      at += read;
      sequences_[piece.sequence].length += static_cast<int32_t>(piece.tokens.size());
    }
    for (size_t r = 0; r < greedy.size(); ++r) {
      const auto row = all.subspan(r * vocab, vocab);
      ASSERT_EQ(greedy[r], std::max_element(row.begin(), row.end()) - row.begin());
    }
  }
  const std::vector<float>& logits(int sequence) { return logits_[sequence]; }
  void set_sparse_pages(int sequence, int32_t pages) { sparse_pages_[sequence] = pages; }
  // As if nothing had run; the pool's blocks keep what they have.
  void restart() {
    sequences_.clear();
    logits_.clear();
    next_ = {};
  }

 protected:
  virtual void forward(Executor& e) = 0;
  const Weight* w(const std::string& name) { return weights_.at(name).get(); }
  const RandomModel& model_;

 private:
  ExecutorSpec spec_;
  std::map<std::string, WeightPtr> weights_;
  std::unique_ptr<Executor> executor_;
  std::map<int, TestSequence> sequences_;
  std::map<int, int32_t> sparse_pages_;
  std::map<int, std::vector<float>> logits_;
  std::array<int32_t, kMaxKvGroups> next_{};
};

inline std::vector<int32_t> random_prompt(int seed, int32_t length, int32_t vocab) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < length; ++i) tokens.push_back(static_cast<int32_t>(random() % vocab));
  return tokens;
}

inline std::vector<int32_t> part(const std::vector<int32_t>& tokens, size_t from, size_t count) {
  from = std::min(from, tokens.size());
  return {tokens.begin() + static_cast<int64_t>(from),
          tokens.begin() + static_cast<int64_t>(std::min(tokens.size(), from + count))};
}

// Logits of one prompt, cut into chunks.
inline std::vector<float> run_alone(StepRunner&& runner, const std::vector<int32_t>& tokens, size_t chunk) {
  for (size_t at = 0; at < tokens.size(); at += chunk) {
    runner.step({{0, part(tokens, at, chunk)}});
    if (::testing::Test::HasFatalFailure()) break;
  }
  return runner.logits(0);
}

inline void expect_same_bits(const std::vector<float>& got, const std::vector<float>& want, int32_t vocab,
                             const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::isfinite(want[i])) << what << " position " << i / vocab;
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(float)), 0)
        << what << " position " << i / vocab << " logit " << i % vocab << ": " << got[i] << " and "
        << want[i];
  }
}

// Relative errors of each position's logits, by norm, smallest first: a few tokens whose experts are swapped
// (a tie within rounding) count once.
inline std::vector<double> sorted_row_errors(const std::vector<float>& got, const std::vector<float>& want,
                                             int32_t vocab) {
  std::vector<double> errors;
  for (size_t at = 0; at < want.size(); at += static_cast<size_t>(vocab)) {
    double error = 0, size = 0;
    for (size_t i = at; i < at + static_cast<size_t>(vocab); ++i) {
      error += std::pow(static_cast<double>(got[i]) - want[i], 2);
      size += std::pow(static_cast<double>(want[i]), 2);
    }
    errors.push_back(std::sqrt(error / size));
  }
  std::sort(errors.begin(), errors.end());
  return errors;
}

}  // namespace millrace::testing_support
