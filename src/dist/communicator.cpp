#include "dist/communicator.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/check.h"
#include "base/error.h"

namespace millrace::dist {
namespace {

std::vector<size_t> to_bytes(std::span<const size_t> counts) {
  std::vector<size_t> bytes(counts.begin(), counts.end());
  for (size_t& b : bytes) b *= sizeof(float);
  return bytes;
}

// "rank 0 and rank 2"
std::string names_of(std::span<const int> ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += fmt::format("{}rank {}", i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  }
  return text;
}

}  // namespace

void Communicator::all_reduce(std::span<float> values) {
  const size_t count = values.size();
  std::vector<float> all(count * static_cast<size_t>(size()));
  const std::vector<size_t> bytes(static_cast<size_t>(size()), count * sizeof(float));
  all_gather(std::as_bytes(values), std::as_writable_bytes(std::span(all)), bytes);
  std::copy_n(all.begin(), count, values.begin());
  for (size_t r = 1; r < static_cast<size_t>(size()); ++r) {
    for (size_t i = 0; i < count; ++i) values[i] += all[r * count + i];
  }
}

void Communicator::reduce_scatter(std::span<const float> values, std::span<const size_t> count_of_rank,
                                  std::span<float> mine) {
  const size_t count = count_of_rank[static_cast<size_t>(rank())];
  MILLRACE_CHECK(mine.size() == count && count_of_rank.size() == static_cast<size_t>(size()));
  std::vector<float> parts(count * static_cast<size_t>(size()));
  const std::vector<size_t> in_bytes(static_cast<size_t>(size()), count * sizeof(float));
  all_to_all(std::as_bytes(values), to_bytes(count_of_rank), std::as_writable_bytes(std::span(parts)),
             in_bytes);
  std::copy_n(parts.begin(), count, mine.begin());
  for (size_t r = 1; r < static_cast<size_t>(size()); ++r) {
    for (size_t i = 0; i < count; ++i) mine[i] += parts[r * count + i];
  }
}

std::vector<std::string> all_gather_text(Communicator& group, std::string_view mine) {
  const auto ranks = static_cast<size_t>(group.size());
  const uint64_t length = mine.size();
  std::vector<uint64_t> lengths(ranks);
  const std::vector<size_t> eight(ranks, sizeof(uint64_t));
  group.all_gather(std::as_bytes(std::span(&length, 1)), std::as_writable_bytes(std::span(lengths)), eight);
  const std::vector<size_t> bytes(lengths.begin(), lengths.end());
  std::string all(std::accumulate(bytes.begin(), bytes.end(), size_t{0}), '\0');
  group.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), bytes);
  std::vector<std::string> texts;
  size_t at = 0;
  for (const size_t b : bytes) {
    texts.push_back(all.substr(at, b));
    at += b;
  }
  return texts;
}

std::string broadcast_text(Communicator& group, int root, std::string_view text) {
  uint64_t length = text.size();
  group.broadcast(root, std::as_writable_bytes(std::span(&length, 1)));
  std::string copy = group.rank() == root ? std::string(text) : std::string(length, '\0');
  group.broadcast(root, std::as_writable_bytes(std::span(copy)));
  return copy;
}

void check_agreement(Communicator& group, std::span<const Claim> claims) {
  for (const Claim& claim : claims) {
    const std::vector<std::string> said = all_gather_text(group, claim.value);
    std::vector<int> others;
    for (size_t r = 1; r < said.size(); ++r) {
      if (said[r] != said[0]) others.push_back(static_cast<int>(r));
    }
    if (others.empty()) continue;
    throw_error(ErrorCode::kBadInput, "{}: {} of {} has '{}', rank 0 has '{}': all ranks need the same",
                claim.name, names_of(others), group.size(), said[static_cast<size_t>(others[0])], said[0]);
  }
}

LinkSpeed measure_link(Communicator& group, int a, int b, size_t bytes) {
  constexpr int kShort = 20, kLong = 5;
  LinkSpeed speed;
  if (group.rank() == a || group.rank() == b) {
    const int other = group.rank() == a ? b : a;
    // Half of the quickest of so many round trips: what else the machine does only adds to one.
    const auto quickest = [&](size_t n, int rounds) {
      std::vector<std::byte> message(n);
      double best = 0;
      for (int i = 0; i < rounds; ++i) {
        const auto start = std::chrono::steady_clock::now();
        if (group.rank() == a) group.send(other, message);
        group.recv(other, message);
        if (group.rank() != a) group.send(other, message);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        best = i == 0 ? took.count() : std::min(best, took.count());
      }
      return best / 2;
    };
    speed.latency_s = quickest(sizeof(uint64_t), kShort);
    speed.bytes_per_s = static_cast<double>(bytes) / quickest(bytes, kLong);
  }
  group.broadcast(a, std::as_writable_bytes(std::span(&speed, 1)));
  return speed;
}

}  // namespace millrace::dist
