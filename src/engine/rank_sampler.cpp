#include "engine/rank_sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/sampling_math.h"
#include "sample/select.h"
#include "sample/token_softmax.h"

namespace millrace {
namespace {

constexpr int64_t kRowsForThreads = 4;  // rows from which on other threads help
constexpr float kLowest = -std::numeric_limits<float>::infinity();

template <class T>
void all_gather(dist::Communicator& group, std::span<const T> mine, std::vector<T>& all) {
  const auto ranks = static_cast<size_t>(group.size());
  all.resize(mine.size() * ranks);
  const std::vector<size_t> bytes(ranks, mine.size_bytes());
  group.all_gather(std::as_bytes(mine), std::as_writable_bytes(std::span(all)), bytes);
}

bool cuts_to_count(const SampleRow& row, int32_t vocab) { return row.top_k > 0 && row.top_k < vocab; }

// Which of the weights the drawn unit is in.
int32_t place_in(std::span<const float> weights, uint64_t left) {
  size_t i = 0;
  for (; left >= sampling::units_of(weights[i]); ++i) left -= sampling::units_of(weights[i]);
  return static_cast<int32_t>(i);
}

template <class T>
void append_bytes(std::vector<std::byte>& to, std::span<const T> values) {
  const auto bytes = std::as_bytes(values);
  to.insert(to.end(), bytes.begin(), bytes.end());
}

}  // namespace

bool RankSampler::of_use(std::span<const SampleRow> rows, int32_t vocab) {
  bool draws = false;
  for (const SampleRow& row : rows) {
    if (!row.wanted || row.logprobs >= 0) return false;
    if (row.draw && cuts_to_count(row, vocab) && row.top_k > kMostTopK) return false;
    draws |= !row.plain_greedy();
  }
  return draws;
}

// As sample::Sampler does it, on this rank's tokens.
void RankSampler::adjust(const SampleRow& from, std::span<const float> logits, dist::Range part,
                         int64_t first_allowed, Row& row) {
  row.logits = logits;
  if (from.counted.empty() && from.bias.empty() && from.allowed.empty()) return;
  row.adjusted.assign(logits.begin(), logits.end());
  const auto at = [&](int32_t token) -> float* {
    return token >= part.begin && token < part.end ? &row.adjusted[static_cast<size_t>(token - part.begin)]
                                                   : nullptr;
  };
  for (const TokenCount& counted : from.counted) {
    if (float* logit = at(counted.token)) {
      *logit = sampling::penalized(*logit, counted.times, from.repetition_penalty, from.presence_penalty,
                                   from.frequency_penalty);
    }
  }
  for (const TokenBias& bias : from.bias) {
    if (float* logit = at(bias.token)) *logit += bias.bias;
  }
  for (int64_t token = part.begin; token < part.end && !from.allowed.empty(); ++token) {
    const auto bit = static_cast<size_t>(token - first_allowed);
    if ((from.allowed[bit / 64] >> (bit % 64) & 1) == 0) *at(static_cast<int32_t>(token)) = kLowest;
  }
  row.logits = row.adjusted;
}

RankSampler::Largest RankSampler::largest_of(const Row& row, std::span<const float> logits,
                                             dist::Range part) {
  const bool nan = std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  const int32_t top = logits.empty() ? -1 : argmax(row.logits);
  if (top < 0) return {kLowest, -1, nan ? 1 : 0};
  return {row.logits[static_cast<size_t>(top)], static_cast<int32_t>(part.begin) + top, nan ? 1 : 0};
}

// Of all ranks, the lowest token among equals: tokens ascend with ranks.
void RankSampler::find_largest(std::span<const SampleRow> rows, int32_t vocab, int ranks) {
  found_.assign(rows.size(), {});
  for (size_t i = 0; i < rows.size(); ++i) {
    Largest best{kLowest, -1, 0};
    bool nan = false;
    for (size_t r = 0; r < static_cast<size_t>(ranks); ++r) {
      const Largest& theirs = largest_[r * rows.size() + i];
      nan |= theirs.not_numbers != 0;
      if (theirs.token >= 0 && (best.token < 0 || theirs.logit > best.logit)) best = theirs;
    }
    Row& row = rows_[i];
    row.kind = Kind::kDone;
    row.largest = best.logit;
    found_[i].token = nan ? SampledRow::kNotANumber : best.token < 0 ? SampledRow::kNothing : best.token;
    if (found_[i].token < 0 || !rows[i].draw) continue;
    row.kind = cuts_to_count(rows[i], vocab) ? Kind::kTopK : rows[i].top_p < 1.0f ? Kind::kTopP : Kind::kAll;
  }
}

// This rank's weights beside everybody's largest, what they sum to, and its candidates.
RankSampler::Mass RankSampler::weigh(const SampleRow& from, dist::Range part, Row& row) {
  row.candidates.clear();
  if (row.kind == Kind::kDone || row.logits.empty()) return {0, 0, 0};
  softmax_weights(row.logits, row.largest, from.scale, row.weights);
  if (row.kind == Kind::kAll) {
    if (from.min_p > 0.0f) apply_cut(row.weights, {from.min_p, INT32_MAX});
    return {sum_units(row.weights), 0, 0};
  }
  Mass mass{row.kind == Kind::kTopP ? sum_units(row.weights) : 0, 0, 0};
  const int64_t most = row.kind == Kind::kTopK ? from.top_k : kNucleus;
  const Cut cut = cut_to_count(row.weights, most);
  for (size_t i = 0; i < row.weights.size(); ++i) {
    const float weight = row.weights[i];
    if (weight == 0.0f) continue;
    const auto id = static_cast<int32_t>(i);
    if (weight > cut.weight || (weight == cut.weight && id <= cut.id)) {
      row.candidates.push_back({weight, static_cast<int32_t>(part.begin) + id});
    } else {
      mass.more = 1;
    }
  }
  mass.candidates = static_cast<int32_t>(row.candidates.size());
  return mass;
}

RankSampler::Place RankSampler::place_of(size_t row, double uniform, size_t count, int ranks) const {
  uint64_t total = 0;
  for (size_t r = 0; r < static_cast<size_t>(ranks); ++r) total += mass_[r * count + row].units;
  uint64_t left = sampling::drawn_unit(uniform, total);
  int rank = 0;
  for (; left >= mass_[static_cast<size_t>(rank) * count + row].units; ++rank) {
    left -= mass_[static_cast<size_t>(rank) * count + row].units;
  }
  return {rank, left};
}

// Rows in order: a token of this rank's, or candidates.
void RankSampler::send_found(dist::Communicator& group, std::span<const SampleRow> rows, dist::Range part) {
  std::vector<std::byte> message;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows_[i];
    append_bytes(message, std::span<const Candidate>(row.candidates));
    if (row.kind != Kind::kAll) continue;
    const Place place = place_of(i, rows[i].uniform, rows.size(), group.size());
    if (place.rank != group.rank()) continue;
    const int32_t token = static_cast<int32_t>(part.begin) + place_in(row.weights, place.left);
    append_bytes(message, std::span<const int32_t>(&token, 1));
  }
  if (!message.empty()) group.send(0, message);
}

void RankSampler::receive_found(dist::Communicator& group, std::span<const SampleRow> rows,
                                dist::Range part) {
  const size_t count = rows.size();
  std::vector<std::vector<Candidate>> candidates(count), horizons(count);
  std::vector<std::byte> message;
  for (int r = 0; r < group.size(); ++r) {
    const bool here = r == group.rank();
    const auto mass = std::span(mass_).subspan(static_cast<size_t>(r) * count, count);
    std::vector<bool> draws(count, false);
    std::vector<uint64_t> left(count, 0);
    size_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      bytes += static_cast<size_t>(mass[i].candidates) * sizeof(Candidate);
      if (rows_[i].kind != Kind::kAll) continue;
      const Place place = place_of(i, rows[i].uniform, count, group.size());
      draws[i] = place.rank == r;
      left[i] = place.left;
      bytes += draws[i] ? sizeof(int32_t) : 0;
    }
    message.resize(bytes);
    if (!here && bytes > 0) group.recv(r, message);
    const std::byte* at = message.data();
    for (size_t i = 0; i < count; ++i) {
      if (here && draws[i]) {
        found_[i].token = static_cast<int32_t>(part.begin) + place_in(rows_[i].weights, left[i]);
      } else if (draws[i]) {
        std::memcpy(&found_[i].token, at, sizeof(int32_t));
        at += sizeof(int32_t);
      }
      std::vector<Candidate> theirs = here ? rows_[i].candidates : std::vector<Candidate>();
      if (!here && mass[i].candidates > 0) {
        theirs.resize(static_cast<size_t>(mass[i].candidates));
        std::memcpy(theirs.data(), at, theirs.size() * sizeof(Candidate));
        at += theirs.size() * sizeof(Candidate);
      }
      if (mass[i].more != 0) horizons[i].push_back(*std::max_element(theirs.begin(), theirs.end(), before));
      candidates[i].insert(candidates[i].end(), theirs.begin(), theirs.end());
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const Kind kind = rows_[i].kind;
    if (kind != Kind::kTopK && kind != Kind::kTopP) continue;
    uint64_t total = 0;
    for (size_t r = 0; r < static_cast<size_t>(group.size()); ++r) total += mass_[r * count + i].units;
    found_[i].token = pick(rows[i], kind, total, candidates[i], horizons[i]);
  }
}

// From what all ranks sent. `horizons`: the last candidate of each rank that has more; of what comes behind
// one of them not everything is here.
int32_t RankSampler::pick(const SampleRow& from, Kind kind, uint64_t total,
                          std::vector<Candidate>& candidates, std::span<const Candidate> horizons) const {
  const auto units_of_all = [&] {
    uint64_t sum = 0;
    for (const Candidate& c : candidates) sum += sampling::units_of(c.weight);
    return sum;
  };
  std::sort(candidates.begin(), candidates.end(), before);
  if (kind == Kind::kTopK) {
    if (candidates.size() > static_cast<size_t>(from.top_k)) {
      candidates.resize(static_cast<size_t>(from.top_k));
    }
    total = units_of_all();
  }
  if (from.top_p < 1.0f) {
    const uint64_t mass = sampling::units_of_mass(from.top_p, total);
    uint64_t reached = 0;
    size_t kept = 0;
    while (reached < mass && kept < candidates.size()) {
      reached += sampling::units_of(candidates[kept++].weight);
    }
    if (reached < mass) return SampledRow::kLeft;
    for (const Candidate& horizon : horizons) {
      if (kind == Kind::kTopP && before(horizon, candidates[kept - 1])) return SampledRow::kLeft;
    }
    candidates.resize(kept);
  }
  std::erase_if(candidates, [&](const Candidate& c) { return c.weight < from.min_p; });
  uint64_t left = sampling::drawn_unit(from.uniform, units_of_all());
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  for (const Candidate& c : candidates) {
    const uint64_t units = sampling::units_of(c.weight);
    if (left < units) return c.token;
    left -= units;
  }
  return SampledRow::kNothing;
}

std::span<const SampledRow> RankSampler::sample(dist::Communicator& group, Backend& backend,
                                                std::span<const SampleRow> rows,
                                                std::span<const float> logits, dist::Range part,
                                                int64_t first_allowed, int32_t vocab) {
  const size_t count = rows.size(), cols = static_cast<size_t>(part.size());
  MILLRACE_CHECK(logits.size() == count * cols);
  if (rows_.size() < count) rows_.resize(count);
  const auto for_rows = [&](const auto& body) {
    const auto range = [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) body(static_cast<size_t>(i));
    };
    if (static_cast<int64_t>(count) < kRowsForThreads) {
      range(0, static_cast<int64_t>(count));
    } else {
      backend.parallel(static_cast<int64_t>(count), range);
    }
  };
  std::vector<Largest> largest(count);
  for_rows([&](size_t i) {
    const std::span<const float> own = logits.subspan(i * cols, cols);
    adjust(rows[i], own, part, first_allowed, rows_[i]);
    largest[i] = largest_of(rows_[i], own, part);
  });
  all_gather<Largest>(group, largest, largest_);
  find_largest(rows, vocab, group.size());
  const auto is_done = [](const Row& row) { return row.kind == Kind::kDone; };
  if (std::all_of(rows_.begin(), rows_.begin() + static_cast<std::ptrdiff_t>(count), is_done)) return found_;
  std::vector<Mass> mass(count);
  for_rows([&](size_t i) { mass[i] = weigh(rows[i], part, rows_[i]); });
  all_gather<Mass>(group, mass, mass_);
  if (group.rank() == 0) {
    receive_found(group, rows, part);
  } else {
    send_found(group, rows, part);
  }
  return found_;
}

}  // namespace millrace
