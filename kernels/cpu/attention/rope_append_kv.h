// Rotary position embedding of queries and keys, and appending keys and values to the paged cache: one loop
// over the rows of a batch.
#pragma once

#include "kernels/cpu/attention/paged_kv.h"
#include "kernels/cpu/attention/rotary.h"
#include "kernels/cpu/context.h"

namespace millrace::cpu {

struct RopeAppendKv {
  int64_t rows;
  int32_t heads, kv_heads, head_dim;
  const int32_t *positions, *sequence_of;  // [rows]
  const float *cosines, *sines;            // [rows][half]
  int64_t half;                            // 0: nothing is rotated
  bool interleaved;
  const float* query_scale;  // [rows]: multiplies the rotated queries; absent: they stay
  float* query;              // [rows][heads][head_dim], rotated in place
  float* key;                // [rows][kv_heads][head_dim], rotated in place
  const float* value;        // [rows][kv_heads][head_dim]; absent: the keys are the values
  // The rotated queries as an int8 cache reads them, [rows][heads * head_dim / 32]; absent: not wanted.
  ActivationBlock* query_blocks;
  PagedKv kv;
  bool appends = true;  // false: queries alone are rotated, nothing is stored
};

void rope_append_kv(const Context& ctx, const RopeAppendKv& op);

}  // namespace millrace::cpu
