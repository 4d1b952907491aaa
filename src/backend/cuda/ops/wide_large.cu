// The large items of wide products, and for what they are there (wide_large.cuh).
#include "backend/cuda/ops/wide_large.cuh"

#include "base/check.h"

namespace millrace::cuda {
namespace {

template <PackedFormat kFormat>
void launch_for_format(const WgmmaLinear& linear, WideItems items, cudaStream_t stream) {
  switch (items) {
    case WideItems::kLarge:
      return launch_large<kFormat, LargeShare::kNothing>(linear, stream);
    case WideItems::kLargeTokens:
      return launch_large<kFormat, LargeShare::kTokens>(linear, stream);
    default:
      return launch_large<kFormat, LargeShare::kWeights>(linear, stream);
  }
}

}  // namespace

bool fits_items(WideItems items, PackedFormat format, int32_t pairs) {
  if (items < WideItems::kLarge) return true;
  if (format != PackedFormat::kBf16 && (format != PackedFormat::kQ8 || items == WideItems::kLoose))
    return false;
  // The weights of a segment lie in the ring together.
  const int slots = format == PackedFormat::kBf16 ? LargeLayout<PackedFormat::kBf16>::kWeightSlots
                                                  : LargeLayout<PackedFormat::kQ8>::kWeightSlots;
  return items == WideItems::kLoose || pairs_per_segment(pairs) <= slots;
}

void launch_large_linear(const WgmmaLinear& linear, PackedFormat format, WideItems items,
                         cudaStream_t stream) {
  MILLRACE_CHECK(fits_items(items, format, linear.pairs));
  if (items == WideItems::kLoose)
    return launch_large<PackedFormat::kBf16, LargeShare::kNothing, true>(linear, stream);
  if (format == PackedFormat::kBf16) return launch_for_format<PackedFormat::kBf16>(linear, items, stream);
  launch_for_format<PackedFormat::kQ8>(linear, items, stream);
}

}  // namespace millrace::cuda
