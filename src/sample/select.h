// Cutting a distribution to its likeliest part without sorting it: a histogram over the weights' leading bits
// finds where the cut falls, and only the entries of that one bucket are ordered.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace millrace {

// The last entry kept: those with a larger weight stay, and at equal weight those with a lower or equal id.
struct Cut {
  float weight = 0.0f;
  int32_t id = INT32_MAX;
};

// weights are in [0, 1]; entries that are 0 are out already.
// The k largest, k >= 1.
Cut cut_to_count(std::span<const float> weights, int64_t k);
// The fewest largest whose units (sampling::units_of) sum to at least `mass`; 0 < mass <= total, all units.
Cut cut_to_mass(std::span<const float> weights, uint64_t total, uint64_t mass);
// Sets what is beyond the cut to 0.
void apply_cut(std::span<float> weights, Cut cut);

// The n largest values with their ids, largest first, ties to the lower id; NaN and -infinity left out.
std::vector<std::pair<int32_t, float>> largest_values(std::span<const float> values, int32_t n);

}  // namespace millrace
