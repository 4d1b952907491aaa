// Combining the partial softmaxes of a context's splits, in their order. The same numbers whether a split is
// added as soon as it is there or all of a row's are combined afterwards.
#pragma once

#include "kernels/cpu/attention/attention_plan.h"

namespace millrace::cpu {

// total += part for rows [0, rows) that saw something of the split, first[r] < last[r]; the first such split
// of a row starts its total. fresh: this split is the tile's first.
void combine_split(const KernelTable& kernels, int32_t rows, int64_t padded_dim, const PartialSoftmax& part,
                   const PartialSoftmax& total, const int32_t* first, const int32_t* last, bool fresh);

// The same for one row that saw something of all `splits`: `parts` is that of the first, the others lie
// `apart` rows behind each other. Row maxima come first, so that the weights of many splits are one
// exponential.
void combine_row(const KernelTable& kernels, int32_t row, int64_t padded_dim, const PartialSoftmax& parts,
                 int64_t splits, int64_t apart, const PartialSoftmax& total);

}  // namespace millrace::cpu
