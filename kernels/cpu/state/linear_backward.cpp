#include "kernels/cpu/state/linear_backward.h"

#include <algorithm>
#include <cmath>

namespace millrace::cpu {
namespace {

// A token of one head, as the recurrence has it, and its gradients. Without `erases` there are no a and b.
struct LinearToken {
  double *q, *k, *a, *b, *e;       // [key_dim]
  double *v, *d_out;               // [value_dim]
  double *dq, *dk, *da, *db, *de;  // [key_dim]
  double* dv;                      // [value_dim]
};

struct BackwardScratch {
  BackwardScratch(const LinearBackwardSizes& sizes, Arena& arena)
      : kept(arena.take<double>((sizes.longest / kChunkRows + 1) * state_size(sizes))),
        chunk(arena.take<double>((kChunkRows + 1) * state_size(sizes))),
        d_state(arena.take<double>(state_size(sizes))),
        read(arena.take<double>(2 * int64_t{sizes.value_dim})),
        keys(arena.take<double>(10 * int64_t{sizes.key_dim})),
        values(arena.take<double>(3 * int64_t{sizes.value_dim})) {}
  static int64_t state_size(const LinearBackwardSizes& sizes) {
    return int64_t{sizes.key_dim} * sizes.value_dim;
  }
  LinearToken token(int64_t key_dim, int64_t value_dim) const {
    const auto key = [&](int i) { return keys + i * key_dim; };
    return {key(0),
            key(1),
            key(2),
            key(3),
            key(4),
            values,
            values + value_dim,
            key(5),
            key(6),
            key(7),
            key(8),
            key(9),
            values + 2 * value_dim};
  }
  double *kept, *chunk, *d_state, *read, *keys, *values;
};

// Sums over tokens of one sequence and head that gradients of [heads] are made of.
constexpr int64_t kHeadSums = 2;

size_t backward_scratch_bytes(const LinearBackwardSizes& sizes) {
  Arena count(nullptr);
  const BackwardScratch layout(sizes, count);
  return count.used();
}

size_t head_sums_bytes(const LinearBackwardSizes& sizes) {
  Arena count(nullptr);
  count.take<double>(kHeadSums * sizes.sequences * int64_t{sizes.heads});
  return count.used();
}

// One head of one sequence. Rule: load(token, to) gives a token without its gradients, store(token, from)
// takes these.
template <class Rule>
class LinearBackwardHead {
 public:
  LinearBackwardHead(const LinearBackwardSizes& sizes, const Rule& rule, bool erases,
                     const BackwardScratch& own)
      : keys_(sizes.key_dim), values_(sizes.value_dim), rule_(rule), erases_(erases), own_(own) {}

  void run(int64_t first, int64_t last, const float* initial, const float* d_final, float* d_initial) {
    const int64_t size = keys_ * values_, chunks = (last - first + kChunkRows - 1) / kChunkRows;
    const LinearToken token = own_.token(keys_, values_);
    for (int64_t i = 0; i < size; ++i) {
      own_.kept[i] = initial == nullptr ? 0.0 : initial[i];
      own_.d_state[i] = d_final == nullptr ? 0.0 : d_final[i];
    }
    for (int64_t c = 0; c + 1 < chunks; ++c) {
      double* state = own_.kept + (c + 1) * size;
      std::copy_n(own_.kept + c * size, size, state);
      for (int64_t t = first + c * kChunkRows; t < first + (c + 1) * kChunkRows; ++t) {
        rule_.load(t, token);
        advance(token, state, state);
      }
    }
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const int64_t begin = first + c * kChunkRows, rows = std::min<int64_t>(kChunkRows, last - begin);
      std::copy_n(own_.kept + c * size, size, own_.chunk);
      for (int64_t i = 0; i < rows; ++i) {
        rule_.load(begin + i, token);
        advance(token, own_.chunk + i * size, own_.chunk + (i + 1) * size);
      }
      for (int64_t i = rows - 1; i >= 0; --i) {
        rule_.load(begin + i, token);
        back(token, own_.chunk + i * size, own_.chunk + (i + 1) * size);
        rule_.store(begin + i, token);
      }
    }
    for (int64_t i = 0; d_initial != nullptr && i < size; ++i)
      d_initial[i] = static_cast<float>(own_.d_state[i]);
  }

 private:
  // u = S^T a
  double* read(const LinearToken& token, const double* state) const {
    std::fill_n(own_.read, values_, 0.0);
    for (int64_t d = 0; erases_ && d < keys_; ++d) {
      for (int64_t j = 0; j < values_; ++j) own_.read[j] += token.a[d] * state[d * values_ + j];
    }
    return own_.read;
  }

  void advance(const LinearToken& token, const double* state, double* to) const {
    const double* u = read(token, state);
    for (int64_t d = 0; d < keys_; ++d) {
      const double b = erases_ ? token.b[d] : 0.0;
      for (int64_t j = 0; j < values_; ++j)
        to[d * values_ + j] = token.e[d] * state[d * values_ + j] + b * u[j] + token.k[d] * token.v[j];
    }
  }

  void back(const LinearToken& token, const double* before, const double* behind) const {
    double *d_state = own_.d_state, *du = own_.read + values_;
    const double* u = read(token, before);
    std::fill_n(token.dv, values_, 0.0);
    std::fill_n(du, values_, 0.0);
    for (int64_t d = 0; d < keys_; ++d) {
      double dq = 0.0, dk = 0.0, db = 0.0, de = 0.0;
      const double b = erases_ ? token.b[d] : 0.0;
      double* row = d_state + d * values_;
      for (int64_t j = 0; j < values_; ++j) {
        dq += behind[d * values_ + j] * token.d_out[j];
        row[j] += token.q[d] * token.d_out[j];
        dk += row[j] * token.v[j];
        db += row[j] * u[j];
        de += row[j] * before[d * values_ + j];
        token.dv[j] += token.k[d] * row[j];
        du[j] += b * row[j];
      }
      token.dq[d] = dq;
      token.dk[d] = dk;
      token.db[d] = db;
      token.de[d] = de;
    }
    for (int64_t d = 0; d < keys_; ++d) {
      double da = 0.0;
      const double a = erases_ ? token.a[d] : 0.0;
      for (int64_t j = 0; j < values_; ++j) {
        da += before[d * values_ + j] * du[j];
        d_state[d * values_ + j] = token.e[d] * d_state[d * values_ + j] + a * du[j];
      }
      token.da[d] = da;
    }
  }

  const int64_t keys_, values_;
  const Rule& rule_;
  const bool erases_;
  const BackwardScratch& own_;
};

// to = from, or, of heads that share a key behind the first, to += from.
void put(float* to, double from, bool add) {
  if (to != nullptr) *to = static_cast<float>(add ? *to + from : from);
}

struct GatedDeltaRule {
  const mr_gated_delta_backward_args& op;
  int32_t head;
  int64_t key_at(int64_t token) const {
    const mr_gated_delta_args& f = op.forward;
    return (token * f.key_heads + head / (f.value_heads / f.key_heads)) * f.key_dim;
  }
  int64_t at(int64_t token) const { return token * op.forward.value_heads + head; }
  double beta_of(int64_t token) const {
    return op.forward.beta == nullptr ? 1.0 : op.forward.beta[at(token)];
  }

  void load(int64_t t, const LinearToken& to) const {
    const mr_gated_delta_args& f = op.forward;
    const double beta = beta_of(t), decay = f.g == nullptr ? 1.0 : std::exp(double{f.g[at(t)]});
    for (int32_t d = 0; d < f.key_dim; ++d) {
      const double k = f.k[key_at(t) + d];
      to.q[d] = double{f.scale} * f.q[key_at(t) + d];
      to.k[d] = k;
      to.a[d] = decay * k;
      to.b[d] = -beta * k;
      to.e[d] = decay;
    }
    for (int32_t j = 0; j < f.value_dim; ++j) {
      to.v[j] = beta * f.v[at(t) * f.value_dim + j];
      to.d_out[j] = op.d_out[at(t) * f.value_dim + j];
    }
  }
  void store(int64_t t, const LinearToken& from) const {
    const mr_gated_delta_args& f = op.forward;
    const bool add = head % (f.value_heads / f.key_heads) != 0;
    const double beta = beta_of(t), decay = from.e[0];
    double d_decay = 0.0, d_beta = 0.0;
    for (int32_t d = 0; d < f.key_dim; ++d) {
      const double k = from.k[d];
      put(op.dq == nullptr ? nullptr : op.dq + key_at(t) + d, f.scale * from.dq[d], add);
      put(op.dk == nullptr ? nullptr : op.dk + key_at(t) + d,
          from.dk[d] + decay * from.da[d] - beta * from.db[d], add);
      d_decay += from.de[d] + k * from.da[d];
      d_beta -= k * from.db[d];
    }
    for (int32_t j = 0; j < f.value_dim; ++j) {
      put(op.dv == nullptr ? nullptr : op.dv + at(t) * f.value_dim + j, beta * from.dv[j], false);
      d_beta += from.dv[j] * f.v[at(t) * f.value_dim + j];
    }
    if (op.dg != nullptr) op.dg[at(t)] = static_cast<float>(decay * d_decay);
    if (op.dbeta != nullptr) op.dbeta[at(t)] = static_cast<float>(d_beta);
  }
};

struct SelectiveScanRule {
  const mr_selective_scan_backward_args& op;
  int32_t head;
  double* sums;  // [kHeadSums]: da and dd
  int64_t key_at(int64_t token) const {
    const mr_selective_scan_args& f = op.forward;
    return (token * f.groups + head / (f.heads / f.groups)) * f.state_dim;
  }
  int64_t at(int64_t token) const { return token * op.forward.heads + head; }

  void load(int64_t t, const LinearToken& to) const {
    const mr_selective_scan_args& f = op.forward;
    const double dt = f.dt[at(t)], decay = std::exp(dt * f.a[head]);
    for (int32_t d = 0; d < f.state_dim; ++d) {
      to.q[d] = f.c[key_at(t) + d];
      to.k[d] = f.b[key_at(t) + d];
      to.e[d] = decay;
    }
    for (int32_t j = 0; j < f.head_dim; ++j) {
      to.v[j] = dt * f.x[at(t) * f.head_dim + j];
      to.d_out[j] = op.d_out[at(t) * f.head_dim + j];
    }
  }
  void store(int64_t t, const LinearToken& from) const {
    const mr_selective_scan_args& f = op.forward;
    const bool add = head % (f.heads / f.groups) != 0;
    const double dt = f.dt[at(t)], skip = f.d == nullptr ? 0.0 : f.d[head];
    double d_decay = 0.0, d_dt = 0.0;
    for (int32_t d = 0; d < f.state_dim; ++d) {
      put(op.dc == nullptr ? nullptr : op.dc + key_at(t) + d, from.dq[d], add);
      put(op.db == nullptr ? nullptr : op.db + key_at(t) + d, from.dk[d], add);
      d_decay += from.de[d];
    }
    for (int32_t j = 0; j < f.head_dim; ++j) {
      const double x = f.x[at(t) * f.head_dim + j];
      put(op.dx == nullptr ? nullptr : op.dx + at(t) * f.head_dim + j, dt * from.dv[j] + skip * from.d_out[j],
          false);
      d_dt += x * from.dv[j];
      sums[1] += x * from.d_out[j];
    }
    const double d_log = from.e[0] * d_decay;
    if (op.ddt != nullptr) op.ddt[at(t)] = static_cast<float>(d_dt + d_log * f.a[head]);
    sums[0] += d_log * dt;
  }
};

struct Wkv7Rule {
  const mr_wkv7_backward_args& op;
  int32_t head;
  int64_t at(int64_t token) const { return token * op.forward.heads + head; }

  void load(int64_t t, const LinearToken& to) const {
    const mr_wkv7_args& f = op.forward;
    for (int32_t d = 0; d < f.key_dim; ++d) {
      const int64_t i = at(t) * f.key_dim + d;
      to.q[d] = double{f.scale} * f.r[i];
      to.k[d] = f.k[i];
      to.a[d] = f.a[i];
      to.b[d] = f.b[i];
      to.e[d] = std::exp(double{f.w[i]});
    }
    for (int32_t j = 0; j < f.value_dim; ++j) {
      to.v[j] = f.v[at(t) * f.value_dim + j];
      to.d_out[j] = op.d_out[at(t) * f.value_dim + j];
    }
  }
  void store(int64_t t, const LinearToken& from) const {
    const mr_wkv7_args& f = op.forward;
    for (int32_t d = 0; d < f.key_dim; ++d) {
      const int64_t i = at(t) * f.key_dim + d;
      const auto write = [&](float* to, double value) {
        put(to == nullptr ? nullptr : to + i, value, false);
      };
      write(op.dr, f.scale * from.dq[d]);
      write(op.dw, from.e[d] * from.de[d]);
      write(op.dk, from.dk[d]);
      write(op.da, from.da[d]);
      write(op.db, from.db[d]);
    }
    for (int32_t j = 0; j < f.value_dim; ++j)
      put(op.dv == nullptr ? nullptr : op.dv + at(t) * f.value_dim + j, from.dv[j], false);
  }
};

template <class Args>
int64_t longest_of(const Args& forward) {
  int64_t longest = 0;
  for (int32_t s = 0; s < forward.sequences; ++s)
    longest = std::max<int64_t>(longest, forward.cu_seqlens[s + 1] - forward.cu_seqlens[s]);
  return longest;
}

// Heads of one key follow one another in one task, so that sums over them have one order.
template <class Args, class MakeRule>
void linear_backward(const Context& ctx, const LinearBackwardSizes& sizes, int32_t shared, const Args& op,
                     bool erases, uint8_t* workspace, const MakeRule& rule_of) {
  const size_t each = backward_scratch_bytes(sizes);
  const int64_t tasks = int64_t{sizes.sequences} * (sizes.heads / shared);
  const int64_t state_size = BackwardScratch::state_size(sizes);
  ctx.pool.parallel_for(tasks, 1, [&](int64_t begin, int64_t end, int thread) {
    Arena arena(workspace + static_cast<size_t>(thread) * each);
    const BackwardScratch own(sizes, arena);
    for (int64_t first = begin * shared; first < end * shared; ++first) {
      const auto s = static_cast<int32_t>(first / sizes.heads), h = static_cast<int32_t>(first % sizes.heads);
      const int64_t state = first * state_size;
      const auto rule = rule_of(s, h);
      const auto shifted = [&](auto* of) { return of == nullptr ? of : of + state; };
      LinearBackwardHead(sizes, rule, erases, own)
          .run(op.forward.cu_seqlens[s], op.forward.cu_seqlens[s + 1], shifted(op.forward.initial_state),
               shifted(op.d_final_state), shifted(op.d_initial_state));
    }
  });
}

}  // namespace

size_t linear_backward_workspace_bytes(const LinearBackwardSizes& sizes, int threads) {
  return head_sums_bytes(sizes) + backward_scratch_bytes(sizes) * static_cast<size_t>(threads);
}

void gated_delta_backward(const Context& ctx, const mr_gated_delta_backward_args& op, void* workspace) {
  const mr_gated_delta_args& f = op.forward;
  linear_backward(ctx, {f.sequences, f.value_heads, f.key_dim, f.value_dim, longest_of(f)},
                  f.value_heads / f.key_heads, op, true, static_cast<uint8_t*>(workspace),
                  [&](int32_t, int32_t head) {
                    return GatedDeltaRule{op, head};
                  });
}

void selective_scan_backward(const Context& ctx, const mr_selective_scan_backward_args& op, void* workspace) {
  const mr_selective_scan_args& f = op.forward;
  const LinearBackwardSizes sizes{f.sequences, f.heads, f.state_dim, f.head_dim, longest_of(f)};
  auto* bytes = static_cast<uint8_t*>(workspace);
  Arena arena(bytes);
  const int64_t heads = f.heads;
  double* sums = arena.take<double>(kHeadSums * sizes.sequences * heads);
  std::fill_n(sums, kHeadSums * sizes.sequences * heads, 0.0);
  linear_backward(ctx, sizes, f.heads / f.groups, op, false, bytes + head_sums_bytes(sizes),
                  [&](int32_t sequence, int32_t head) {
                    return SelectiveScanRule{op, head, sums + kHeadSums * (sequence * heads + head)};
                  });
  for (int64_t h = 0; h < heads; ++h) {
    double da = 0.0, dd = 0.0;
    for (int64_t s = 0; s < sizes.sequences; ++s) {
      da += sums[kHeadSums * (s * heads + h)];
      dd += sums[kHeadSums * (s * heads + h) + 1];
    }
    put(op.da == nullptr ? nullptr : op.da + h, da, false);
    put(op.dd == nullptr ? nullptr : op.dd + h, dd, false);
  }
}

void wkv7_backward(const Context& ctx, const mr_wkv7_backward_args& op, void* workspace) {
  const mr_wkv7_args& f = op.forward;
  linear_backward(ctx, {f.sequences, f.heads, f.key_dim, f.value_dim, longest_of(f)}, 1, op, true,
                  static_cast<uint8_t*>(workspace), [&](int32_t, int32_t head) {
                    return Wkv7Rule{op, head};
                  });
}

}  // namespace millrace::cpu
