// Installed with the tile vocabulary: include/millrace/kernels/tile/ptx.
#pragma once

#include "millrace/kernels/tile/ptx/mma_16bit.cuh"
