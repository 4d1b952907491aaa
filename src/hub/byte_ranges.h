// Which bytes of a file are there: a few ranges, kept in order and joined where they touch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace millrace::hub {

struct ByteRange {
  uint64_t begin = 0, end = 0;
  uint64_t size() const { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};

class ByteRanges {
 public:
  void add(ByteRange range) {
    if (range.begin >= range.end) return;
    std::vector<ByteRange> joined;
    for (const ByteRange& other : ranges_) {
      if (other.end < range.begin || other.begin > range.end) {
        joined.push_back(other);
      } else {
        range = {std::min(range.begin, other.begin), std::max(range.end, other.end)};
      }
    }
    joined.push_back(range);
    std::sort(joined.begin(), joined.end(),
              [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
    ranges_ = std::move(joined);
  }
  void clear() { ranges_.clear(); }

  const std::vector<ByteRange>& ranges() const { return ranges_; }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const ByteRange& range : ranges_) sum += range.size();
    return sum;
  }
  // Up to where nothing is missing.
  uint64_t prefix() const { return ranges_.empty() || ranges_[0].begin > 0 ? 0 : ranges_[0].end; }

  // What of [0, size) is missing, in pieces of at most `piece` bytes, in order.
  std::vector<ByteRange> missing(uint64_t size, uint64_t piece) const {
    std::vector<ByteRange> pieces;
    uint64_t at = 0;
    const auto add_until = [&](uint64_t end) {
      for (; at < end; at = pieces.back().end) pieces.push_back({at, std::min(end, at + piece)});
    };
    for (const ByteRange& range : ranges_) {
      add_until(std::min(range.begin, size));
      at = std::max(at, range.end);
    }
    add_until(size);
    return pieces;
  }

 private:
  std::vector<ByteRange> ranges_;
};

}  // namespace millrace::hub
