// StateShape, HeadColumns and StateBlock: what layers with a state read and keep of 16 tokens. A block of
// such a layer has the rows that the tokens of the block have written, and the state behind the last of them;
// a token of block i is computed from the state of block i - 1 and the rows of block i before it, in a prompt
// and one by one alike. So chunks are blocks: they lie at fixed positions of the sequence, and a state is
// written once a chunk.
#pragma once

#include <cstdint>

#include "base/paging.h"

namespace millrace {

// A matrix [key_dim][value_dim] for each value head, and a short convolution over what goes in. Value heads
// share the keys and queries of a key head, value_heads / key_heads of them in a row. No key heads: the layer
// is a convolution alone.
struct StateShape {
  int32_t key_heads = 0, key_dim = 0, value_heads = 0, value_dim = 0;
  int32_t taps = 0;  // of the convolution: a token sees itself and the taps - 1 before it; 0: no such layers
  bool tiled = false;  // value head h has key head h % key_heads instead (GGUF files of Qwen 3.5)
  bool values_first =
      false;  // what is convolved is values, keys, queries (Mamba-2); else queries, keys, values
  bool channel_decay = false;  // rows of a state are forgotten each at its own rate (Kimi Linear)
  // RWKV 7 (TimeMix, ChannelMix): what is kept of a row is what goes into both mixes, [2][keys], where the
  // residual stream is as wide as all keys; two keys and two values of each head; and its decays. taps is 2.
  bool wkv7 = false;
  int32_t projected = 0;  // columns of the widest row that the layer's projections make

  bool present() const { return taps > 0; }
  int32_t key_head(int32_t value_head) const {
    return tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
  int64_t keys() const { return int64_t{key_heads} * key_dim; }
  int64_t values() const { return int64_t{value_heads} * value_dim; }
  // What is convolved: queries, keys and values.
  int64_t channels() const { return 2 * keys() + values(); }
  int64_t query_at() const { return values_first ? values() + keys() : 0; }
  int64_t key_at() const { return values_first ? values() : keys(); }
  int64_t value_at() const { return values_first ? 0 : 2 * keys(); }
  // What decides how much is forgotten: a number for each value head, or for each row of its state.
  int64_t steps() const { return int64_t{value_heads} * (channel_decay ? key_dim : 1); }
  // A row of a layer's inputs: what is convolved, the gate, the steps, and one number for each value head.
  int64_t mix_cols() const { return channels() + values() + steps() + value_heads; }
  int64_t gate_at() const { return channels(); }
  int64_t step_at() const { return channels() + values(); }  // decides how much is forgotten
  int64_t beta_at() const { return step_at() + steps(); }    // how much is written
};

// Where the columns of heads are in a row: those of head h begin at
// first + h / per_group * group_stride + h % per_group * dim.
struct HeadColumns {
  int32_t first = 0, heads = 0, dim = 0;
  int32_t per_group = 1, group_stride = 0;
  float scale = 1.0f;  // what they are multiplied by (Falcon H1)
  // All side by side.
  static HeadColumns plain(int32_t first, int32_t heads, int32_t dim, float scale = 1.0f) {
    return {first, heads, dim, heads > 0 ? heads : 1, 0, scale};
  }
  int32_t at(int32_t head) const { return first + head / per_group * group_stride + head % per_group * dim; }
};

// The window of a group of such layers: a token sees its own block and the one before it.
inline constexpr int32_t kStateWindow = kBlockTokens + 1;
// Blocks of such a group that a sequence needs at most while `tokens` of it are computed: its own and the one
// before it; what drafts may reach, or two at the end and the boundaries between, which are so many tokens
// apart (kv::GroupOptions::sparse, boundary_tokens).
inline int32_t state_blocks_of_step(int32_t tokens, int32_t apart) { return 8 + tokens / apart; }
// A convolution reaches no further back than that.
inline constexpr int32_t kMaxTaps = kBlockTokens + 1;

// Offsets in floats. Rows of values and of the state are padded with zeros to whole vectors of 16.
struct StateBlock {
  explicit StateBlock(const StateShape& shape)
      : padded_dim((shape.value_dim + kVector - 1) / kVector * kVector),
        row_inputs(shape.wkv7 ? 2 * shape.keys() : shape.channels()),
        row_keys((shape.wkv7 ? 2 : 1) * shape.keys()),
        row_writes(shape.key_heads == 0 ? 0 : (shape.wkv7 ? 2 : 1) * int64_t{shape.value_heads} * padded_dim),
        row_decays(shape.key_heads == 0 ? 0 : shape.steps()),
        row_betas(shape.key_heads == 0 || shape.wkv7 ? 0 : shape.value_heads),
        head_state(int64_t{shape.key_dim} * padded_dim),
        inputs(0),
        keys(inputs + kBlockTokens * row_inputs),
        writes(keys + kBlockTokens * row_keys),
        decays(writes + kBlockTokens * row_writes),
        betas(decays + kBlockTokens * row_decays),
        state(betas + kBlockTokens * row_betas),
        floats(state + (shape.key_heads == 0 ? 0 : shape.value_heads * head_state)) {}

  static constexpr int64_t kVector = 16;
  int64_t padded_dim;
  int64_t row_inputs, row_keys, row_writes, row_decays, row_betas;  // floats of a row
  int64_t head_state;                                               // of a head's state
  int64_t inputs;                                                   // [16][channels]: before the convolution
  int64_t keys;    // [16][key_heads][key_dim]: behind it, normed; of wkv7 k, and behind all of them b
  int64_t writes;  // [16][value_heads][padded_dim]: what each token writes into the state at its key; of wkv7
                   // v, and behind all of them u
  int64_t decays;  // [16][steps]: the logarithm of what is left of the block's first state; of wkv7 what is
                   // left of the state before the row
  int64_t betas;   // [16][value_heads]: of the reference
  int64_t state;   // [value_heads][key_dim][padded_dim]: behind the block's last token
  int64_t floats;  // of all
};

}  // namespace millrace
