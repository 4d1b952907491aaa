#include "kernels/cpu/attention/rope_append_kv.h"

namespace millrace::cpu {
namespace {

// Floats that one thread rotates and stores in less time than it takes to share them out.
constexpr int64_t kOfOneThread = 2048;

}  // namespace

void rope_append_kv(const Context& ctx, const RopeAppendKv& op) {
  // Of a small batch a task is one KV head of a token, with the query heads that read it.
  const bool small_batch = op.rows <= kSmallBatchRows;
  const int64_t pieces = small_batch ? op.kv_heads : 1, kv_heads = op.kv_heads / pieces, dim = op.head_dim;
  const int64_t group_size = op.heads / op.kv_heads, half = op.half;
  const bool little = op.rows * (op.heads + 2 * op.kv_heads) * dim <= kOfOneThread;
  const int64_t per_task = little ? op.rows * pieces : small_batch ? 1 : 4;
  ctx.pool.parallel_for(op.rows * pieces, per_task, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / pieces, first = task % pieces * kv_heads, last = first + kv_heads;
      float* key = op.key + row * op.kv_heads * dim;
      const float* value = op.value == nullptr ? nullptr : op.value + row * op.kv_heads * dim;
      const int64_t first_query = (row * op.heads + first * group_size) * dim;
      const int64_t queries = kv_heads * group_size * dim;
      if (half > 0) {
        const float *c = op.cosines + row * half, *s = op.sines + row * half;
        float* query = op.query + first_query;
        for (int64_t at = 0; at < queries; at += dim) rotate(query + at, c, s, half, op.interleaved);
        for (int64_t h = first; op.appends && h < last; ++h)
          rotate(key + h * dim, c, s, half, op.interleaved);
      }
      if (op.query_scale != nullptr) {
        float* query = op.query + first_query;
        for (int64_t i = 0; i < queries; ++i) query[i] *= op.query_scale[row];
      }
      if (op.query_blocks != nullptr) {
        ctx.kernels.quantize_int8(op.query + first_query, queries,
                                  op.query_blocks + first_query / kQuantBlock);
      }
      for (int64_t h = first; op.appends && h < last; ++h) {
        store_kv(op.kv, op.sequence_of[row], op.positions[row], h, dim, key + h * dim,
                 value == nullptr ? nullptr : value + h * dim);
      }
    }
  });
}

}  // namespace millrace::cpu
