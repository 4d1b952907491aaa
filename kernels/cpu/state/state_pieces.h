// A ragged batch cut at the borders of KV blocks, and the state before and behind each piece: what all layers
// with a state share. `Rows` is what such a layer gets: shape, sequences, tables and where its blocks lie.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "base/state_block.h"
#include "kernels/cpu/context.h"

namespace millrace::cpu {

// Some rows of one sequence that lie in one block.
struct StatePiece {
  int32_t sequence, row, position, rows;
};

// Returns how many; `to` has room for one a row.
template <class Rows>
int64_t list_pieces(const Rows& op, StatePiece* to) {
  int64_t count = 0;
  for (int64_t n = 0; n < op.num_sequences; ++n) {
    const auto& s = op.sequences[n];
    for (int32_t i = 0; i < s.num_tokens;) {
      const int32_t position = s.context_len + i;
      const int32_t rows = std::min(s.num_tokens - i, kBlockTokens - position % kBlockTokens);
      to[count++] = {static_cast<int32_t>(n), s.first_row + i, position, rows};
      i += rows;
    }
  }
  return count;
}

// This layer's part of the block of a position; null where nothing is kept of it.
template <class Rows>
float* block_of(const Rows& op, int32_t sequence, int32_t position) {
  const int32_t block = op.tables[sequence][position / kBlockTokens];
  return block == kNoBlock ? nullptr : op.pool + block * op.block_floats + op.layer_offset;
}

// scan(piece, head, state before it, thread) for each piece of each sequence and head, those of one in order.
// It returns the state behind the piece, or, where that does not end its block, nothing of use. A task's
// pieces follow one another: sequences of one step are few, heads are many.
template <class Rows, class Scan>
void scan_pieces(const Context& ctx, const Rows& op, const StatePiece* pieces, int64_t num_pieces,
                 const Scan& scan) {
  const StateBlock at(op.shape);
  const int32_t heads = op.shape.value_heads;
  const StatePiece* const last = pieces + num_pieces;
  ctx.pool.parallel_for(op.num_sequences * heads, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const auto sequence = static_cast<int32_t>(task / heads), head = static_cast<int32_t>(task % heads);
      const StatePiece* piece = pieces;
      while (piece->sequence != sequence) ++piece;
      const float* state = nullptr;
      if (piece->position >= kBlockTokens) {
        const float* block = block_of(op, sequence, piece->position / kBlockTokens * kBlockTokens - 1);
        MILLRACE_CHECK(block != nullptr);
        state = block + at.state + head * at.head_state;
      }
      for (; piece < last && piece->sequence == sequence; ++piece) state = scan(*piece, head, state, thread);
    }
  });
}

}  // namespace millrace::cpu
