#include "bench_machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>

#include "base/error.h"
#include "interrupt.h"

namespace millrace::cli {
namespace {

// Sums the words so that they must be read; eight chains keep enough loads in flight.
uint64_t sum_words(const uint64_t* words, int64_t count) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < count; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  return sum;
}

}  // namespace

double measure_read_gb_s(Backend& backend) {
  constexpr size_t kBytes = size_t{512} << 20, kPiece = size_t{1} << 20;
  constexpr int kPasses = 8;
  void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw_error(ErrorCode::kNoMemory, "bandwidth buffer: cannot map {} bytes", kBytes);
  const std::shared_ptr<void> owner(memory, [](void* m) { ::munmap(m, kBytes); });
  ::madvise(memory, kBytes, MADV_HUGEPAGE);
  uint64_t* words = static_cast<uint64_t*>(memory);
  constexpr int64_t kPieces = kBytes / kPiece, kWords = kPiece / sizeof(uint64_t);
  backend.parallel(kPieces, [&](int64_t begin, int64_t end) {
    std::fill(words + begin * kWords, words + end * kWords, uint64_t{1});
  });
  std::atomic<uint64_t> total{0};
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    throw_if_interrupted();
    const auto start = std::chrono::steady_clock::now();
    backend.parallel(kPieces, [&](int64_t begin, int64_t end) {
      total += sum_words(words + begin * kWords, (end - begin) * kWords);
    });
    best =
        std::max(best, static_cast<double>(kBytes) /
                           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  if (total != kPasses * (kBytes / sizeof(uint64_t))) {
    throw_error(ErrorCode::kDevice, "bandwidth buffer: words sum to {}, expected {}", total.load(),
                kPasses * (kBytes / sizeof(uint64_t)));
  }
  return best * 1e-9;
}

}  // namespace millrace::cli
