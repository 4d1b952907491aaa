// Where layers with a state keep what later tokens read, plainly: the block of a position, and the state at a
// block's end. `Op` has a shape and says where its blocks lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/state_block.h"

namespace millrace::reference {

// This layer's part of the block of a position; null before the first and where nothing is kept.
template <class Op>
float* block_of(const Op& op, const int32_t* table, int32_t position) {
  if (position < 0 || table[position / kBlockTokens] == kNoBlock) return nullptr;
  return op.pool + table[position / kBlockTokens] * op.block_floats + op.layer_offset;
}

// A head's state before the token at `first`, with which a block begins: [key_dim][value_dim].
template <class Op>
std::vector<double> state_before(const Op& op, const int32_t* table, int32_t first, int32_t head) {
  const StateShape& s = op.shape;
  const StateBlock at(s);
  std::vector<double> state(static_cast<size_t>(s.key_dim) * static_cast<size_t>(s.value_dim), 0.0);
  if (const float* before = block_of(op, table, first - 1)) {
    for (int32_t d = 0; d < s.key_dim; ++d) {
      for (int32_t i = 0; i < s.value_dim; ++i)
        state[static_cast<size_t>(d * s.value_dim + i)] =
            before[at.state + head * at.head_state + d * at.padded_dim + i];
    }
  }
  return state;
}

// Behind a block's last token: its columns padded with zeros.
inline void keep_state(const StateShape& s, const std::vector<double>& state, int32_t head, float* block) {
  const StateBlock at(s);
  float* to = block + at.state + head * at.head_state;
  for (int32_t d = 0; d < s.key_dim; ++d) {
    for (int32_t i = 0; i < at.padded_dim; ++i)
      to[d * at.padded_dim + i] =
          i < s.value_dim ? static_cast<float>(state[static_cast<size_t>(d * s.value_dim + i)]) : 0.0f;
  }
}

}  // namespace millrace::reference
