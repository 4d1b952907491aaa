#include "kernels/cpu/state/linear_attention.h"

#include <algorithm>
#include <cmath>

#include "base/state_block.h"

namespace millrace::cpu {
namespace {

// What both rules are to the kernel: queries, keys, values and logarithms of decays.
struct LinearAttention {
  const float *q, *k, *v;
  const float* steps;    // [tokens][heads]: values count so many times; null: once
  const float* logs;     // [tokens][heads]; null: `rates`
  const float* rates;    // [heads]: times `steps`; null with `logs`: nothing decays
  const float* beta;     // [tokens][heads]; null: 1
  const float* skip;     // [heads]: so many times v is added; null: none
  const float* initial;  // [sequences][heads][key_dim][value_dim]; null: zeros
  float* final_state;
  const int32_t* cu_seqlens;
  float* out;
  int32_t sequences, key_heads, heads, key_dim, value_dim;
  float scale;
  bool delta;
};

// One thread's own.
struct LinearScratch {
  LinearScratch(int64_t keys, int64_t padded, Arena& arena)
      : state(arena.take<float>(keys * padded)),
        queries(arena.take<float>(kChunkRows * keys)),
        zeros(arena.take<float>(std::max(keys, padded))),
        values(arena.take<float>(kChunkRows * padded)),
        writes(arena.take<float>(kChunkRows * padded)),
        outputs(arena.take<float>(kChunkRows * padded)),
        scratch(arena.take<float>(state_scratch_floats(keys, false))) {}
  float *state, *queries, *zeros, *values, *writes, *outputs, *scratch;
};

int64_t padded_dim_of(int32_t value_dim) { return (value_dim + kLanes - 1) / kLanes * kLanes; }

size_t scratch_bytes_of(int32_t key_dim, int32_t value_dim) {
  Arena count(nullptr);
  const LinearScratch layout(key_dim, padded_dim_of(value_dim), count);
  return count.used();
}

class LinearAttentionHead {
 public:
  LinearAttentionHead(const Context& ctx, const LinearAttention& op, int32_t sequence, int32_t head,
                      const LinearScratch& own)
      : ctx_(ctx),
        op_(op),
        sequence_(sequence),
        head_(head),
        own_(own),
        padded_(padded_dim_of(op.value_dim)) {}

  void run() {
    const int64_t first = op_.cu_seqlens[sequence_], last = op_.cu_seqlens[sequence_ + 1];
    std::fill_n(own_.zeros, std::max<int64_t>(op_.key_dim, padded_), 0.0f);
    const bool begins = load_state();
    bool known = begins;
    for (int64_t t = first; t < last; t += kChunkRows) {
      chunk(t, static_cast<int32_t>(std::min<int64_t>(kChunkRows, last - t)), known,
            t + kChunkRows < last || op_.final_state != nullptr);
      known = true;
    }
    if (op_.final_state != nullptr) store_state(known);
  }

 private:
  int64_t state_at() const {
    return (int64_t{sequence_} * op_.heads + head_) * op_.key_dim * int64_t{op_.value_dim};
  }
  bool load_state() {
    if (op_.initial == nullptr) return false;
    for (int64_t d = 0; d < op_.key_dim; ++d) {
      float* row = own_.state + d * padded_;
      std::copy_n(op_.initial + state_at() + d * op_.value_dim, op_.value_dim, row);
      std::fill(row + op_.value_dim, row + padded_, 0.0f);
    }
    return true;
  }
  void store_state(bool known) {
    for (int64_t d = 0; d < op_.key_dim; ++d) {
      const float* row = known ? own_.state + d * padded_ : own_.zeros;
      std::copy_n(row, op_.value_dim, op_.final_state + state_at() + d * op_.value_dim);
    }
  }

  float log_at(int64_t token) const {
    if (op_.logs != nullptr) return op_.logs[token * op_.heads + head_];
    return op_.rates == nullptr ? 0.0f : op_.rates[head_] * op_.steps[token * op_.heads + head_];
  }

  void row(StateChunk& c, int32_t i, int64_t token) {
    const int64_t key = (token * op_.key_heads + head_ / (op_.heads / op_.key_heads)) * op_.key_dim;
    const int64_t at = (token * op_.heads + head_) * op_.value_dim;
    float *q = own_.queries + i * int64_t{op_.key_dim}, *v = own_.values + i * padded_;
    for (int32_t d = 0; d < op_.key_dim; ++d) q[d] = op_.q[key + d] * op_.scale;
    const float by = op_.steps == nullptr ? 1.0f : op_.steps[token * op_.heads + head_];
    for (int32_t d = 0; d < op_.value_dim; ++d) v[d] = op_.v[at + d] * by;
    std::fill(v + op_.value_dim, v + padded_, 0.0f);
    c.q[i] = q;
    c.k[i] = op_.k + key;
    c.v[i] = v;
    c.w[i] = own_.writes + i * padded_;
    c.o[i] = own_.outputs + i * padded_;
    c.beta[i] = op_.beta == nullptr ? 1.0f : op_.beta[token * op_.heads + head_];
  }

  void chunk(int64_t first, int32_t rows, bool known, bool state_wanted) {
    StateChunk c{};
    c.key_dim = op_.key_dim;
    c.padded_dim = static_cast<int32_t>(padded_);
    c.last = rows;
    c.delta = op_.delta;
    c.state = known ? own_.state : nullptr;
    c.state_out = state_wanted ? own_.state : nullptr;
    c.scratch = own_.scratch;
    for (int32_t i = 0; i < rows; ++i) {
      row(c, i, first + i);
      c.log[i] = (i == 0 ? 0.0f : c.log[i - 1]) + log_at(first + i);
    }
    // Rows behind the last write nothing and decay by nothing.
    for (int32_t i = rows; i < kChunkRows; ++i) {
      c.k[i] = own_.zeros;
      c.w[i] = own_.zeros;
      c.log[i] = c.log[rows - 1];
    }
    ctx_.kernels.state_chunk(c);
    for (int32_t i = 0; i < rows; ++i) {
      const int64_t at = ((first + i) * op_.heads + head_) * op_.value_dim;
      if (op_.skip != nullptr)
        ctx_.kernels.scale_add(c.o[i], 1.0f, op_.v + at, op_.skip[head_], op_.value_dim);
      std::copy_n(c.o[i], op_.value_dim, op_.out + at);
    }
  }

  const Context& ctx_;
  const LinearAttention& op_;
  int32_t sequence_, head_;
  const LinearScratch& own_;
  int64_t padded_;
};

void linear_attention(const Context& ctx, const LinearAttention& op, void* workspace) {
  const size_t each = scratch_bytes_of(op.key_dim, op.value_dim);
  ctx.pool.parallel_for(int64_t{op.sequences} * op.heads, 1, [&](int64_t begin, int64_t end, int thread) {
    Arena arena(static_cast<uint8_t*>(workspace) + static_cast<size_t>(thread) * each);
    const LinearScratch own(op.key_dim, padded_dim_of(op.value_dim), arena);
    for (int64_t task = begin; task < end; ++task) {
      LinearAttentionHead(ctx, op, static_cast<int32_t>(task / op.heads),
                          static_cast<int32_t>(task % op.heads), own)
          .run();
    }
  });
}

}  // namespace

size_t linear_attention_workspace_bytes(int32_t key_dim, int32_t value_dim, int threads) {
  return scratch_bytes_of(key_dim, value_dim) * static_cast<size_t>(threads);
}

void gated_delta(const Context& ctx, const mr_gated_delta_args& a, void* workspace) {
  linear_attention(
      ctx,
      {a.q, a.k, a.v, nullptr, a.g, nullptr, a.beta, nullptr, a.initial_state, a.final_state, a.cu_seqlens,
       a.out, a.sequences, a.key_heads, a.value_heads, a.key_dim, a.value_dim, a.scale, true},
      workspace);
}

void selective_scan(const Context& ctx, const mr_selective_scan_args& a, void* workspace) {
  linear_attention(
      ctx,
      {a.c, a.b, a.x, a.dt, nullptr, a.a, nullptr, a.d, a.initial_state, a.final_state, a.cu_seqlens, a.out,
       a.sequences, a.groups, a.heads, a.state_dim, a.head_dim, 1.0f, false},
      workspace);
}

void short_conv(const Context& ctx, const mr_short_conv_args& a) {
  constexpr int64_t kChannels = 512;  // of a task
  const int64_t strips = (a.channels + kChannels - 1) / kChannels;
  const int64_t before = a.taps - 1;
  ctx.pool.parallel_for(a.sequences * strips, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t s = task / strips, first = task % strips * kChannels;
      const int64_t last = std::min(first + kChannels, a.channels);
      const int64_t from = a.cu_seqlens[s], to = a.cu_seqlens[s + 1];
      // Row `row` of the sequence; before the first, of the initial rows.
      const auto at = [&](int64_t row) -> const float* {
        if (row >= 0) return a.x + (from + row) * a.channels;
        return a.initial_rows == nullptr ? nullptr
                                         : a.initial_rows + (s * before + before + row) * a.channels;
      };
      for (int64_t r = 0; r < to - from; r += kChunkRows) {
        const int64_t rows = std::min<int64_t>(kChunkRows, to - from - r);
        const float* x[kChunkRows + kMaxTaps];
        for (int64_t i = 0; i < rows + before; ++i) x[i] = at(r - before + i);
        ctx.kernels.short_conv({a.channels, rows, a.taps, x, a.weight, a.bias, a.silu != 0,
                                a.out + (from + r) * a.channels, a.channels},
                               first, last);
      }
      for (int64_t i = 0; a.final_rows != nullptr && i < before; ++i) {
        const float* row = at(to - from - before + i);
        float* out = a.final_rows + (s * before + i) * a.channels;
        for (int64_t c = first; c < last; ++c) out[c] = row == nullptr ? 0.0f : row[c];
      }
    }
  });
}

}  // namespace millrace::cpu
