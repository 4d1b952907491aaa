// Layers with a state over a ragged batch: the gated delta rule and Mamba-2's selective scan, prompts and
// decoding (docs/kernels/state_space.md). A head has a state S [key_dim][value_dim]; of a chunk of 16 tokens,
// with e(i, j) what is left at row i of what row j wrote,
//
//   x_i = v_i - e_i S^T k_i                 the delta rule; else x_i = step_i v_i, and W = X
//   W = T X,  T = (I + B L)^-1 B            L(i, j) = e(i, j) (k_i . k_j) for j < i, B the betas
//   o_i = e_i S^T q_i + sum over j <= i of e(i, j) (q_i . k_j) w_j
//   S'  = e_15 S + sum over j of e(15, j) k_j w_j^T
//
// Chunks lie at fixed positions of a sequence. Row i needs S and of the rows before it k, x, the decay and
// beta; these are what a block of the cache keeps, so that a token decoded alone has the bits that it has in
// a prompt: every sum over dimensions or rows is one chain of tensor core products, in which a row takes no
// part in the others' sums.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

inline constexpr int32_t kStateChunk = 16;       // tokens: a block of the cache
inline constexpr int32_t kMaxStateKeyDim = 256;  // a lane has half of them in registers

// Where the rows of blocks are, in floats from a layer's part of one (base/state_block.h).
struct StatePlaces {
  int64_t inputs = 0, keys = 0, writes = 0, decays = 0, betas = 0, state = 0;
  int64_t row_inputs = 0, row_keys = 0, row_writes = 0, row_decays = 0, head_state = 0;
  int32_t padded_dim = 0;
};

// The pool of a group of such layers and one layer's place in it; without a pool sequences begin with a chunk
// of their own.
struct StatePool {
  float* pool = nullptr;
  int64_t block_floats = 0, layer_offset = 0;
  StatePlaces at = {};
  const int32_t* table_starts = nullptr;  // [sequences]: from `tables`
  const int32_t* tables = nullptr;        // blocks, a negative one: nothing is kept of it
};

// Which rows are whose.
struct StateSequences {
  int32_t count = 0;
  const int32_t* row_starts = nullptr;  // [count + 1]; null: sequence s has row s alone
  const int32_t* positions = nullptr;   // [rows], of a row in its sequence; null: they all begin here
};

struct StateScan {
  // Of row r and key head h at r * stride + h * key_dim.
  const float *q = nullptr, *k = nullptr;
  int64_t q_stride = 0, k_stride = 0;
  const float* v = nullptr;  // of head h at h * value_dim
  int64_t v_stride = 0;
  const float* logs = nullptr;   // [rows][heads]: the logarithms of decays, at most 0; null: `rates`
  const float* rates = nullptr;  // [heads]: times `steps`; null with `logs`: nothing decays
  const float* steps = nullptr;  // [rows][heads]: values count so many times; null: once
  const float* betas = nullptr;  // [rows][heads]; null: 1
  const float* skip = nullptr;   // [heads]: so many times v is added to the output; null: none
  float scale = 1.0f;            // of the queries
  float* out = nullptr;          // [rows][heads][value_dim]
  int32_t key_heads = 0, heads = 0, key_dim = 0, value_dim = 0;
  bool tiled = false;  // head h has the keys of h % key_heads; else of h / (heads / key_heads)
  StateSequences sequences = {};
  // Of sequences without a pool, [sequences][heads][key_dim][value_dim]; null: zeros, not wanted.
  const float* initial = nullptr;
  float* final_state = nullptr;
  StatePool pool = {};
  int32_t most_tokens = 0;  // of a sequence in this step; 0: not known. Bits do not depend on it
};

// Roofline: a chunk of a head has 3 * 16 * key_dim * value_dim multiply-adds of TF32 one after the other
// (2 * without the delta rule), so that few heads are bound by latency, two microseconds a chunk where it was
// measured (docs/kernels/state_space.md); many by memory: q, k, v and out once, in decoding the state, read
// and (once a chunk) written.
void launch_gated_delta(const StateScan& op, const Launch& at);
void launch_selective_scan(const StateScan& op, const Launch& at);

}  // namespace millrace::cuda
