// mr_gemm on every instruction set of this machine, against sums in double.
#include <cstring>

#include "base/float_bits.h"
#include "kernels/api/api_test_support.h"

namespace millrace::api_test {
namespace {

struct Stored {  // a matrix as it lies, and what it means
  std::vector<uint8_t> bytes;
  std::vector<double> values;  // [rows][cols]
  int64_t stride;
};

size_t gemm_bytes(mr_dtype type) { return type == MR_F32 ? 4 : type == MR_F16 || type == MR_BF16 ? 2 : 1; }

double put(mr_dtype type, float x, uint8_t* to) {
  if (type == MR_F32) return std::memcpy(to, &x, 4), x;
  if (type == MR_BF16) {
    const BFloat16 v = to_bfloat16(x);
    return std::memcpy(to, &v, 2), to_float(v);
  }
  if (type == MR_F16) {
    const Half v = to_half(x);
    return std::memcpy(to, &v, 2), to_float(v);
  }
  const auto code = static_cast<uint8_t>(static_cast<int>(x * 1000.0f));
  if (type == MR_I8) return *to = code, static_cast<int8_t>(code);
  if (type == MR_F8_E5M2) {  // the upper byte of a float16; no NaN, nothing beyond 2^8
    *to = static_cast<uint8_t>(code & 0xdfu);
    return to_float(Half{static_cast<uint16_t>(*to << 8)});
  }
  *to = static_cast<uint8_t>(code & 0xdfu);  // no NaN
  return to_float(Fp8E4M3{*to});
}
double get(mr_dtype type, const uint8_t* from) {
  if (type == MR_F32) {
    float x;
    return std::memcpy(&x, from, 4), x;
  }
  if (type == MR_F8_E4M3) return to_float(Fp8E4M3{*from});
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return type == MR_BF16 ? to_float(BFloat16{bits}) : to_float(Half{bits});
}

Stored random_stored(std::mt19937& random, mr_dtype type, int64_t rows, int64_t cols, int64_t gap) {
  Stored m{{}, {}, cols + gap};
  m.bytes.resize(static_cast<size_t>(rows * m.stride) * gemm_bytes(type) + 8);
  m.values.resize(static_cast<size_t>(rows * cols));
  const std::vector<float> x = random_floats(random, rows * cols);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const auto at = static_cast<size_t>(i / cols * m.stride + i % cols);
    m.values[static_cast<size_t>(i)] =
        put(type, x[static_cast<size_t>(i)], m.bytes.data() + at * gemm_bytes(type));
  }
  return m;
}

struct Case {
  mr_dtype type, out;
  int64_t m, n, k;
  int transpose_a, transpose_b;
  mr_gemm_activation activation = MR_GEMM_NONE;
  bool bias = false, residual = false;
};

double activate(double x, mr_gemm_activation activation) {
  if (activation == MR_GEMM_GELU) return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
  if (activation == MR_GEMM_GELU_TANH)
    return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  return activation == MR_GEMM_SILU ? x / (1 + std::exp(-x)) : x;
}
constexpr float kGateAlpha = 1.702f, kGateLimit = 0.4f;
double activate_gate(double gate, double up, mr_gemm_activation activation) {
  if (activation == MR_GEMM_SWIGLU) return activate(gate, MR_GEMM_SILU) * up;
  const double g = std::min<double>(gate, kGateLimit), u = std::clamp<double>(up, -kGateLimit, kGateLimit);
  return g / (1 + std::exp(-kGateAlpha * g)) * (u + 1);
}
bool is_gated(mr_gemm_activation activation) { return activation >= MR_GEMM_SWIGLU; }

mr_status call(mr_device* device, const mr_gemm_args& args) {
  size_t bytes = 0;
  if (const mr_status status = mr_gemm_workspace_bytes(device, &args, &bytes); status != MR_OK) return status;
  const Guarded workspace(bytes);
  std::memset(workspace.data(), 0xff, bytes);
  return mr_gemm(device, &args, workspace.data(), bytes, nullptr);
}

// The largest error over the largest value; outputs lie between poison, which must stay.
double error_of(mr_device* device, const Case& c, std::vector<uint8_t>* bits = nullptr) {
  std::mt19937 random(static_cast<uint32_t>(c.m * 31 + c.n * 7 + c.k));
  const Stored a = random_stored(random, c.type, c.transpose_a ? c.k : c.m, c.transpose_a ? c.m : c.k, 3);
  const Stored b = random_stored(random, c.type, c.transpose_b ? c.n : c.k, c.transpose_b ? c.k : c.n, 1);
  const int64_t outputs = is_gated(c.activation) ? c.n / 2 : c.n;
  const Stored residual = random_stored(random, c.out, c.m, outputs, 5);
  const std::vector<float> bias = random_floats(random, c.n);
  const int64_t blocks = (c.k + 127) / 128, ldc = outputs + 2;
  std::vector<float> a_scales = random_floats(random, c.type == MR_I8 ? c.m : c.m * blocks),
                     b_scales = random_floats(random, c.type == MR_I8 ? c.n : (c.n + 127) / 128 * blocks);
  const bool scaled = c.type == MR_I8 || c.type == MR_F8_E4M3;
  std::vector<uint8_t> out(static_cast<size_t>(c.m * ldc) * gemm_bytes(c.out), 0xff);
  mr_gemm_args args{};
  args.type = c.type, args.out_type = c.out;
  args.m = c.m, args.n = c.n, args.k = c.k;
  args.a = a.bytes.data(), args.lda = a.stride, args.transpose_a = c.transpose_a;
  args.b = b.bytes.data(), args.ldb = b.stride, args.transpose_b = c.transpose_b;
  args.c = out.data(), args.ldc = ldc;
  args.alpha = 0.25f;
  args.activation = c.activation;
  if (c.activation == MR_GEMM_CLAMPED_SWIGLU) args.gate_alpha = kGateAlpha, args.gate_limit = kGateLimit;
  const int64_t scales = (outputs + 127) / 128;
  std::vector<float> c_scales(static_cast<size_t>(c.m * (scales + 1)), -1.0f);
  if (c.out == MR_F8_E4M3) args.c_scales = c_scales.data(), args.c_scale_stride = scales + 1;
  if (scaled) args.a_scales = a_scales.data(), args.b_scales = b_scales.data();
  if (c.bias) args.bias = bias.data();
  if (c.residual) args.residual = residual.bytes.data(), args.residual_stride = residual.stride;
  EXPECT_EQ(call(device, args), MR_OK) << mr_last_error();
  const auto value = [&](int64_t r, int64_t j) {
    double sum = 0;
    for (int64_t k = 0; k < c.k; ++k) {
      double product = a.values[static_cast<size_t>(c.transpose_a ? k * c.m + r : r * c.k + k)] *
                       b.values[static_cast<size_t>(c.transpose_b ? j * c.k + k : k * c.n + j)];
      if (c.type == MR_F8_E4M3) {
        product *= static_cast<double>(a_scales[static_cast<size_t>(r * blocks + k / 128)]) *
                   b_scales[static_cast<size_t>(j / 128 * blocks + k / 128)];
      }
      sum += product;
    }
    if (c.type == MR_I8)
      sum *= static_cast<double>(a_scales[static_cast<size_t>(r)]) * b_scales[static_cast<size_t>(j)];
    return 0.25 * sum + (c.bias ? bias[static_cast<size_t>(j)] : 0.0f);
  };
  double error = 0, largest = 1e-30;
  for (int64_t r = 0; r < c.m; ++r) {
    std::vector<double> most(static_cast<size_t>(scales));
    for (int64_t j = 0; j < ldc; ++j) {
      const uint8_t* at = out.data() + static_cast<size_t>(r * ldc + j) * gemm_bytes(c.out);
      if (j >= outputs) {
        EXPECT_EQ(*at, 0xff) << "between rows";
        continue;
      }
      double expected = is_gated(c.activation)
                            ? activate_gate(value(r, j), value(r, j + outputs), c.activation)
                            : activate(value(r, j), c.activation);
      if (c.residual) expected += residual.values[static_cast<size_t>(r * outputs + j)];
      double found = get(c.out, at);
      if (c.out == MR_F8_E4M3) {
        found *= c_scales[static_cast<size_t>(r * (scales + 1) + j / 128)];
        double& block = most[static_cast<size_t>(j / 128)];
        block = std::max(block, std::abs(expected));
      }
      error = std::max(error, std::abs(found - expected));
      largest = std::max(largest, std::abs(expected));
    }
    if (c.out != MR_F8_E4M3) continue;
    const float* row = c_scales.data() + r * (scales + 1);
    for (int64_t s = 0; s < scales; ++s) {
      EXPECT_NEAR(row[s] * 448, most[static_cast<size_t>(s)], 1e-5 * largest);
    }
    EXPECT_EQ(row[scales], -1.0f) << "between rows of scales";
  }
  if (bits != nullptr) *bits = out;
  return error / largest;
}

double allowed(mr_dtype out) {
  return out == MR_F32 ? 3e-6 : out == MR_F16 ? 1e-3 : out == MR_BF16 ? 8e-3 : 0.04;
}

TEST(Gemm, EveryTypeLayoutAndShape) {
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    for (const mr_dtype type : {MR_F32, MR_F16, MR_BF16, MR_F8_E4M3, MR_I8}) {
      for (const auto& [m, n, k] : {std::tuple{1, 1, 1},
                                    {7, 13, 31},
                                    {65, 67, 129},
                                    {3, 130, 300},
                                    {260, 33, 17},
                                    {20, 270, 530},
                                    {4, 5, 0},
                                    {0, 3, 2}}) {
        for (int layout = 0; layout < 4; ++layout) {
          const Case c{type, m % 2 ? MR_F32 : MR_BF16, m, n, k, layout / 2, layout % 2};
          EXPECT_LE(error_of(device.get(), c), allowed(c.out))
              << isa << " " << mr_dtype_name(type) << " " << m << " x " << n << " x " << k << " layout "
              << layout;
        }
      }
    }
  }
}

TEST(Gemm, Epilogues) {
  const DevicePtr device = open_cpu();
  for (const mr_gemm_activation activation : {MR_GEMM_NONE, MR_GEMM_GELU, MR_GEMM_GELU_TANH, MR_GEMM_SILU}) {
    for (const mr_dtype out : {MR_F32, MR_F16, MR_BF16}) {
      for (int what = 0; what < 4; ++what) {
        const Case c{MR_BF16, out, 30, 70, 40, 0, 1, activation, what % 2 == 1, what / 2 == 1};
        EXPECT_LE(error_of(device.get(), c), allowed(out)) << activation << " " << out << " " << what;
      }
    }
  }
}

TEST(Gemm, GatesAndOutputsInEightBits) {
  const DevicePtr device = open_cpu();
  for (const mr_gemm_activation activation :
       {MR_GEMM_NONE, MR_GEMM_GELU, MR_GEMM_SWIGLU, MR_GEMM_CLAMPED_SWIGLU}) {
    for (const mr_dtype out : {MR_F32, MR_BF16, MR_F8_E4M3}) {
      for (const auto& [m, n] : {std::pair{3, 2}, {30, 70}, {5, 300}, {270, 512}}) {
        if (m == 270 && out == MR_BF16) continue;
        const mr_dtype type = n == 300 ? MR_I8 : MR_BF16;
        const Case c{type, out, m, n, 40, 0, 1, activation, m % 2 == 0, out != MR_F8_E4M3 && n == 70};
        EXPECT_LE(error_of(device.get(), c), allowed(out))
            << activation << " " << out << " " << m << " x " << n;
      }
    }
  }
}

// Scales of a matrix as it lies, in a grid with a gap behind its rows.
struct Grid {
  Grid(std::mt19937& random, int64_t of_rows, int64_t of_cols, int32_t scale_rows, int32_t scale_cols)
      : rows(scale_rows),
        cols(scale_cols),
        stride((of_cols + scale_cols - 1) / scale_cols + 1),
        scales(random_floats(random, (of_rows + scale_rows - 1) / scale_rows * stride)) {}
  double at(int64_t r, int64_t c) const { return scales[static_cast<size_t>(r / rows * stride + c / cols)]; }
  int32_t rows, cols;
  int64_t stride;
  std::vector<float> scales;
};

TEST(Gemm, EightBitFloatsOfAnyGridAndLayout) {
  std::mt19937 random(21);
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    for (const auto& [m, n, k] : {std::tuple{1, 1, 1}, {7, 139, 31}, {131, 5, 261}, {3, 4, 0}}) {
      for (int how = 0; how < 16; ++how) {
        const int transpose_a = how & 1, transpose_b = how >> 1 & 1;
        const mr_dtype a_type = how & 4 ? MR_F8_E5M2 : MR_F8_E4M3, b_type = how & 8 ? MR_F8_E5M2 : MR_F8_E4M3;
        const int64_t a_rows = transpose_a ? k : m, a_cols = transpose_a ? m : k,
                      b_rows = transpose_b ? n : k, b_cols = transpose_b ? k : n;
        const Stored a = random_stored(random, a_type, a_rows, a_cols, 2),
                     b = random_stored(random, b_type, b_rows, b_cols, 0);
        // Every grid of a beside two of b: 1 x 128 as rows are quantized, 128 x 128, 128 x 1, 1 x 1.
        const int32_t a_grid = (how * 5 + static_cast<int32_t>(m)) % 4;
        const Grid of_a(random, a_rows, a_cols, a_grid & 1 ? 128 : 1, a_grid & 2 ? 128 : 1),
            of_b(random, b_rows, b_cols, how & 1 ? 1 : 128, how % 3 == 0 ? 1 : 128);
        std::vector<float> c(static_cast<size_t>(m * n), NAN);
        mr_gemm_args args{};
        args.type = a_type, args.b_type = b_type, args.out_type = MR_F32;
        args.m = m, args.n = n, args.k = k;
        args.a = a.bytes.data(), args.lda = a.stride, args.transpose_a = transpose_a;
        args.b = b.bytes.data(), args.ldb = b.stride, args.transpose_b = transpose_b;
        args.a_scales = of_a.scales.data(), args.a_scale_stride = of_a.stride;
        args.b_scales = of_b.scales.data(), args.b_scale_stride = of_b.stride;
        args.a_scale_rows = of_a.rows, args.a_scale_cols = of_a.cols;
        args.b_scale_rows = of_b.rows, args.b_scale_cols = of_b.cols;
        args.c = c.data();
        ASSERT_EQ(call(device.get(), args), MR_OK) << mr_last_error();
        double error = 0, largest = 1e-30;
        for (int64_t r = 0; r < m; ++r) {
          for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t i = 0; i < k; ++i) {
              const int64_t ar = transpose_a ? i : r, ac = transpose_a ? r : i, br = transpose_b ? j : i,
                            bc = transpose_b ? i : j;
              sum += a.values[static_cast<size_t>(ar * a_cols + ac)] * of_a.at(ar, ac) *
                     b.values[static_cast<size_t>(br * b_cols + bc)] * of_b.at(br, bc);
            }
            error = std::max(error, std::abs(sum - c[static_cast<size_t>(r * n + j)]));
            largest = std::max(largest, std::abs(sum));
          }
        }
        EXPECT_LE(error / largest, 3e-6) << isa << ", " << m << " x " << n << " x " << k << ", how " << how;
      }
    }
  }
}

TEST(Gemm, OperandsOfTwoTypes) {
  const DevicePtr device = open_cpu();
  std::mt19937 random(22);
  for (const mr_dtype a_type : {MR_F32, MR_F16, MR_BF16}) {
    for (const mr_dtype b_type : {MR_F16, MR_BF16}) {
      const Stored a = random_stored(random, a_type, 9, 33, 1), b = random_stored(random, b_type, 33, 70, 2);
      std::vector<float> c(9 * 70, NAN);
      mr_gemm_args args{};
      args.type = a_type, args.b_type = b_type, args.out_type = MR_F32;
      args.m = 9, args.n = 70, args.k = 33;
      args.a = a.bytes.data(), args.lda = a.stride, args.b = b.bytes.data(), args.ldb = b.stride;
      args.c = c.data();
      ASSERT_EQ(call(device.get(), args), MR_OK) << mr_last_error();
      for (int64_t r = 0; r < 9; ++r) {
        for (int64_t j = 0; j < 70; ++j) {
          double sum = 0;
          for (int64_t i = 0; i < 33; ++i)
            sum += a.values[static_cast<size_t>(r * 33 + i)] * b.values[static_cast<size_t>(i * 70 + j)];
          ASSERT_NEAR(c[static_cast<size_t>(r * 70 + j)], sum, 5e-5);
        }
      }
    }
  }
}

TEST(Gemm, SameBitsOnAnyNumberOfThreads) {
  const Case c{MR_BF16, MR_F32, 300, 200, 500, 0, 1};
  std::vector<uint8_t> one, five;
  error_of(open_cpu(nullptr, 1).get(), c, &one);
  error_of(open_cpu(nullptr, 5).get(), c, &five);
  EXPECT_EQ(one, five);
}

// Up to eight rows go another way than many, and every instruction set has its own. The sums of bf16 by AMX
// tiles have an order of their own, which is spelled out.
TEST(Gemm, ARowsBitsDoNotDependOnOthersNorOnTheInstructionSet) {
  constexpr int64_t kM = 270, kN = 84, kK = 531, kFirst = 100;
  std::mt19937 random(4);
  for (const mr_dtype type : {MR_F32, MR_F16, MR_BF16, MR_I8}) {
    const Stored a = random_stored(random, type, kM, kK, 1), b = random_stored(random, type, kN, kK, 0);
    std::vector<float> expected[2];  // of the first instruction set, by transpose_b
    for (const std::string& isa : isas()) {
      const DevicePtr device = open_cpu(isa.c_str());
      for (const int transpose_b : {0, 1}) {
        SCOPED_TRACE(testing::Message() << isa << ", type " << type << ", transposed " << transpose_b);
        const auto run = [&](int64_t first, int64_t rows) {
          std::vector<float> c(static_cast<size_t>(rows * kN), NAN);
          mr_gemm_args args{};
          args.type = type, args.m = rows, args.n = kN, args.k = kK, args.lda = a.stride;
          args.a = a.bytes.data() + static_cast<size_t>(first * a.stride) * gemm_bytes(type);
          args.b = b.bytes.data(), args.transpose_b = transpose_b;  // [kN][kK], or the same as [kK][kN]
          args.c = c.data(), args.out_type = MR_F32;
          EXPECT_EQ(call(device.get(), args), MR_OK) << mr_last_error();
          return c;
        };
        const std::vector<float> all = run(0, kM);
        std::vector<float> same = expected[transpose_b].empty() ? all : expected[transpose_b];
        expected[transpose_b] = same;
        for (int64_t i = 0; i < kM * kN && isa == "amx" && type == MR_BF16; ++i) {
          const double *of_a = a.values.data() + i / kN * kK, *of_b = b.values.data();
          same[static_cast<size_t>(i)] = sum_of_tiles(
              kK, [&](int64_t k) { return of_a[k]; },
              [&](int64_t k) { return of_b[transpose_b ? i % kN * kK + k : k * kN + i % kN]; });
        }
        EXPECT_EQ(std::memcmp(same.data(), all.data(), all.size() * 4), 0);
        for (const int64_t rows : {1, 3, 4, 5, 8, 9, 16, 17, 40}) {
          EXPECT_EQ(std::memcmp(all.data() + kFirst * kN, run(kFirst, rows).data(),
                                static_cast<size_t>(rows * kN) * 4),
                    0)
              << rows << " rows";
        }
      }
    }
  }
}

// By tiles and by vectors: what is too small for a float's exponent is zero in both or in neither.
TEST(Gemm, AFewRowsOfBf16HaveTheBitsOfManyAtOddSizes) {
  constexpr int64_t kMany = 21;
  std::mt19937 random(11);
  const auto values = [&](int64_t count) {
    std::vector<uint16_t> bits;
    for (const float value : random_floats(random, count)) {
      const auto kind = random() % 8;
      bits.push_back(to_bfloat16(kind == 0 ? value * 1e-19f : kind == 1 ? value * 1e-23f : value).bits);
      if (kind == 2) bits.back() = static_cast<uint16_t>(random() & 0x807f);  // below 2^-126, or zero
    }
    return bits;
  };
  for (const auto& shape : {std::pair{1, 1}, {63, 33}, {300, 97}, {1031, 543}}) {
    const int64_t n = shape.first, k = shape.second;  // not bound: clang 14 captures no bindings
    const std::vector<uint16_t> a = values(kMany * (k + 3)), b = values((n + 1) * (k + 1));
    for (const std::string& isa : isas()) {
      const DevicePtr device = open_cpu(isa.c_str(), 1);
      for (const int transpose_b : {0, 1}) {
        const auto run = [&](int64_t first, int64_t rows) {
          std::vector<float> c(static_cast<size_t>(rows * n), NAN);
          mr_gemm_args args{};
          args.type = MR_BF16, args.m = rows, args.n = n, args.k = k, args.lda = k + 3;
          args.a = a.data() + first * args.lda;
          args.b = b.data(), args.transpose_b = transpose_b, args.ldb = transpose_b ? k + 1 : n + 1;
          args.c = c.data(), args.out_type = MR_F32;
          EXPECT_EQ(call(device.get(), args), MR_OK) << mr_last_error();
          return c;
        };
        const std::vector<float> all = run(0, kMany);
        for (const int64_t rows : {1, 2, 3, 4, 5, 8}) {
          EXPECT_EQ(std::memcmp(all.data() + 5 * n, run(5, rows).data(), static_cast<size_t>(rows * n) * 4),
                    0)
              << rows << " rows of " << n << " x " << k << ", transposed " << transpose_b << ", " << isa;
        }
      }
    }
  }
}

TEST(Gemm, WhatIsWrongIsNamedAndNothingWritten) {
  const DevicePtr device = open_cpu();
  std::vector<float> a(64, 1.0f), b(64, 1.0f), c(64, 7.0f);
  mr_gemm_args good{};
  good.type = MR_F32, good.out_type = MR_F32;
  good.m = good.n = good.k = 8;
  good.a = a.data(), good.b = b.data(), good.c = c.data();
  const auto refused = [&](mr_status status, const char* word, const auto& change) {
    mr_gemm_args args = good;
    change(args);
    EXPECT_REFUSED(call(device.get(), args), status, word);
  };
  EXPECT_REFUSED(mr_gemm(device.get(), nullptr, nullptr, 0, nullptr), MR_ERROR_INVALID, "args");
  EXPECT_REFUSED(mr_gemm(nullptr, &good, nullptr, 0, nullptr), MR_ERROR_INVALID, "device");
  EXPECT_REFUSED(mr_gemm(device.get(), &good, nullptr, 0, nullptr), MR_ERROR_INVALID, "workspace");
  refused(MR_ERROR_INVALID, "args.type", [](mr_gemm_args& x) { x.type = MR_Q4_K; });
  refused(MR_ERROR_INVALID, "args.out_type", [](mr_gemm_args& x) { x.out_type = MR_I8; });
  refused(MR_ERROR_INVALID, "args.m", [](mr_gemm_args& x) { x.m = -1; });
  refused(MR_ERROR_INVALID, "args.k", [](mr_gemm_args& x) { x.k = int64_t{1} << 40; });
  refused(MR_ERROR_INVALID, "args.a", [](mr_gemm_args& x) { x.a = nullptr; });
  refused(MR_ERROR_INVALID, "args.b",
          [&](mr_gemm_args& x) { x.b = reinterpret_cast<const uint8_t*>(b.data()) + 1; });
  refused(MR_ERROR_INVALID, "args.lda", [](mr_gemm_args& x) { x.lda = 7; });
  refused(MR_ERROR_INVALID, "args.ldc", [](mr_gemm_args& x) { x.ldc = -8; });
  refused(MR_ERROR_INVALID, "args.transpose_b", [](mr_gemm_args& x) { x.transpose_b = 2; });
  refused(MR_ERROR_INVALID, "args.split_k", [](mr_gemm_args& x) { x.split_k = 2; });
  refused(MR_ERROR_INVALID, "args.activation",
          [](mr_gemm_args& x) { std::memset(&x.activation, 9, sizeof x.activation); });
  refused(MR_ERROR_INVALID, "a_scales", [&](mr_gemm_args& x) { x.a_scales = a.data(); });
  refused(MR_ERROR_INVALID, "args.a_scales", [](mr_gemm_args& x) { x.type = MR_F8_E4M3; });
  refused(MR_ERROR_INVALID, "args.b_type is f8_e4m3, expected f16 or bf16",
          [](mr_gemm_args& x) { x.b_type = MR_F8_E4M3; });
  refused(MR_ERROR_INVALID, "args.b_type", [](mr_gemm_args& x) { x.type = MR_I8, x.b_type = MR_BF16; });
  refused(MR_ERROR_INVALID, "args.a_scale_cols", [](mr_gemm_args& x) { x.a_scale_cols = 128; });
  refused(MR_ERROR_INVALID, "args.b_scale_rows and _cols are 1 and 64", [&](mr_gemm_args& x) {
    x.type = MR_F8_E5M2, x.a_scales = x.b_scales = a.data(), x.b_scale_rows = 1, x.b_scale_cols = 64;
  });
  refused(MR_ERROR_INVALID, "args.n", [](mr_gemm_args& x) { x.activation = MR_GEMM_SWIGLU, x.n = 7; });
  refused(MR_ERROR_INVALID, "gate_limit", [](mr_gemm_args& x) { x.activation = MR_GEMM_CLAMPED_SWIGLU; });
  refused(MR_ERROR_INVALID, "gate_alpha", [](mr_gemm_args& x) { x.gate_alpha = 1.0f; });
  refused(MR_ERROR_INVALID, "c_scales", [](mr_gemm_args& x) { x.out_type = MR_F8_E4M3; });
  refused(MR_ERROR_INVALID, "c_scales", [&](mr_gemm_args& x) { x.c_scales = a.data(); });
  refused(MR_ERROR_INVALID, "args.residual",
          [&](mr_gemm_args& x) { x.out_type = MR_F8_E4M3, x.c_scales = a.data(), x.residual = b.data(); });
  EXPECT_EQ(c, std::vector<float>(64, 7.0f));
}

}  // namespace
}  // namespace millrace::api_test
