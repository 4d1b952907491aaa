#include "kv/compressor.h"

#include <cstring>

#include "base/check.h"

namespace millrace::kv {
namespace {

// The element size as a constant lets the compiler use vector interleaving.
template <size_t kElement>
void split(const std::byte* from, size_t count, std::byte* to) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t p = 0; p < kElement; ++p) to[p * count + i] = from[i * kElement + p];
  }
}

template <size_t kElement>
void join(const std::byte* from, size_t count, std::byte* to) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t p = 0; p < kElement; ++p) to[i * kElement + p] = from[p * count + i];
  }
}

size_t whole(size_t bytes, size_t element) { return element == 2 || element == 4 ? bytes / element : 0; }

}  // namespace

void split_planes(std::span<const std::byte> from, size_t element, std::span<std::byte> to) {
  MILLRACE_CHECK(from.size() == to.size());
  const size_t count = whole(from.size(), element), done = count * element;
  if (element == 2) split<2>(from.data(), count, to.data());
  if (element == 4) split<4>(from.data(), count, to.data());
  if (done < from.size()) std::memcpy(to.data() + done, from.data() + done, from.size() - done);
}

void join_planes(std::span<const std::byte> from, size_t element, std::span<std::byte> to) {
  MILLRACE_CHECK(from.size() == to.size());
  const size_t count = whole(from.size(), element), done = count * element;
  if (element == 2) join<2>(from.data(), count, to.data());
  if (element == 4) join<4>(from.data(), count, to.data());
  if (done < from.size()) std::memcpy(to.data() + done, from.data() + done, from.size() - done);
}

}  // namespace millrace::kv
