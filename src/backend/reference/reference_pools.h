// Keys, values and states of the reference executor: a pool a group, of blocks as ExecutorSpec lays them out,
// rounded to the type of the cache and kept as float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "base/check.h"
#include "kernels/reference/naive_attention.h"
#include "kernels/reference/naive_time_mix.h"

namespace millrace {

class ReferencePools {
 public:
  explicit ReferencePools(const ExecutorSpec& spec) : spec_(spec), kv_type_(spec.kv_type) {
    spec_.kv_type = DType::kF32;
    for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
      // Blocks of a state group that nobody keeps are written behind the others.
      const int32_t spare = spec.kv_groups[g].state ? blocks_for(spec.max_tokens) + 1 : 0;
      pools_.emplace_back(static_cast<size_t>(block_floats(static_cast<int>(g))) *
                          static_cast<size_t>(spec.kv_groups[g].num_blocks + spare));
    }
  }

  float* of_group(int group) { return pools_[static_cast<size_t>(group)].data(); }
  int64_t block_floats(int group) const {
    return static_cast<int64_t>(spec_.kv_block_bytes(group) / sizeof(float));
  }
  std::span<std::byte> block(int group, int32_t block) {
    const size_t bytes = spec_.kv_block_bytes(group);
    MILLRACE_CHECK(block >= 0 && block < spec_.kv_groups[static_cast<size_t>(group)].num_blocks);
    return std::as_writable_bytes(std::span(pools_[static_cast<size_t>(group)]))
        .subspan(static_cast<size_t>(block) * bytes, bytes);
  }

  reference::PagedKv kv_of(int layer) {
    const auto [group, index] = spec_.layers[static_cast<size_t>(layer)];
    return {kv_type_,
            of_group(group),
            block_floats(group),
            index * static_cast<int64_t>(spec_.kv_layer_bytes(group) / sizeof(float)),
            spec_.kv_heads_of(group),
            spec_.head_dim_of(group),
            spec_.kv_parts()};
  }
  // Behind the keys of the layer.
  reference::PagedKv index_keys_of(int layer) {
    reference::PagedKv kv = kv_of(layer);
    kv.layer_offset += int64_t{kBlockTokens} * kv.head_dim;
    kv.head_dim = spec_.latent.index_dim;
    return kv;
  }
  // What is kept of a layer of RWKV 7.
  reference::TimeMix shifted_layer(int layer) {
    const auto [group, index] = spec_.state_place(layer);
    reference::TimeMix op;
    op.shape = spec_.state;
    op.pool = of_group(group);
    op.block_floats = block_floats(group);
    op.layer_offset = index * StateBlock(spec_.state).floats;
    return op;
  }

 private:
  ExecutorSpec spec_;
  const DType kv_type_;
  std::vector<std::vector<float>> pools_;  // [blocks][layers][key, value][kv_heads][16][head_dim]
};

}  // namespace millrace
