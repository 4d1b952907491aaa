// The tile vocabulary: all of it. docs/kernels/tile.md explains it; examples/tile_gemm.cu and
// examples/tile_attention.cu are written in it.
#pragma once

#include "millrace/kernels/tile/block.cuh"
#include "millrace/kernels/tile/grid.cuh"
#include "millrace/kernels/tile/host.cuh"
#include "millrace/kernels/tile/reduce.cuh"
#include "millrace/kernels/tile/ring.cuh"
#include "millrace/kernels/tile/warp.cuh"
