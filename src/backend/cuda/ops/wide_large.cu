// The large items of wide products, and for what they are there (wide_large.cuh).
#include "backend/cuda/ops/wide_large.cuh"

#include "base/check.h"

namespace millrace::cuda {

bool fits_items(WideItems items, PackedFormat format, int32_t pairs) {
  if (items < WideItems::kLarge) return true;
  if (format != PackedFormat::kBf16) return false;
  // The weights of a segment lie in the ring together.
  return items == WideItems::kLoose || pairs_per_segment(pairs) <= LargeLayout::kWeightSlots;
}

void launch_large_linear(const WgmmaLinear& linear, PackedFormat format, WideItems items,
                         cudaStream_t stream) {
  MILLRACE_CHECK(fits_items(items, format, linear.pairs));
  if (items == WideItems::kLoose) return launch_large<true>(linear, stream);
  launch_large<false>(linear, stream);
}

}  // namespace millrace::cuda
