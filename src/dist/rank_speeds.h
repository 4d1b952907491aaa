// What ranks have measured of themselves, as the speeds that shares are made of (shares.h). Plain numbers:
// every rank has everybody's and makes the same of them.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace millrace::dist {

// In eighths of the fastest, and at least one: ranks that are alike get as much, however a measurement came
// out.
std::vector<double> speeds_in_eighths(std::span<const double> measured);

// Less for a rank whose part of `bytes` would be more than memory[rank], and that much more for the others,
// in proportion. Throws Error{kNoMemory} where all of them together have too little.
std::vector<double> speeds_within(std::vector<double> speeds, std::span<const size_t> memory, size_t bytes);

}  // namespace millrace::dist
