// Installed with the tile vocabulary: include/millrace/kernels/tile/ptx.
#pragma once

#include "millrace/kernels/tile/ptx/grid_sync.cuh"
