#include "kernels/cpu/attention/combine_splits.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

// Partials that are prefetched ahead of their turn, those whose weights are one exponential, and the numbers
// in a cache line.
constexpr int64_t kSplitsAhead = 6, kSplitsAtOnce = 8, kLineFloats = 16;

}  // namespace

void combine_split(const KernelTable& kernels, int32_t rows, int64_t padded_dim, const PartialSoftmax& part,
                   const PartialSoftmax& total, const int32_t* first, const int32_t* last, bool fresh) {
  const int64_t dim = padded_dim;
  for (int32_t r = 0; r < rows; ++r) {
    if (fresh) total.row_sum[r] = 0.0f;
    if (first[r] >= last[r]) continue;
    if (total.row_sum[r] == 0.0f) {
      total.row_max[r] = part.row_max[r];
      total.row_sum[r] = part.row_sum[r];
      std::copy_n(part.out + r * dim, dim, total.out + r * dim);
      continue;
    }
    const float row_max = std::max(total.row_max[r], part.row_max[r]);
    float weight[2] = {total.row_max[r] - row_max, part.row_max[r] - row_max};
    kernels.exp(weight, 2, weight);
    total.row_sum[r] = total.row_sum[r] * weight[0] + part.row_sum[r] * weight[1];
    kernels.scale_add(total.out + r * dim, weight[0], part.out + r * dim, weight[1], dim);
    total.row_max[r] = row_max;
  }
}

void combine_row(const KernelTable& kernels, int32_t row, int64_t padded_dim, const PartialSoftmax& parts,
                 int64_t splits, int64_t apart, const PartialSoftmax& total) {
  const int64_t dim = padded_dim;
  const auto out_of = [&](int64_t split) { return parts.out + (split * apart + row) * dim; };
  float row_max = parts.row_max[row], row_sum = parts.row_sum[row];
  float* out = total.out + row * dim;
  std::copy_n(out_of(0), dim, out);
  for (int64_t first = 1; first < splits; first += kSplitsAtOnce) {
    const int64_t count = std::min(kSplitsAtOnce, splits - first);
    float weights[kSplitsAtOnce][2];
    for (int64_t i = 0; i < count; ++i) {
      __builtin_prefetch(parts.row_sum + (first + i) * apart + row);
      const float other = parts.row_max[(first + i) * apart + row], both = std::max(row_max, other);
      weights[i][0] = row_max - both;
      weights[i][1] = other - both;
      row_max = both;
    }
    kernels.exp(weights[0], 2 * count, weights[0]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t ahead = first + i + kSplitsAhead;
      if (ahead < splits) {  // no lambda: g++ takes one that only prefetches for one that does nothing
        const float* later = out_of(ahead);
        for (int64_t d = 0; d < dim; d += kLineFloats) __builtin_prefetch(later + d);
      }
      row_sum = row_sum * weights[i][0] + parts.row_sum[(first + i) * apart + row] * weights[i][1];
      kernels.scale_add(out, weights[i][0], out_of(first + i), weights[i][1], dim);
    }
  }
  total.row_max[row] = row_max;
  total.row_sum[row] = row_sum;
}

}  // namespace millrace::cpu
