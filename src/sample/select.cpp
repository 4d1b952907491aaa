#include "sample/select.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "base/sampling_math.h"
#include "sample/vec4.h"

namespace millrace {
namespace {

// 64 buckets per power of two from 1 down to 2^-34; everything smaller shares bucket 0. Among 200,000 tokens
// of a flat distribution a bucket then holds about a thousand.
constexpr uint32_t kMantissaShift = 17;
constexpr uint32_t kLowest = (127u - 34u) << (23 - kMantissaShift);
constexpr size_t kBuckets = (127u << (23 - kMantissaShift)) - kLowest + 1;

// Calls add(bucket, weight) for the weights; groups of four that are all below `floor` are passed over.
template <class Add>
inline void for_buckets(std::span<const float> weights, float floor, Add&& add) {
  using namespace vec4;
  const auto bucket_of = [](F4 w) {
    const I4 b = (bits(w) >> kMantissaShift) - static_cast<int32_t>(kLowest);
    const I4 positive = b & I4(b > 0);
    const I4 last = splat(static_cast<int32_t>(kBuckets - 1));
    return choose(I4(positive < last), positive, last);
  };
  size_t i = 0;
  for (; i + kWidth <= weights.size(); i += kWidth) {
    const F4 w = load(weights.data() + i);
    const I4 large = I4(w >= floor);
    if ((large[0] | large[1] | large[2] | large[3]) == 0) continue;
    const I4 b = bucket_of(w);
    for (size_t j = 0; j < kWidth; ++j) add(static_cast<size_t>(b[j]), weights[i + j]);
  }
  for (; i < weights.size(); ++i) add(static_cast<size_t>(bucket_of(splat(weights[i]))[0]), weights[i]);
}

struct Entry {
  float weight;
  int32_t id;
};
inline bool before(const Entry& a, const Entry& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

// The bucket's entries: those in [lowest weight of it, lowest of the next).
std::vector<Entry>& entries_of(std::span<const float> weights, size_t bucket) {
  const auto lower_edge = [](size_t b) {
    return std::bit_cast<float>((static_cast<uint32_t>(b) + kLowest) << kMantissaShift);
  };
  const float low = bucket == 0 ? std::numeric_limits<float>::denorm_min() : lower_edge(bucket);
  const float high = bucket == kBuckets - 1 ? 2.0f : lower_edge(bucket + 1);
  thread_local std::vector<Entry> entries;  // kept: a draw allocates nothing
  entries.clear();
  entries.reserve(weights.size());
  const auto add_from = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (weights[i] >= low && weights[i] < high) entries.push_back({weights[i], static_cast<int32_t>(i)});
    }
  };
  using namespace vec4;
  constexpr size_t kStride = 4 * kWidth;
  size_t i = 0;
  for (; i + kStride <= weights.size(); i += kStride) {
    I4 any{};
    for (size_t j = 0; j < kStride; j += kWidth) {
      const F4 w = load(weights.data() + i + j);
      any |= I4(w >= low) & I4(w < high);
    }
    if ((any[0] | any[1] | any[2] | any[3]) != 0) add_from(i, i + kStride);
  }
  add_from(i, weights.size());
  return entries;
}

}  // namespace

Cut cut_to_count(std::span<const float> weights, int64_t k) {
  std::array<int32_t, kBuckets> counts{};
  for_buckets(weights, std::numeric_limits<float>::denorm_min(),
              [&](size_t bucket, float w) { counts[bucket] += w > 0.0f ? 1 : 0; });
  int64_t left = k;
  for (size_t b = kBuckets; b-- > 0;) {
    if (counts[b] >= left) {
      std::vector<Entry>& entries = entries_of(weights, b);
      const auto last = entries.begin() + (left - 1);
      std::nth_element(entries.begin(), last, entries.end(), before);
      return {last->weight, last->id};
    }
    left -= counts[b];
  }
  return {};
}

Cut cut_to_mass(std::span<const float> weights, uint64_t total, uint64_t mass) {
  // Weights below (total - mass) / n sum to less than total - mass: all of them are beyond the cut. Half of
  // that, less a unit, leaves room for rounding.
  const double mean_beyond = static_cast<double>(total - mass) / static_cast<double>(weights.size());
  const auto floor = static_cast<float>(std::max(0.0, 0.5 * mean_beyond - 1.0) / sampling::kUnits);
  std::array<uint64_t, kBuckets> sums{};
  for_buckets(weights, floor, [&](size_t bucket, float w) { sums[bucket] += sampling::units_of(w); });
  uint64_t left = mass;
  size_t b = kBuckets - 1;
  while (b > 0 && sums[b] < left) left -= sums[b--];
  std::vector<Entry>& entries = entries_of(weights, b);
  if (entries.empty()) return {};
  // Halve [first, last) until one entry is left: it is the one that reaches the mass. Linear in the bucket.
  auto first = entries.begin(), last = entries.end();
  while (last - first > 1) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, before);
    uint64_t upper = 0;
    for (auto e = first; e != middle; ++e) upper += sampling::units_of(e->weight);
    if (upper >= left) {
      last = middle;
    } else {
      left -= upper;
      first = middle;
    }
  }
  return {first->weight, first->id};
}

void apply_cut(std::span<float> weights, Cut cut) {
  using namespace vec4;
  size_t i = 0;
  I4 id{0, 1, 2, 3};
  for (; i + kWidth <= weights.size(); i += kWidth, id += 4) {
    const F4 w = load(weights.data() + i);
    const I4 keep = I4(w > cut.weight) | (I4(w == cut.weight) & I4(id <= cut.id));
    store(weights.data() + i, floats(bits(w) & keep));
  }
  for (; i < weights.size(); ++i) {
    const bool keep =
        weights[i] > cut.weight || (weights[i] == cut.weight && static_cast<int32_t>(i) <= cut.id);
    if (!keep) weights[i] = 0.0f;
  }
}

std::vector<std::pair<int32_t, float>> largest_values(std::span<const float> values, int32_t n) {
  std::vector<Entry> heap;  // the worst of the kept on top
  if (n <= 0) return {};
  for (size_t i = 0; i < values.size(); ++i) {
    const Entry entry{values[i], static_cast<int32_t>(i)};
    if (!(entry.weight > -std::numeric_limits<float>::infinity())) continue;
    if (heap.size() < static_cast<size_t>(n)) {
      heap.push_back(entry);
      std::push_heap(heap.begin(), heap.end(), before);
    } else if (entry.weight > heap.front().weight) {  // an equal one has a higher id: stays out
      std::pop_heap(heap.begin(), heap.end(), before);
      heap.back() = entry;
      std::push_heap(heap.begin(), heap.end(), before);
    }
  }
  std::sort(heap.begin(), heap.end(), before);
  std::vector<std::pair<int32_t, float>> out;
  for (const Entry& entry : heap) out.emplace_back(entry.id, entry.weight);
  return out;
}

}  // namespace millrace
