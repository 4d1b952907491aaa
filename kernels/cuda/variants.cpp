#include "kernels/cuda/variants.h"

#include <algorithm>
#include <tuple>

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::cuda {
namespace {

constexpr GemmCandidate kGemmTiles[] = {{GemmTile::kDefault, "default"},
                                        {GemmTile::k128x128, "128x128"},
                                        {GemmTile::k64x128, "64x128"},
                                        {GemmTile::k64x64, "64x64"},
                                        {GemmTile::kCluster, "cluster"}};
constexpr RingCandidate kRings[] = {
    {0, "default"}, {140000, "140 KB"}, {165000, "165 KB"}, {200000, "200 KB"}, {231000, "231 KB"}};
constexpr int64_t kRows[] = {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

}  // namespace

std::string_view kernel_name(TunedKernel kernel) { return kernel == TunedKernel::kGemm ? "gemm" : "gemv"; }

std::string_view format_name(PackedFormat format) {
  switch (format) {
    case PackedFormat::kQ8:
      return "q8";
    case PackedFormat::kMxfp4:
      return "mxfp4";
    case PackedFormat::kBf16:
      return "bf16";
    case PackedFormat::kQ4:
      return "q4";
    case PackedFormat::kQ5:
      return "q5";
    case PackedFormat::kQ6:
      return "q6";
    case PackedFormat::kNone:
      break;
  }
  return "none";
}

std::span<const GemmCandidate> gemm_candidates() { return kGemmTiles; }
std::span<const RingCandidate> ring_candidates() { return kRings; }
std::span<const int64_t> timed_rows() { return kRows; }

Tuning::Tuning(std::vector<Entry> entries) : entries_(std::move(entries)) {
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.rows < b.rows; });
}

const Tuning::Entry* Tuning::find(TunedKernel kernel, PackedFormat format, int64_t outputs, int64_t cols,
                                  int64_t rows) const {
  const Entry* largest = nullptr;
  for (const Entry& entry : entries_) {
    if (std::tie(entry.kernel, entry.format, entry.outputs, entry.cols) !=
        std::tie(kernel, format, outputs, cols))
      continue;
    largest = &entry;
    if (entry.rows >= rows) break;
  }
  return largest;
}

GemmTile Tuning::tile(PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const {
  const Entry* entry = find(TunedKernel::kGemm, format, outputs, cols, rows);
  return entry != nullptr ? static_cast<GemmTile>(entry->value) : GemmTile::kDefault;
}

uint32_t Tuning::ring_bytes(PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const {
  const Entry* entry = find(TunedKernel::kGemv, format, outputs, cols, rows);
  return entry != nullptr ? entry->value : 0;
}

}  // namespace millrace::cuda
