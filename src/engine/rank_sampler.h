// Drawing tokens where every rank has the logits of a part of the vocabulary: in place of the logits ranks
// exchange their largest one, exact sums of weights, and candidates, and the token is that of one process.
// Weights are whole numbers of units (base/sampling_math.h), so a sum of ranks' sums is the sum.
//
//   1. everybody's largest logit, to all             the likeliest token is known: rows of temperature 0 end
//   2. sums of units beside it, to all               rows without top-k and top-p know which rank has
//                                                    the draw
//   3. candidates or the token drawn, to rank 0      top-k: a rank's k largest; top-p: its largest few
//
// Where top-p keeps more than ranks have sent, the row is left: its logits have to be read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "dist/communicator.h"
#include "dist/shares.h"

namespace millrace {

class RankSampler {
 public:
  static constexpr int32_t kMostTopK = 1024;  // of a row that is sampled here
  static constexpr int64_t kNucleus = 256;    // candidates of a rank for top-p

  // Is it of use for a step's rows? Every one has to be one that it does (then nobody needs logits), and not
  // all the likeliest alone, which greedy_tokens() gives for less.
  static bool of_use(std::span<const SampleRow> rows, int32_t vocab);

  // Collective, with the same rows on all ranks. logits: [rows][part.size()], of the tokens of `part`; parts
  // ascend with ranks. A row's `allowed` begins with the bit of token `first_allowed`; of its counts and
  // biases those outside of the part may be missing. The tokens are rank 0's, until the next call.
  std::span<const SampledRow> sample(dist::Communicator& group, Backend& backend,
                                     std::span<const SampleRow> rows, std::span<const float> logits,
                                     dist::Range part, int64_t first_allowed, int32_t vocab);

 private:
  struct Largest {
    float logit;
    int32_t token;        // -1: none above -infinity
    int32_t not_numbers;  // whether there are NaN
  };
  struct Mass {
    uint64_t units;
    int32_t candidates;
    int32_t more;  // whether it has others with a weight
  };
  struct Candidate {
    float weight;
    int32_t token;
  };
  enum class Kind { kDone, kTopK, kTopP, kAll };
  struct Row {
    std::span<const float> logits;  // of this rank, with penalties, bias and mask
    Kind kind = Kind::kDone;
    float largest = 0.0f;  // of all ranks
    std::vector<float> adjusted, weights;
    std::vector<Candidate> candidates;
  };

  static bool before(const Candidate& a, const Candidate& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
  }
  static void adjust(const SampleRow& from, std::span<const float> logits, dist::Range part,
                     int64_t first_allowed, Row& row);
  static Largest largest_of(const Row& row, std::span<const float> logits, dist::Range part);
  static Mass weigh(const SampleRow& from, dist::Range part, Row& row);
  void find_largest(std::span<const SampleRow> rows, int32_t vocab, int ranks);
  // The rank that has the draw of a row of all its tokens, and how many units of its own lie before it.
  struct Place {
    int rank;
    uint64_t left;
  };
  Place place_of(size_t row, double uniform, size_t count, int ranks) const;
  void send_found(dist::Communicator& group, std::span<const SampleRow> rows, dist::Range part);
  void receive_found(dist::Communicator& group, std::span<const SampleRow> rows, dist::Range part);
  int32_t pick(const SampleRow& from, Kind kind, uint64_t total, std::vector<Candidate>& candidates,
               std::span<const Candidate> horizons) const;

  std::vector<Row> rows_;
  std::vector<Largest> largest_;  // [ranks][rows]
  std::vector<Mass> mass_;        // [ranks][rows]
  std::vector<SampledRow> found_;
};

}  // namespace millrace
