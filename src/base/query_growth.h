// QueryGrowth: how queries grow with the logarithm of their position (Llama 4, Ministral 3). What an
// operation says, and what the kernels of CPUs and the reference compute.
#pragma once

#include <cstdint>

namespace millrace {

// q *= 1 + scale * log(1 + floor((position + offset) / every)).
struct QueryGrowth {
  float scale = 0.0f, every = 1.0f;  // scale 0: they do not grow
  int32_t offset = 0;
};

}  // namespace millrace
