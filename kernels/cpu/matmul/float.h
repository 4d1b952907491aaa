// Matrix products of float weights (F32, F16, BF16) with float32 activations by the 16-lane rule, and the
// small operations around them. Included inside the anonymous namespace of every table.
#pragma once

using V16 = Simd::V16;

struct LoadF32 {
  using Stored = float;
  static V16 load(const float* p) { return Simd::load(p); }
};
struct LoadF16 {
  using Stored = uint16_t;
  static V16 load(const uint16_t* p) { return Simd::load_f16(p); }
};
struct LoadBF16 {
  using Stored = uint16_t;
  static V16 load(const uint16_t* p) { return Simd::load_bf16(p); }
};

// The last `count` < 16 elements, zeros behind.
template <class Load>
V16 load_tail(const typename Load::Stored* p, int64_t count) {
  typename Load::Stored padded[kLanes] = {};
  __builtin_memcpy(padded, p, static_cast<size_t>(count) * sizeof(typename Load::Stored));
  return Load::load(padded);
}

template <class Load, int kR, int kM>
void float_tile(const MatrixView& w, int64_t row, const Panel& x, int64_t m0, float* out,
                int64_t out_stride) {
  using Stored = typename Load::Stored;
  const Stored* weights[kR];
  const float* xs[kM];
  V16 acc[kR][kM];
  unroll<kR>([&](auto r) {
    weights[r] = reinterpret_cast<const Stored*>(w.data + (row + r) * w.row_bytes);
    unroll<kM>([&](auto m) { acc[r][m] = Simd::zero(); });
  });
  unroll<kM>([&](auto m) { xs[m] = reinterpret_cast<const float*>(panel_row(x, m0 + m)); });
  int64_t c = 0;
  for (; c + kLanes <= w.cols; c += kLanes) {
    V16 a[kM];
    unroll<kM>([&](auto m) { a[m] = Simd::load(xs[m] + c); });
    unroll<kR>([&](auto r) {
      const V16 b = Load::load(weights[r] + c);
      unroll<kM>([&](auto m) { acc[r][m] = Simd::fma(b, a[m], acc[r][m]); });
    });
  }
  if (c < w.cols) {
    unroll<kR>([&](auto r) {
      const V16 b = load_tail<Load>(weights[r] + c, w.cols - c);
      unroll<kM>(
          [&](auto m) { acc[r][m] = Simd::fma(b, load_tail<LoadF32>(xs[m] + c, w.cols - c), acc[r][m]); });
    });
  }
  unroll<kR>([&](auto r) { unroll<kM>([&](auto m) { out[m * out_stride + r] = Simd::sum(acc[r][m]); }); });
}

template <class Load, int kR, int kM>
int64_t float_rows(const MatrixView& w, int64_t first, int64_t r, int64_t num_rows, const Panel& x, int64_t m,
                   float* out, int64_t out_stride) {
  for (; r + kR <= num_rows; r += kR) {
    float_tile<Load, kR, kM>(w, first + r, x, m, out + m * out_stride + r, out_stride);
  }
  return r;
}

template <class Load, int kR, int kM>
void float_pass(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t m, float* out,
                int64_t out_stride) {
  const int64_t r = float_rows<Load, kR, kM>(w, first, 0, num_rows, x, m, out, out_stride);
  float_rows<Load, 1, kM>(w, first, r, num_rows, x, m, out, out_stride);
}

// Tiles as large as the registers hold, then four rows by two and by one.
template <class Load>
void float_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                  float* out, int64_t out_stride) {
  constexpr int kR = Simd::kFloatTileRows, kM = Simd::kFloatTileM;
  int64_t m = 0;
  for (; m + kM <= num_m; m += kM) float_pass<Load, kR, kM>(w, first, num_rows, x, m, out, out_stride);
  if constexpr (kM > 2) {
    for (; m + 2 <= num_m; m += 2) float_pass<Load, 4, 2>(w, first, num_rows, x, m, out, out_stride);
  }
  for (; m < num_m; ++m) float_pass<Load, 4, 1>(w, first, num_rows, x, m, out, out_stride);
}

// exp to 1.5 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree 6 in r, n into the exponent.
// Below -86 it is 0, above 88 it stays at exp(88).
struct ExpParts {
  V16 p, shifted;  // exp(r), and n in the last bits
};
struct Constant {
  alignas(16) float lanes[4];
};
constexpr Constant constant(float x) { return {{x, x, x, x}}; }
struct ExpConstants {
  float log2_e = 1.44269504f, minus_ln2_high = -0.693359375f, minus_ln2_low = 2.12194440e-4f,
        sixth = 1.3888889e-3f;
  Constant magic = constant(12582912.0f);  // 1.5 * 2^23: the sum's last bit is worth 1
  Constant fifth = constant(8.3333333e-3f), fourth = constant(4.16666667e-2f),
           third = constant(1.66666667e-1f), half = constant(0.5f), one = constant(1.0f);
};
inline constexpr ExpConstants kExp;
// x * y + a constant. On ARM a sum takes the place of its addend: it comes from memory every time, for a copy
// of a register would take a vector unit.
template <class S = Simd>
[[gnu::always_inline]] inline V16 fma_constant(V16 x, V16 y, const Constant& z) {
  if constexpr (requires { S::fma_constant(x, y, z.lanes); }) {
    return S::fma_constant(x, y, z.lanes);
  } else {
    return Simd::fma(x, y, Simd::broadcast(z.lanes[0]));
  }
}
[[gnu::always_inline]] inline ExpParts exp_parts(V16 bounded) {
  const V16 shifted = fma_constant(bounded, Simd::broadcast(kExp.log2_e), kExp.magic);
  const V16 n = Simd::sub(shifted, Simd::broadcast(kExp.magic.lanes[0]));
  V16 r = Simd::fma(n, Simd::broadcast(kExp.minus_ln2_high), bounded);
  r = Simd::fma(n, Simd::broadcast(kExp.minus_ln2_low), r);
  V16 p = fma_constant(Simd::broadcast(kExp.sixth), r, kExp.fifth);
  p = fma_constant(p, r, kExp.fourth);
  p = fma_constant(p, r, kExp.third);
  p = fma_constant(p, r, kExp.half);
  p = fma_constant(p, r, kExp.one);
  p = fma_constant(p, r, kExp.one);
  return {p, shifted};
}
inline V16 exp16(V16 x) {
  const V16 low = Simd::broadcast(-86.0f);
  const auto [p, shifted] = exp_parts(Simd::min(Simd::max(x, low), Simd::broadcast(88.0f)));
  return Simd::select_less(x, low, Simd::zero(), Simd::add_exponent(p, shifted));
}

// The same of numbers that are not above zero.
struct FullExp {
  [[gnu::always_inline]] static ExpParts parts(V16 bounded) { return exp_parts(bounded); }
};
template <class Exp = FullExp>
[[gnu::always_inline]] inline V16 exp16_below(V16 x) {
  const V16 low = Simd::broadcast(-86.0f);
  const auto [p, shifted] = Exp::parts(Simd::max(x, low));
  return Simd::select_less(x, low, Simd::zero(), Simd::add_exponent(p, shifted));
}

inline V16 sigmoid16(V16 x) {
  const V16 one = Simd::broadcast(1.0f);
  return Simd::div(one, Simd::add(one, exp16(Simd::sub(Simd::zero(), x))));
}

// y[i] = op(a[i], b[i]), 16 at a time.
template <class Op>
void each16(const float* a, const float* b, int64_t size, float* y, Op op) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) Simd::store(y + i, op(Simd::load(a + i), Simd::load(b + i)));
  if (i < size) {
    float last[kLanes];
    Simd::store(last, op(load_tail<LoadF32>(a + i, size - i), load_tail<LoadF32>(b + i, size - i)));
    __builtin_memcpy(y + i, last, static_cast<size_t>(size - i) * sizeof(float));
  }
}

void silu_mul(const float* gate, const float* up, int64_t size, float* y) {
  each16(gate, up, size, y, [](V16 g, V16 u) { return Simd::mul(Simd::mul(g, sigmoid16(g)), u); });
}

void clamped_swiglu(const float* gate, const float* up, float alpha, float limit, int64_t size, float* y) {
  const V16 high = Simd::broadcast(limit), low = Simd::broadcast(-limit), one = Simd::broadcast(1.0f);
  const V16 a = Simd::broadcast(alpha);
  each16(gate, up, size, y, [&](V16 g, V16 u) {
    g = Simd::min(g, high);
    u = Simd::min(Simd::max(u, low), high);
    return Simd::mul(Simd::mul(g, sigmoid16(Simd::mul(a, g))), Simd::add(u, one));
  });
}

void scale_add(float* y, float a, const float* x, float b, int64_t size) {
  const V16 by_a = Simd::broadcast(a), by_b = Simd::broadcast(b);
  each16(y, x, size, y, [&](V16 to, V16 from) { return Simd::fma(from, by_b, Simd::mul(to, by_a)); });
}

void exp_all(const float* x, int64_t size, float* y) {
  each16(x, x, size, y, [](V16 v, V16) { return exp16(v); });
}

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  V16 squares = Simd::zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const V16 v = Simd::load(x + i);
    squares = Simd::fma(v, v, squares);
  }
  if (i < size) {
    const V16 v = load_tail<LoadF32>(x + i, size - i);
    squares = Simd::fma(v, v, squares);
  }
  const float mean = Simd::sum(squares) / static_cast<float>(size);
  const V16 scale = Simd::broadcast(1.0f / __builtin_sqrtf(mean + eps));
  each16(x, weight, size, y, [&](V16 v, V16 w) { return Simd::mul(Simd::mul(v, scale), w); });
}

void quantize(const float* x, int64_t cols, ActivationBlock* out) {
  for (int64_t b = 0; b < cols / kQuantBlock; ++b, x += kQuantBlock) {
    const V16 lo = Simd::load(x), hi = Simd::load(x + kLanes);
    const float most = Simd::largest(Simd::max(Simd::abs(lo), Simd::abs(hi)));
    // Below 1e-36 the inverse overflows, and below 3e-36 half the scale is subnormal, which would make
    // (d / 2) * scale and d * (scale / 2) different: such a block is zero.
    const bool zero = most < 1e-35f;
    const V16 inverse = Simd::broadcast(zero ? 0.0f : 127.0f / most);
    out[b].scale = zero ? 0.0f : most / 127.0f;
    const int32_t first = Simd::round_to_int8(Simd::mul(lo, inverse), out[b].q);
    out[b].sum = first + Simd::round_to_int8(Simd::mul(hi, inverse), out[b].q + kLanes);
  }
}
