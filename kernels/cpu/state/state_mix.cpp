#include "kernels/cpu/state/state_mix.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace millrace::cpu {
namespace {

using Kind = StateMixRows::Kind;

constexpr int64_t kChannelsPerTask = 512;
constexpr double kLengthEps = 1e-6;  // of queries and keys that are normed

double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

class StateMixer {
 public:
  StateMixer(const Context& ctx, const StateMixRows& op, const StateWorkspace& work)
      : ctx_(ctx), op_(op), work_(work), s_(op.shape), at_(op.shape) {}

  void run() {
    num_pieces_ = list_pieces(op_, work_.pieces);
    convolve();
    if (op_.kind == Kind::kConvolution) return gate_convolved();
    prepare();
    scan();
    if (op_.kind == Kind::kSelectiveScan) gate_and_norm();
  }

 private:
  float* block_of(int32_t sequence, int32_t position) const { return cpu::block_of(op_, sequence, position); }

  const float* mix_row(int64_t row) const { return op_.mix + row * s_.mix_cols(); }
  float* convolved_row(int64_t row) const { return work_.convolved + row * s_.channels(); }

  // The input of the convolution at a position, of this step or before it.
  const float* input_at(const StatePiece& piece, int32_t position) const {
    const AttentionSequence& s = op_.sequences[piece.sequence];
    if (position < 0) return nullptr;
    if (position >= s.context_len) return mix_row(s.first_row + position - s.context_len);
    const float* block = block_of(piece.sequence, position);
    MILLRACE_CHECK(block != nullptr);
    return block + at_.inputs + position % kBlockTokens * at_.row_inputs;
  }

  // What is read of the pool was written before this step, what is written belongs to it: no thread waits.
  void convolve() {
    const int64_t strips = tasks_for(s_.channels(), kChannelsPerTask);
    ctx_.pool.parallel_for(num_pieces_ * strips, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t task = begin; task < end; ++task) {
        const StatePiece& piece = work_.pieces[task / strips];
        const int64_t first = task % strips * kChannelsPerTask;
        convolve_piece(piece, first, std::min(first + kChannelsPerTask, s_.channels()));
      }
    });
  }

  void convolve_piece(const StatePiece& piece, int64_t first, int64_t last) const {
    const float* x[kBlockTokens + kMaxTaps];
    for (int32_t i = 0; i < piece.rows + s_.taps - 1; ++i)
      x[i] = input_at(piece, piece.position - s_.taps + 1 + i);
    // Channels [begin, end) with weights of their own.
    const auto part = [&](const float* weight, int64_t begin, int64_t end) {
      if (std::max(first, begin) >= std::min(last, end)) return;
      ctx_.kernels.short_conv({s_.channels(), piece.rows, s_.taps, x, weight - begin * s_.taps, op_.conv_bias,
                               op_.conv_silu, convolved_row(piece.row), s_.channels()},
                              std::max(first, begin), std::min(last, end));
    };
    if (op_.conv_keys == nullptr) {
      part(op_.conv, 0, s_.channels());
    } else {
      part(op_.conv, 0, s_.keys());
      part(op_.conv_keys, s_.keys(), 2 * s_.keys());
      part(op_.conv_values, 2 * s_.keys(), s_.channels());
    }
    float* block = block_of(piece.sequence, piece.position);
    if (block == nullptr) return;
    for (int32_t r = 0; r < piece.rows; ++r) {
      float* to = block + at_.inputs + (piece.position % kBlockTokens + r) * at_.row_inputs;
      std::copy(mix_row(piece.row + r) + first, mix_row(piece.row + r) + last, to + first);
    }
  }

  void gate_convolved() {
    ctx_.pool.parallel_for(op_.rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        ctx_.kernels.multiply(mix_row(row) + s_.gate_at(), convolved_row(row), s_.values(),
                              op_.out + row * s_.values());
      }
    });
  }

  // Keys, queries and gates of each row, and those that later steps read into the pool.
  void prepare() {
    ctx_.pool.parallel_for(num_pieces_, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t p = begin; p < end; ++p) prepare_piece(work_.pieces[p]);
    });
  }

  void prepare_piece(const StatePiece& piece) const {
    const int32_t first = piece.position % kBlockTokens;
    float* block = block_of(piece.sequence, piece.position);
    MILLRACE_CHECK(block != nullptr || first == 0);
    const float* before = first == 0 ? nullptr : block + at_.decays + (first - 1) * at_.row_decays;
    for (int32_t r = 0; r < piece.rows; ++r) {
      float* x = convolved_row(piece.row + r);
      if (op_.kind == Kind::kGatedDelta) norm_keys(x);
      float* decays = work_.decays + (piece.row + r) * s_.steps();
      gates(piece.row + r, before, decays);
      before = decays;
      if (block == nullptr) continue;
      std::copy_n(x + s_.key_at(), s_.keys(), block + at_.keys + (first + r) * at_.row_keys);
      std::copy_n(decays, s_.steps(), block + at_.decays + (first + r) * at_.row_decays);
    }
  }

  void norm_keys(float* x) const {
    // rms_norm divides by sqrt(mean + eps), so that a norm to length 1 / sqrt(dim) is one of eps / dim.
    const auto eps = static_cast<float>(kLengthEps / s_.key_dim);
    const float by = 1.0f / std::sqrt(static_cast<float>(s_.key_dim));
    for (int32_t h = 0; h < 2 * s_.key_heads; ++h) {
      const bool query = h < s_.key_heads;
      float* head = x + (query ? s_.query_at() + int64_t{h} * s_.key_dim
                               : s_.key_at() + int64_t{h - s_.key_heads} * s_.key_dim);
      ctx_.kernels.rms_norm(head, nullptr, eps, s_.key_dim, head);
      const float scale = query ? by * by : by;
      for (int32_t i = 0; i < s_.key_dim; ++i) head[i] *= scale;
    }
  }

  // decays: logarithms, added up from the block's first row on.
  void gates(int64_t row, const float* before, float* decays) const {
    const float *step = mix_row(row) + s_.step_at(), *beta = mix_row(row) + s_.beta_at();
    float* betas = work_.betas + row * s_.value_heads;
    ctx_.kernels.softplus(step, op_.step_bias, s_.steps(), decays);
    if (op_.kind == Kind::kSelectiveScan) {
      for (int32_t h = 0; h < s_.value_heads; ++h)
        betas[h] = decays[h] = std::clamp(decays[h], op_.step_min, op_.step_max);
    } else {
      for (int32_t h = 0; h < s_.value_heads; ++h) betas[h] = static_cast<float>(logistic(beta[h]));
    }
    const int32_t of_head = s_.channel_decay ? s_.key_dim : 1;
    for (int32_t h = 0; h < s_.value_heads; ++h) {
      for (int64_t i = int64_t{h} * of_head; i < (h + 1) * int64_t{of_head}; ++i)
        decays[i] = (before == nullptr ? 0.0f : before[i]) + op_.a[h] * decays[i];
    }
  }

  void scan() {
    scan_pieces(ctx_, op_, work_.pieces, num_pieces_,
                [&](const StatePiece& piece, int32_t head, const float* state, int thread) {
                  return scan_piece(piece, head, state, work_.threads[thread]);
                });
  }

  const float* scan_piece(const StatePiece& piece, int32_t head, const float* state,
                          const StateWorkspace::Thread& own) const {
    const int32_t first = piece.position % kBlockTokens, last = first + piece.rows;
    const int64_t key_at = s_.key_head(head) * int64_t{s_.key_dim};
    float* block = block_of(piece.sequence, piece.position);
    StateChunk chunk;
    chunk.key_dim = s_.key_dim;
    chunk.padded_dim = static_cast<int32_t>(at_.padded_dim);
    chunk.first = first;
    chunk.last = last;
    chunk.delta = op_.kind == Kind::kGatedDelta;
    chunk.state = state;
    chunk.state_out = nullptr;
    if (last == kBlockTokens)
      chunk.state_out = block == nullptr ? own.state : block + at_.state + head * at_.head_state;
    chunk.scratch = own.scratch;
    chunk.logs[0] = nullptr;
    for (int32_t i = 0; i < last; ++i) {
      const int64_t row = piece.row + i - first;
      const bool known = i < first;
      float* x = known ? nullptr : convolved_row(row);
      chunk.k[i] = known ? block + at_.keys + i * at_.row_keys + key_at : x + s_.key_at() + key_at;
      chunk.w[i] = block == nullptr ? own.writes + i * at_.padded_dim
                                    : block + at_.writes + i * at_.row_writes + head * at_.padded_dim;
      const float* decays = known ? block + at_.decays + i * at_.row_decays : work_.decays + row * s_.steps();
      if (s_.channel_decay) chunk.logs[i] = decays + int64_t{head} * s_.key_dim;
      chunk.log[i] = s_.channel_decay ? 0.0f : decays[head];
      if (known) continue;
      chunk.q[i] = x + s_.query_at() + key_at;
      chunk.v[i] = value_row(x, row, head, own.values + i * at_.padded_dim);
      chunk.o[i] = own.outputs + i * at_.padded_dim;
      chunk.beta[i] = work_.betas[row * s_.value_heads + head];
    }
    std::fill(chunk.log + last, chunk.log + kBlockTokens, chunk.log[last - 1]);
    ctx_.kernels.state_chunk(chunk);
    for (int32_t i = first; i < last; ++i) finish_row(chunk.o[i], piece.row + i - first, head);
    return chunk.state_out;
  }

  const float* value_row(const float* x, int64_t row, int32_t head, float* to) const {
    const float* v = x + s_.value_at() + int64_t{head} * s_.value_dim;
    const float by = op_.kind == Kind::kSelectiveScan ? work_.betas[row * s_.value_heads + head] : 1.0f;
    for (int32_t i = 0; i < s_.value_dim; ++i) to[i] = v[i] * by;
    std::fill(to + s_.value_dim, to + at_.padded_dim, 0.0f);
    return to;
  }

  void finish_row(float* o, int64_t row, int32_t head) const {
    float* y = op_.out + row * s_.values() + int64_t{head} * s_.value_dim;
    const float* v = convolved_row(row) + s_.value_at() + int64_t{head} * s_.value_dim;
    if (op_.d != nullptr) ctx_.kernels.scale_add(o, 1.0f, v, op_.d[head], s_.value_dim);
    if (op_.kind == Kind::kSelectiveScan) {
      std::copy_n(o, s_.value_dim, y);
      return;
    }
    if (op_.norm != nullptr) ctx_.kernels.rms_norm(o, op_.norm, op_.norm_eps, s_.value_dim, o);
    const float* gate = mix_row(row) + s_.gate_at() + int64_t{head} * s_.value_dim;
    if (!op_.gate_sigmoid) return ctx_.kernels.silu_mul(gate, o, s_.value_dim, y);
    for (int32_t i = 0; i < s_.value_dim; ++i) y[i] = -gate[i];
    ctx_.kernels.exp(y, s_.value_dim, y);
    for (int32_t i = 0; i < s_.value_dim; ++i) y[i] = o[i] / (1.0f + y[i]);
  }

  // Of Mamba-2: a norm goes over several heads.
  void gate_and_norm() {
    ctx_.pool.parallel_for(op_.rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        float* y = op_.out + row * s_.values();
        const float* gate = mix_row(row) + s_.gate_at();
        if (!op_.norm_before_gate) ctx_.kernels.silu_mul(gate, y, s_.values(), y);
        for (int64_t c = 0; op_.norm != nullptr && c < s_.values(); c += op_.norm_size)
          ctx_.kernels.rms_norm(y + c, op_.norm + c, op_.norm_eps, op_.norm_size, y + c);
        if (op_.norm_before_gate) ctx_.kernels.silu_mul(gate, y, s_.values(), y);
      }
    });
  }

  const Context& ctx_;
  const StateMixRows& op_;
  const StateWorkspace& work_;
  const StateShape& s_;
  const StateBlock at_;
  int64_t num_pieces_ = 0;
};

}  // namespace

StateWorkspace::StateWorkspace(const StateShape& shape, int64_t tokens, int num_threads, Arena& arena) {
  if (!shape.present() || shape.wkv7) return;
  const StateBlock at(shape);
  convolved = arena.take<float>(tokens * shape.channels());
  decays = arena.take<float>(tokens * shape.steps());
  betas = arena.take<float>(tokens * shape.value_heads);
  pieces = arena.take<StatePiece>(tokens);
  threads = arena.take<Thread>(num_threads);
  for (int t = 0; t < num_threads; ++t) {
    const auto rows = [&](int64_t count) { return arena.take<float>(count * at.padded_dim); };
    const Thread own{rows(shape.key_dim), rows(kBlockTokens), rows(kBlockTokens), rows(kBlockTokens),
                     arena.take<float>(state_scratch_floats(shape.key_dim, shape.channel_decay))};
    if (threads != nullptr) threads[t] = own;
  }
}

void state_mix(const Context& ctx, const StateMixRows& op, const StateWorkspace& work) {
  if (op.rows > 0) StateMixer(ctx, op, work).run();
}

}  // namespace millrace::cpu
