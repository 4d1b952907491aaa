#include "kernels/cpu/state/time_mix.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kGatesPerTask = 4096;
constexpr float kDecayRate = -0.60653066f;  // -exp(-0.5): no decay is below exp of it
constexpr double kLeastLength = 1e-12;      // that a key is divided by

// body(piece) for each, over all threads.
template <class Body>
void for_each_piece(const Context& ctx, const ShiftedRows& op, StatePiece* pieces, const Body& body) {
  const int64_t count = list_pieces(op, pieces);
  ctx.pool.parallel_for(count, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p) body(pieces[p]);
  });
}

void sigmoid_row(const KernelTable& kernels, float* x, int64_t size) {
  for (int64_t i = 0; i < size; ++i) x[i] = -x[i];
  kernels.exp(x, size, x);
  for (int64_t i = 0; i < size; ++i) x[i] = 1.0f / (1.0f + x[i]);
}

class TimeMixer {
 public:
  TimeMixer(const Context& ctx, const TimeMixRows& op, const TimeMixWorkspace& work)
      : ctx_(ctx), op_(op), work_(work), s_(op.of.shape), at_(op.of.shape) {}

  void run() {
    ctx_.pool.parallel_for(op_.of.rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) gates(row);
    });
    num_pieces_ = list_pieces(op_.of, work_.pieces);
    ctx_.pool.parallel_for(num_pieces_, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t p = begin; p < end; ++p) keep_piece(work_.pieces[p]);
    });
    scan_pieces(ctx_, op_.of, work_.pieces, num_pieces_,
                [&](const StatePiece& piece, int32_t head, const float* state, int thread) {
                  return scan_piece(piece, head, state, work_.threads[thread]);
                });
  }

 private:
  float* row_of(float* of, int64_t row) const { return of + row * s_.keys(); }

  // decay, k and v as the state takes them; rate becomes b and mixed becomes a.
  void gates(int64_t row) const {
    const int64_t size = s_.keys();
    float *k = row_of(work_.k, row), *v = row_of(work_.v, row), *first = row_of(work_.first_values, row);
    float *decay = row_of(work_.decay, row), *rate = row_of(work_.rate, row);
    float* mixed = row_of(work_.mixed, row);
    sigmoid_row(ctx_.kernels, decay, size);
    for (int64_t i = 0; i < size; ++i) decay[i] *= kDecayRate;
    ctx_.kernels.exp(decay, size, decay);
    sigmoid_row(ctx_.kernels, rate, size);
    if (op_.first) {
      std::copy_n(v, size, first);
    } else {
      sigmoid_row(ctx_.kernels, mixed, size);
      for (int64_t i = 0; i < size; ++i) v[i] += (first[i] - v[i]) * mixed[i];
    }
    for (int64_t h = 0; h < size; h += s_.key_dim) {
      double squares = 0.0;
      for (int64_t i = h; i < h + s_.key_dim; ++i) {
        mixed[i] = k[i] * op_.k_k[i];
        squares += static_cast<double>(mixed[i]) * mixed[i];
      }
      const auto by = static_cast<float>(1.0 / std::max(std::sqrt(squares), kLeastLength));
      for (int64_t i = h; i < h + s_.key_dim; ++i) {
        const float key = mixed[i] * by;
        k[i] *= 1.0f + (rate[i] - 1.0f) * op_.k_a[i];
        mixed[i] = -key;
        rate[i] *= key;
      }
    }
  }

  // What later steps read of a piece's rows.
  void keep_piece(const StatePiece& piece) const {
    float* block = block_of(op_.of, piece.sequence, piece.position);
    if (block == nullptr) return;
    const int32_t first = piece.position % kBlockTokens;
    for (int32_t r = 0; r < piece.rows; ++r) {
      const int64_t row = piece.row + r;
      float* keys = block + at_.keys + (first + r) * at_.row_keys;
      std::copy_n(row_of(work_.k, row), s_.keys(), keys);
      std::copy_n(row_of(work_.rate, row), s_.keys(), keys + s_.keys());
      std::copy_n(row_of(work_.decay, row), s_.keys(), block + at_.decays + (first + r) * at_.row_decays);
    }
  }

  const float* scan_piece(const StatePiece& piece, int32_t head, const float* state,
                          const TimeMixWorkspace::Thread& own) const {
    const int32_t first = piece.position % kBlockTokens, last = first + piece.rows;
    const int64_t key_at = int64_t{head} * s_.key_dim, all_values = s_.value_heads * at_.padded_dim;
    float* block = block_of(op_.of, piece.sequence, piece.position);
    MILLRACE_CHECK(block != nullptr || first == 0);
    Wkv7Chunk c{};
    c.key_dim = s_.key_dim;
    c.padded_dim = static_cast<int32_t>(at_.padded_dim);
    c.first = first;
    c.last = last;
    c.state = state;
    if (last == kBlockTokens)
      c.state_out = block == nullptr ? own.state : block + at_.state + head * at_.head_state;
    c.scratch = own.scratch;
    for (int32_t i = 0; i < last; ++i) {
      const int64_t row = piece.row + i - first;
      const bool known = i < first;
      const float* keys = known ? block + at_.keys + i * at_.row_keys : nullptr;
      c.k[i] = (known ? keys : row_of(work_.k, row)) + key_at;
      c.b[i] = (known ? keys + s_.keys() : row_of(work_.rate, row)) + key_at;
      c.decay[i] = (known ? block + at_.decays + i * at_.row_decays : row_of(work_.decay, row)) + key_at;
      float* writes =
          block == nullptr ? nullptr : block + at_.writes + i * at_.row_writes + head * at_.padded_dim;
      float* v = block == nullptr ? own.values + i * at_.padded_dim : writes;
      c.v[i] = v;
      c.u[i] = block == nullptr ? own.written + i * at_.padded_dim : writes + all_values;
      if (known) continue;
      std::copy_n(row_of(work_.v, row) + int64_t{head} * s_.value_dim, s_.value_dim, v);
      std::fill(v + s_.value_dim, v + at_.padded_dim, 0.0f);
      c.r[i] = row_of(work_.r, row) + key_at;
      c.a[i] = row_of(work_.mixed, row) + key_at;
      c.o[i] = own.outputs + i * at_.padded_dim;
    }
    ctx_.kernels.wkv7_chunk(c);
    for (int32_t i = first; i < last; ++i) finish_row(c.o[i], piece.row + i - first, head);
    return c.state_out;
  }

  void finish_row(float* o, int64_t row, int32_t head) const {
    const int64_t at = int64_t{head} * s_.value_dim;
    const float *r = row_of(work_.r, row) + at, *k = row_of(work_.k, row) + at;
    const float *v = row_of(work_.v, row) + at, *gate = row_of(work_.gate, row) + at;
    float* y = op_.out + row * s_.values() + at;
    ctx_.kernels.layer_norm(o, op_.norm + at, op_.norm_bias + at, op_.norm_eps, s_.value_dim, o);
    double own = 0.0;
    for (int32_t i = 0; i < s_.key_dim; ++i) own += static_cast<double>(r[i]) * k[i] * op_.r_k[at + i];
    const auto by = static_cast<float>(own);
    for (int32_t i = 0; i < s_.value_dim; ++i) y[i] = (o[i] + by * v[i]) * gate[i];
  }

  const Context& ctx_;
  const TimeMixRows& op_;
  const TimeMixWorkspace& work_;
  const StateShape& s_;
  const StateBlock at_;
  int64_t num_pieces_ = 0;
};

}  // namespace

TimeMixWorkspace::TimeMixWorkspace(const StateShape& shape, int64_t tokens, int num_threads, Arena& arena) {
  if (!shape.wkv7) return;
  const StateBlock at(shape);
  for (float** rows : {&normed, &r, &k, &v, &decay, &rate, &mixed, &gate, &first_values})
    *rows = arena.take<float>(tokens * shape.keys());
  low = arena.take<float>(tokens * shape.projected);
  pieces = arena.take<StatePiece>(tokens);
  threads = arena.take<Thread>(num_threads);
  for (int t = 0; t < num_threads; ++t) {
    const auto rows = [&](int64_t count) { return arena.take<float>(count * at.padded_dim); };
    const Thread own{rows(shape.key_dim), rows(kBlockTokens), rows(kBlockTokens), rows(kBlockTokens),
                     arena.take<float>(wkv7_scratch_floats(shape.key_dim))};
    if (threads != nullptr) threads[t] = own;
  }
}

void keep_shifted(const Context& ctx, const ShiftedRows& op, ShiftPlace place, const float* x,
                  const TimeMixWorkspace& work) {
  const StateBlock at(op.shape);
  const int64_t size = op.shape.keys();
  for_each_piece(ctx, op, work.pieces, [&](const StatePiece& piece) {
    float* block = block_of(op, piece.sequence, piece.position);
    if (block == nullptr) return;
    for (int32_t r = 0; r < piece.rows; ++r) {
      std::copy_n(x + (piece.row + r) * size, size,
                  block + at.inputs + (piece.position % kBlockTokens + r) * at.row_inputs +
                      static_cast<int64_t>(place) * size);
    }
  });
}

void token_shift(const Context& ctx, const ShiftedRows& op, ShiftPlace place, const float* x, const float* by,
                 float* to, const TimeMixWorkspace& work) {
  const StateBlock at(op.shape);
  const int64_t size = op.shape.keys();
  for_each_piece(ctx, op, work.pieces, [&](const StatePiece& piece) {
    const AttentionSequence& s = op.sequences[piece.sequence];
    const float* before = nullptr;
    if (piece.position > s.context_len) {
      before = x + (piece.row - 1) * size;
    } else if (piece.position > 0) {
      const float* block = block_of(op, piece.sequence, piece.position - 1);
      MILLRACE_CHECK(block != nullptr);
      before = block + at.inputs + (piece.position - 1) % kBlockTokens * at.row_inputs +
               static_cast<int64_t>(place) * size;
    }
    for (int32_t r = 0; r < piece.rows; ++r) {
      const float* now = x + (piece.row + r) * size;
      float* y = to + (piece.row + r) * size;
      for (int64_t i = 0; i < size; ++i)
        y[i] = now[i] + ((before == nullptr ? 0.0f : before[i]) - now[i]) * by[i];
      before = now;
    }
  });
}

void tanh_all(const Context& ctx, float* x, int64_t size) {
  ctx.pool.parallel_for(tasks_for(size, kGatesPerTask), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin * kGatesPerTask; i < std::min(size, end * kGatesPerTask); ++i)
      x[i] = static_cast<float>(std::tanh(static_cast<double>(x[i])));
  });
}

void sigmoid_all(const Context& ctx, float* x, int64_t size) {
  ctx.pool.parallel_for(tasks_for(size, kGatesPerTask), 1, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kGatesPerTask;
    sigmoid_row(ctx.kernels, x + first, std::min(size, end * kGatesPerTask) - first);
  });
}

void time_mix(const Context& ctx, const TimeMixRows& op, const TimeMixWorkspace& work) {
  if (op.of.rows > 0) TimeMixer(ctx, op, work).run();
}

}  // namespace millrace::cpu
