// The kernels' variants that were chosen for this GPU (backend/tuning.h), as the launchers ask for them. No
// table, or no entry for a shape: the built-in choice.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "backend/tuning.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemv/gemv.h"

namespace millrace::cuda {

// Older files are stale once this is another: when a variant comes, goes, or becomes another kernel.
inline constexpr int kKernelRevision = 5;

inline constexpr std::string_view kWideKernel = "wide_linear", kStreamKernel = "stream_linear";

// What each kernel has to choose from, by name. The first is the built-in choice.
struct ItemsName {
  WideItems items;
  std::string_view name;
};
std::span<const ItemsName> wide_candidates();
// Bytes of shared memory that a stream of many tiles (the logits) takes. Two such CTAs never fit an SM.
struct RingName {
  uint32_t bytes;
  std::string_view name;
};
std::span<const RingName> ring_candidates();

std::string_view format_name(PackedFormat format);
// Numbers of rows that are timed; an entry holds from the one before it on.
std::span<const int64_t> tuned_rows();

class Tuned {
 public:
  Tuned() = default;
  // Throws Error{kBadInput} for a kernel, format or choice there is not.
  explicit Tuned(const TuneTable& table);

  WideItems items(PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const;
  uint32_t ring_bytes(PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const;  // 0: built in
  bool empty() const { return entries_.empty(); }

 private:
  struct Entry {
    bool wide;
    PackedFormat format;
    int64_t outputs, cols, rows;
    uint32_t value;  // WideItems, or bytes
  };
  const Entry* find(bool wide, PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const;
  std::vector<Entry> entries_;  // of each shape in order of rows
};

// For all launches of this process, from here on; not while a step is launched.
void use_tuned(Tuned tuned);
WideItems tuned_items(const WideLinear& op);
uint32_t tuned_ring_bytes(const StreamLinear& op);

}  // namespace millrace::cuda
