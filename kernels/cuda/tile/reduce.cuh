// The reductions of the tile vocabulary under the names that the engine's kernels use.
#pragma once

#include "millrace/kernels/tile/reduce.cuh"

namespace millrace::cuda {

using tile::block_sum;
using tile::kAllLanes;
using tile::kWarpLanes;
using tile::quad_max;
using tile::quad_sum;
using tile::warp_sum;

}  // namespace millrace::cuda
