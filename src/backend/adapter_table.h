// AdapterTable: the low-rank updates (LoRA, Hu et al. 2021) that adapters add to a model's products, as
// executors look them up: by the adapter's number and the matrix that the product is of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace millrace {

class Weight;

// y += B (A x): what an adapter adds to the product y = W x. The adapter's scale is in B already.
struct LowRank {
  const Weight* a = nullptr;  // [rank, in], of experts [experts, rank, in]
  const Weight* b = nullptr;  // [out, rank], [experts, out, rank]
};

class AdapterTable {
 public:
  explicit AdapterTable(int32_t adapters = 0) : updates_(static_cast<size_t>(adapters)) {}

  int32_t size() const { return static_cast<int32_t>(updates_.size()); }
  void set(int32_t adapter, const Weight& weight, const LowRank& update) {
    updates_.at(static_cast<size_t>(adapter))[&weight] = update;
  }
  // nullptr: adapter -1 (none), or one that leaves this matrix alone.
  const LowRank* find(int32_t adapter, const Weight* weight) const {
    if (adapter < 0) return nullptr;
    const auto& updates = updates_.at(static_cast<size_t>(adapter));
    const auto found = updates.find(weight);
    return found == updates.end() ? nullptr : &found->second;
  }

 private:
  std::vector<std::unordered_map<const Weight*, LowRank>> updates_;
};

}  // namespace millrace
