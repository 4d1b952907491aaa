// Which variant of a kernel launches choose for a shape: the candidates, by name, and the choice as data. All
// candidates give the same bits, so a choice can only make things slow. A Device has one Tuning; where it has
// no entry for a shape, the built-in choice holds. Files of such choices are the backend's
// (backend/tuning.h).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace millrace::cuda {

enum class PackedFormat : int32_t;  // quant/packed_tiles.h
enum class GemmTile : int32_t;      // gemm/gemm.h

// Tables made before this was raised are stale: it is raised when a variant comes, goes, or becomes another
// kernel.
inline constexpr int kKernelRevision = 7;

// What is chosen: the tile that a CTA of a GEMM multiplies at a time, or the bytes of shared memory that the
// ring of a GEMV of many tiles (the logits) takes.
enum class TunedKernel : int32_t { kGemm, kGemv };
inline constexpr TunedKernel kTunedKernels[] = {TunedKernel::kGemm, TunedKernel::kGemv};
std::string_view kernel_name(TunedKernel kernel);
std::string_view format_name(PackedFormat format);

// What each kernel has to choose from. The first is the built-in choice.
struct GemmCandidate {
  GemmTile tile;
  std::string_view name;
};
std::span<const GemmCandidate> gemm_candidates();
struct RingCandidate {
  uint32_t bytes;  // two such CTAs never fit an SM
  std::string_view name;
};
std::span<const RingCandidate> ring_candidates();

// Numbers of rows of a GEMM that are timed; an entry holds from the one before it on.
std::span<const int64_t> timed_rows();

class Tuning {
 public:
  struct Entry {
    TunedKernel kernel;
    PackedFormat format;
    int64_t outputs, cols;  // of all matrices of a launch
    int64_t rows;           // and fewer, down to the entry before
    uint32_t value;         // GemmTile, or bytes
  };
  Tuning() = default;
  explicit Tuning(std::vector<Entry> entries);

  GemmTile tile(PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const;
  uint32_t ring_bytes(PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const;  // 0: built in
  bool empty() const { return entries_.empty(); }

 private:
  const Entry* find(TunedKernel kernel, PackedFormat format, int64_t outputs, int64_t cols,
                    int64_t rows) const;
  std::vector<Entry> entries_;  // in order of rows
};

}  // namespace millrace::cuda
