#include "bench_machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>

#include "base/error.h"
#include "base/read_loop.h"
#include "base/topology.h"
#include "interrupt.h"

namespace millrace::cli {
double measure_read_gb_s(Backend& backend) {
  constexpr size_t kPiece = size_t{1} << 20;
  const size_t size = beyond_caches();
  constexpr int kPasses = 8;
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_error(ErrorCode::kNoMemory, "bandwidth buffer: cannot map {} bytes", size);
  const std::shared_ptr<void> owner(memory, [size](void* m) { ::munmap(m, size); });
  ::madvise(memory, size, MADV_HUGEPAGE);
  uint64_t* words = static_cast<uint64_t*>(memory);
  const std::byte* bytes = static_cast<const std::byte*>(memory);
  constexpr int64_t kWords = kPiece / sizeof(uint64_t);
  const auto pieces = static_cast<int64_t>(size / kPiece);
  backend.parallel(pieces, [&](int64_t begin, int64_t end) {
    std::fill(words + begin * kWords, words + end * kWords, uint64_t{1});
  });
  std::atomic<uint64_t> total{0};
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    throw_if_interrupted();
    const auto start = std::chrono::steady_clock::now();
    backend.parallel(pieces, [&](int64_t begin, int64_t end) {
      total += sum_words(bytes + begin * int64_t{kPiece}, (end - begin) * int64_t{kPiece}, pass % 2 == 0);
    });
    best =
        std::max(best, static_cast<double>(size) /
                           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  if (total != kPasses * (size / sizeof(uint64_t))) {
    throw_error(ErrorCode::kDevice, "bandwidth buffer: words sum to {}, expected {}", total.load(),
                kPasses * (size / sizeof(uint64_t)));
  }
  return best * 1e-9;
}

}  // namespace millrace::cli
