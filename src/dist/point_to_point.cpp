#include "dist/point_to_point.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace millrace::dist {
namespace {

// [ranks + 1]: where each rank's part begins, and the end.
std::vector<size_t> offsets_of(std::span<const size_t> bytes) {
  std::vector<size_t> offsets(bytes.size() + 1);
  std::partial_sum(bytes.begin(), bytes.end(), offsets.begin() + 1);
  return offsets;
}

}  // namespace

// In step s everybody sends to the rank s further on and hears from the one s before: no two wait for each
// other.
void PointToPoint::all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                              std::span<const size_t> bytes_of_rank) {
  const std::vector<size_t> offsets = offsets_of(bytes_of_rank);
  MILLRACE_CHECK(bytes_of_rank.size() == static_cast<size_t>(size()) && offsets.back() == all.size());
  MILLRACE_CHECK(mine.size() == bytes_of_rank[static_cast<size_t>(rank())]);
  std::byte* own = all.data() + offsets[static_cast<size_t>(rank())];
  if (!mine.empty() && own != mine.data()) std::copy(mine.begin(), mine.end(), own);
  for (int s = 1; s < size(); ++s) {
    const int to = (rank() + s) % size(), from = (rank() - s + size()) % size();
    send_recv(to, mine, from,
              all.subspan(offsets[static_cast<size_t>(from)], bytes_of_rank[static_cast<size_t>(from)]));
  }
}

void PointToPoint::all_to_all(std::span<const std::byte> out, std::span<const size_t> out_bytes,
                              std::span<std::byte> in, std::span<const size_t> in_bytes) {
  const std::vector<size_t> from_offsets = offsets_of(out_bytes), to_offsets = offsets_of(in_bytes);
  MILLRACE_CHECK(from_offsets.back() == out.size() && to_offsets.back() == in.size());
  const auto part = [](auto bytes, const std::vector<size_t>& offsets, int r) {
    const auto at = static_cast<size_t>(r);
    return bytes.subspan(offsets[at], offsets[at + 1] - offsets[at]);
  };
  const std::span<const std::byte> own = part(out, from_offsets, rank());
  MILLRACE_CHECK(own.size() == in_bytes[static_cast<size_t>(rank())]);
  std::copy(own.begin(), own.end(), part(in, to_offsets, rank()).begin());
  for (int s = 1; s < size(); ++s) {
    const int to = (rank() + s) % size(), from = (rank() - s + size()) % size();
    send_recv(to, part(out, from_offsets, to), from, part(in, to_offsets, from));
  }
}

// A binomial tree: in the round of distance d, ranks below d (counted from the root) pass on to those d
// further.
void PointToPoint::broadcast(int root, std::span<std::byte> bytes) {
  const int place = (rank() - root + size()) % size();
  for (int distance = 1; distance < size(); distance *= 2) {
    if (place < distance && place + distance < size()) {
      send((root + place + distance) % size(), bytes);
    } else if (place >= distance && place < 2 * distance) {
      recv((root + place - distance) % size(), bytes);
    }
  }
}

// Everybody has heard, over others, from everybody when the distances add up to the size.
void PointToPoint::barrier() {
  for (int distance = 1; distance < size(); distance *= 2) {
    std::byte out{}, in{};
    send_recv((rank() + distance) % size(), {&out, 1}, (rank() - distance + size()) % size(), {&in, 1});
  }
}

}  // namespace millrace::dist
