#include "kernels/cpu/state/wkv7.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

int64_t whole_vectors(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// One thread's own.
struct Wkv7Scratch {
  Wkv7Scratch(int64_t keys, int64_t padded, Arena& arena)
      : state(arena.take<float>(keys * padded)),
        r(arena.take<float>(kChunkRows * keys)),
        decay(arena.take<float>(kChunkRows * keys)),
        values(arena.take<float>(kChunkRows * padded)),
        written(arena.take<float>(kChunkRows * padded)),
        outputs(arena.take<float>(kChunkRows * padded)),
        scratch(arena.take<float>(wkv7_scratch_floats(keys))) {}
  float *state, *r, *decay, *values, *written, *outputs, *scratch;
};

size_t wkv7_scratch_bytes(int32_t key_dim, int32_t value_dim) {
  Arena count(nullptr);
  const Wkv7Scratch layout(key_dim, whole_vectors(value_dim), count);
  return count.used();
}

class Wkv7Head {
 public:
  Wkv7Head(const Context& ctx, const mr_wkv7_args& op, int32_t sequence, int32_t head, const Wkv7Scratch& own)
      : ctx_(ctx), op_(op), head_(head), own_(own), padded_(whole_vectors(op.value_dim)) {
    first_ = op.cu_seqlens[sequence];
    last_ = op.cu_seqlens[sequence + 1];
    state_at_ = (int64_t{sequence} * op.heads + head) * op.key_dim * int64_t{op.value_dim};
  }

  void run() {
    bool known = op_.initial_state != nullptr;
    for (int64_t d = 0; d < op_.key_dim; ++d) {
      float* row = own_.state + d * padded_;
      std::fill_n(row, padded_, 0.0f);
      if (known) std::copy_n(op_.initial_state + state_at_ + d * op_.value_dim, op_.value_dim, row);
    }
    for (int64_t t = first_; t < last_; t += kChunkRows) {
      chunk(t, static_cast<int32_t>(std::min<int64_t>(kChunkRows, last_ - t)), known,
            t + kChunkRows < last_ || op_.final_state != nullptr);
      known = true;
    }
    for (int64_t d = 0; op_.final_state != nullptr && d < op_.key_dim; ++d)
      std::copy_n(own_.state + d * padded_, op_.value_dim, op_.final_state + state_at_ + d * op_.value_dim);
  }

 private:
  void chunk(int64_t first, int32_t rows, bool known, bool state_wanted) const {
    Wkv7Chunk c{};
    c.key_dim = op_.key_dim;
    c.padded_dim = static_cast<int32_t>(padded_);
    c.last = rows;
    c.state = known ? own_.state : nullptr;
    c.state_out = state_wanted ? own_.state : nullptr;
    c.scratch = own_.scratch;
    for (int32_t i = 0; i < rows; ++i) {
      const int64_t key = ((first + i) * op_.heads + head_) * op_.key_dim;
      const int64_t value = ((first + i) * op_.heads + head_) * op_.value_dim;
      float *r = own_.r + i * int64_t{op_.key_dim}, *decay = own_.decay + i * int64_t{op_.key_dim};
      float* v = own_.values + i * padded_;
      for (int32_t d = 0; d < op_.key_dim; ++d) r[d] = op_.r[key + d] * op_.scale;
      ctx_.kernels.exp(op_.w + key, op_.key_dim, decay);
      std::copy_n(op_.v + value, op_.value_dim, v);
      std::fill(v + op_.value_dim, v + padded_, 0.0f);
      c.r[i] = r;
      c.decay[i] = decay;
      c.a[i] = op_.a + key;
      c.b[i] = op_.b + key;
      c.k[i] = op_.k + key;
      c.v[i] = v;
      c.u[i] = own_.written + i * padded_;
      c.o[i] = own_.outputs + i * padded_;
    }
    ctx_.kernels.wkv7_chunk(c);
    for (int32_t i = 0; i < rows; ++i)
      std::copy_n(c.o[i], op_.value_dim, op_.out + ((first + i) * op_.heads + head_) * op_.value_dim);
  }

  const Context& ctx_;
  const mr_wkv7_args& op_;
  int32_t head_;
  const Wkv7Scratch& own_;
  int64_t padded_, first_ = 0, last_ = 0, state_at_ = 0;
};

}  // namespace

size_t wkv7_workspace_bytes(int32_t key_dim, int32_t value_dim, int threads) {
  return wkv7_scratch_bytes(key_dim, value_dim) * static_cast<size_t>(threads);
}

void wkv7(const Context& ctx, const mr_wkv7_args& op, void* workspace) {
  const size_t each = wkv7_scratch_bytes(op.key_dim, op.value_dim);
  ctx.pool.parallel_for(int64_t{op.sequences} * op.heads, 1, [&](int64_t begin, int64_t end, int thread) {
    Arena arena(static_cast<uint8_t*>(workspace) + static_cast<size_t>(thread) * each);
    const Wkv7Scratch own(op.key_dim, whole_vectors(op.value_dim), arena);
    for (int64_t task = begin; task < end; ++task)
      Wkv7Head(ctx, op, static_cast<int32_t>(task / op.heads), static_cast<int32_t>(task % op.heads), own)
          .run();
  });
}

}  // namespace millrace::cpu
