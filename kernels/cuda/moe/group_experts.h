// (token, slot) pairs sorted by expert: what a grouped GEMM multiplies.
#pragma once

#include "kernels/cuda/device.h"

namespace millrace::cuda {

// (token, slot) pairs sorted by expert, each expert's padded to whole tiles of rows, and the tiles cut into
// chunks.
struct ExpertGroups {
  int32_t* order = nullptr;        // [max_rows]: the pair of each sorted row, -1 in the padding
  int32_t* sorted_rows = nullptr;  // [pairs]: the sorted row of each
  int32_t* chunks = nullptr;       // [max_chunks][4]: expert, first tile, tiles, rows
  int32_t* num_chunks = nullptr;   // [1]
  int64_t max_rows = 0;
  int32_t max_chunks = 0;
  int32_t tile_rows = 0, tiles_per_chunk = 0;
};
// Sizes for so many pairs; int32s to allocate in all, and the parts of such an allocation.
ExpertGroups expert_groups(int32_t* base, int64_t pairs, int32_t experts, const Device& device);
size_t expert_groups_ints(int64_t pairs, int32_t experts, const Device& device);
// chosen: [pairs], the expert of each.
void launch_group_experts(const int32_t* chosen, int64_t pairs, int32_t experts, const ExpertGroups& groups,
                          const Launch& at);

}  // namespace millrace::cuda
