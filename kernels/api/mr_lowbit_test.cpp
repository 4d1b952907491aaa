// mr_lowbit_*, mr_fp4_gemm and mr_grouped_gemm on every instruction set of this machine, against sums in
// double over what the published matrices mean: e2m1 by its table, GPTQ's and AWQ's words as their formats
// describe them.
#include <array>
#include <cstring>

#include "base/float_bits.h"
#include "kernels/api/api_test_support.h"

namespace millrace::api_test {
namespace {

struct Published {
  std::vector<uint32_t> codes, zeros;
  std::vector<uint16_t> scales;
  mr_lowbit_matrix matrix{};
  std::vector<double> values;  // [experts][n][k]
};

int group_of(mr_lowbit_format format) {
  return format == MR_LOWBIT_NVFP4 ? 16 : format == MR_LOWBIT_INT4_128 ? 128 : 32;
}

// Codes and scales of bytes, in the words' memory.
Published random_rows_matrix(std::mt19937& random, mr_lowbit_format format, int64_t experts, int64_t n,
                             int64_t k) {
  constexpr double kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  Published p;
  const int64_t group = group_of(format), groups = k / group;
  p.codes.resize(static_cast<size_t>(experts * n * k / 8));
  p.scales.resize(static_cast<size_t>(experts * n * groups + 1) / 2);
  for (uint32_t& word : p.codes) word = static_cast<uint32_t>(random());
  auto* codes = reinterpret_cast<uint8_t*>(p.codes.data());
  auto* scales = reinterpret_cast<uint8_t*>(p.scales.data());
  for (int64_t i = 0; i < experts * n * groups; ++i)
    scales[i] = static_cast<uint8_t>(format == MR_LOWBIT_MXFP4 ? 120 + random() % 8 : random() % 0x7f);
  for (int64_t i = 0; i < experts * n * k; ++i) {
    const uint32_t code = codes[i / 2] >> (4 * (i % 2)) & 15u;
    const uint8_t stored = scales[i / k * groups + i % k / group];
    const double scale =
        format == MR_LOWBIT_MXFP4 ? std::ldexp(1.0, stored - 127) : to_float(Fp8E4M3{stored});
    p.values.push_back((code < 8 ? 1 : -1) * kE2m1[code % 8] * scale);
  }
  p.matrix = {format, MR_LOWBIT_ROWS, experts, n, k, p.codes.data(), p.scales.data(), nullptr};
  return p;
}

Published random_int4_matrix(std::mt19937& random, mr_lowbit_format format, mr_lowbit_packing packing,
                             int64_t experts, int64_t n, int64_t k) {
  constexpr int64_t kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // rows from the lowest bits on
  Published p;
  const int64_t group = group_of(format), groups = k / group;
  p.codes.resize(static_cast<size_t>(experts * n * k / 8));
  p.zeros.resize(static_cast<size_t>(experts * groups * n / 8));
  p.values.resize(static_cast<size_t>(experts * n * k));
  for (uint32_t& word : p.codes) word = static_cast<uint32_t>(random());
  for (uint32_t& word : p.zeros) word = static_cast<uint32_t>(random());
  for (int64_t i = 0; i < experts * groups * n; ++i)
    p.scales.push_back(to_half(0.001f + 0.01f * static_cast<float>(random() % 1000) / 1000.0f).bits);
  const bool awq = packing == MR_LOWBIT_AWQ;
  for (int64_t e = 0; e < experts; ++e) {
    const uint32_t* words = p.codes.data() + e * n * k / 8;
    for (int64_t i = 0; i < n * k / 8; ++i) {
      for (int64_t j = 0; j < 8; ++j) {
        const int64_t row = awq ? i % (n / 8) * 8 + kAwqOrder[j] : i % n;
        const int64_t column = awq ? i / (n / 8) : i / n * 8 + j;
        const int64_t at = (e * groups + column / group) * n + row;
        const uint32_t zeros =
            p.zeros[static_cast<size_t>((e * groups + column / group) * (n / 8) + row / 8)];
        const int64_t* found = std::find(kAwqOrder, kAwqOrder + 8, row % 8);
        const double zero = (zeros >> (4 * (awq ? found - kAwqOrder : row % 8)) & 15u) +
                            (packing == MR_LOWBIT_GPTQ ? 1.0 : 0.0);
        const double exact =
            ((words[i] >> (4 * j) & 15u) - zero) * to_float(Half{p.scales[static_cast<size_t>(at)]});
        p.values[static_cast<size_t>((e * n + row) * k + column)] =
            to_float(to_bfloat16(static_cast<float>(exact)));  // a weight is a bf16
      }
    }
  }
  p.matrix = {format, packing, experts, n, k, p.codes.data(), p.scales.data(), p.zeros.data()};
  return p;
}

std::vector<uint16_t> random_bf16(std::mt19937& random, int64_t count) {
  std::vector<uint16_t> x;
  for (const float v : random_floats(random, count)) x.push_back(to_bfloat16(v).bits);
  return x;
}
double bf16_at(const std::vector<uint16_t>& x, int64_t at) {
  return to_float(BFloat16{x[static_cast<size_t>(at)]});
}

mr_status multiply_lowbit(mr_device* device, const mr_lowbit_gemm_args& args) {
  size_t bytes = 0;
  if (const mr_status status = mr_lowbit_gemm_workspace_bytes(device, &args, &bytes); status != MR_OK)
    return status;
  const Guarded workspace(bytes);
  std::memset(workspace.data(), 0xff, bytes);
  return mr_lowbit_gemm(device, &args, workspace.data(), bytes, nullptr);
}

// The largest error over the largest value, forward and backward, with offsets where there are experts.
void compare(mr_device* device, const Published& w, const std::vector<int32_t>& offsets, const char* what) {
  SCOPED_TRACE(what);
  std::mt19937 random(5);
  const mr_lowbit_matrix& m = w.matrix;
  size_t bytes = 0;
  ASSERT_EQ(mr_lowbit_bytes(&m, &bytes), MR_OK) << mr_last_error();
  const Guarded units(bytes);
  ASSERT_EQ(mr_lowbit_repack(device, &m, units.data(), bytes, nullptr), MR_OK) << mr_last_error();
  const int64_t rows = offsets.back();
  const std::vector<float> bias = random_floats(random, m.experts * m.n),
                           scales = random_floats(random, m.experts);
  for (const bool backward : {false, true}) {
    const int64_t in = backward ? m.n : m.k, out = backward ? m.k : m.n, ldx = in + 3, ldy = out + 2;
    const std::vector<uint16_t> x = random_bf16(random, rows * ldx);
    std::vector<float> y(static_cast<size_t>(rows * ldy), -7.0f);
    mr_lowbit_gemm_args args{};
    args.format = m.format, args.experts = m.experts, args.n = m.n, args.k = m.k;
    args.weights = units.data(), args.expert_scales = scales.data(), args.backward = backward;
    args.m = rows, args.offsets = m.experts > 1 ? offsets.data() : nullptr;
    args.x = x.data(), args.ldx = ldx, args.out_type = MR_F32, args.y = y.data(), args.ldy = ldy;
    args.alpha = 0.5f, args.bias = backward ? nullptr : bias.data();
    ASSERT_EQ(multiply_lowbit(device, args), MR_OK) << mr_last_error();
    double error = 0, largest = 1e-30;
    for (int64_t e = 0; e < m.experts; ++e) {
      for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e) + 1]; ++r) {
        for (int64_t o = 0; o < ldy; ++o) {
          const float got = y[static_cast<size_t>(r * ldy + o)];
          if (o >= out) {
            ASSERT_EQ(got, -7.0f) << "between rows";
            continue;
          }
          double sum = 0;
          for (int64_t i = 0; i < in; ++i) {
            const int64_t n = backward ? i : o, k = backward ? o : i;
            sum += bf16_at(x, r * ldx + i) * w.values[static_cast<size_t>((e * m.n + n) * m.k + k)];
          }
          sum *= 0.5 * scales[static_cast<size_t>(e)];
          if (!backward) sum += bias[static_cast<size_t>(e * m.n + o)];
          error = std::max(error, std::abs(got - sum));
          largest = std::max(largest, std::abs(sum));
        }
      }
    }
    EXPECT_LE(error / largest, 3e-6) << (backward ? "backward" : "forward");
  }
}

TEST(Lowbit, EveryFormatPackingAndShape) {
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    std::mt19937 random(3);
    for (const mr_lowbit_format format : {MR_LOWBIT_MXFP4, MR_LOWBIT_NVFP4}) {
      compare(device.get(), random_rows_matrix(random, format, 1, 70, 160), {0, 3}, "rows");
      compare(device.get(), random_rows_matrix(random, format, 3, 65, 96), {0, 2, 2, 9}, "rows of experts");
      compare(device.get(), random_rows_matrix(random, format, 2, 270, 544), {0, 20, 30}, "many rows");
    }
    for (const mr_lowbit_format format : {MR_LOWBIT_INT4_32, MR_LOWBIT_INT4_128}) {
      for (const mr_lowbit_packing packing : {MR_LOWBIT_GPTQ, MR_LOWBIT_GPTQ_V2, MR_LOWBIT_AWQ})
        compare(device.get(), random_int4_matrix(random, format, packing, 2, 72, 256), {0, 3, 5}, "INT4");
    }
  }
}

// Up to eight rows are multiplied without weights in memory, and every instruction set has its own way. Sums
// by AMX tiles have an order of their own, which is spelled out.
void compare_bits(const Published& w) {
  const mr_lowbit_matrix& m = w.matrix;
  constexpr int64_t kRows = 270, kFirst = 257;
  std::mt19937 random(9);
  const std::vector<uint16_t> x = random_bf16(random, kRows * m.k);
  std::vector<float> expected;
  for (const std::string& isa : isas()) {
    SCOPED_TRACE(testing::Message() << isa << ", format " << m.format);
    const DevicePtr device = open_cpu(isa.c_str());
    size_t bytes = 0;
    ASSERT_EQ(mr_lowbit_bytes(&m, &bytes), MR_OK);
    const Guarded units(bytes);
    ASSERT_EQ(mr_lowbit_repack(device.get(), &m, units.data(), bytes, nullptr), MR_OK);
    const auto run = [&](int64_t first, int64_t rows) {
      std::vector<float> y(static_cast<size_t>(rows * m.n));
      mr_lowbit_gemm_args args{};
      args.format = m.format, args.experts = 1, args.n = m.n, args.k = m.k, args.m = rows;
      args.weights = units.data(), args.x = x.data() + first * m.k, args.y = y.data(), args.out_type = MR_F32;
      EXPECT_EQ(multiply_lowbit(device.get(), args), MR_OK) << mr_last_error();
      return y;
    };
    const std::vector<float> all = run(0, kRows);
    if (expected.empty()) expected = all;
    if (isa == "amx") {
      for (int64_t i = 0; i < kRows * m.n; ++i) {
        expected[static_cast<size_t>(i)] = sum_of_tiles(
            m.k, [&](int64_t k) { return bf16_at(x, i / m.n * m.k + k); },
            [&](int64_t k) { return w.values[static_cast<size_t>(i % m.n * m.k + k)]; });
      }
    }
    EXPECT_EQ(std::memcmp(expected.data(), all.data(), all.size() * 4), 0);
    for (const int64_t rows : {1, 2, 4, 7, 8, 9}) {
      EXPECT_EQ(std::memcmp(all.data() + kFirst * m.n, run(kFirst, rows).data(),
                            static_cast<size_t>(rows * m.n) * 4),
                0)
          << rows << " rows";
    }
  }
}

TEST(Lowbit, ARowsBitsDoNotDependOnOthersNorOnTheInstructionSet) {
  std::mt19937 random(8);
  for (const mr_lowbit_format format : {MR_LOWBIT_MXFP4, MR_LOWBIT_NVFP4})
    compare_bits(random_rows_matrix(random, format, 1, 70, 416));
  for (const mr_lowbit_format format : {MR_LOWBIT_INT4_32, MR_LOWBIT_INT4_128})
    compare_bits(random_int4_matrix(random, format, MR_LOWBIT_GPTQ, 1, 72, 384));
}

TEST(Lowbit, BytesOfUnits) {
  std::mt19937 random(8);
  const Published w = random_rows_matrix(random, MR_LOWBIT_NVFP4, 1, 128, 384);
  size_t bytes = 0;
  ASSERT_EQ(mr_lowbit_bytes(&w.matrix, &bytes), MR_OK);
  EXPECT_EQ(bytes, 2u * 3u * (4096 + 512));
}

TEST(Lowbit, WrongArguments) {
  const DevicePtr device = open_cpu();
  std::mt19937 random(1);
  const Published good = random_rows_matrix(random, MR_LOWBIT_MXFP4, 1, 64, 128);
  const Guarded units(1 << 16);
  const auto refused = [&](const char* word, const auto& change) {
    mr_lowbit_matrix m = good.matrix;
    change(m);
    EXPECT_REFUSED(mr_lowbit_repack(device.get(), &m, units.data(), 1 << 16, nullptr), MR_ERROR_INVALID,
                   word);
  };
  refused("matrix.k", [](mr_lowbit_matrix& m) { m.k = 100; });
  refused("matrix.packing", [](mr_lowbit_matrix& m) { m.packing = MR_LOWBIT_AWQ; });
  refused("matrix.codes", [](mr_lowbit_matrix& m) { m.codes = nullptr; });
  refused("matrix.zeros", [](mr_lowbit_matrix& m) { m.zeros = m.codes; });
  refused("matrix.experts", [](mr_lowbit_matrix& m) { m.experts = 0; });
  EXPECT_REFUSED(mr_lowbit_repack(device.get(), &good.matrix, units.data(), 100, nullptr), MR_ERROR_NO_MEMORY,
                 "100");
  const std::vector<uint16_t> x(128);
  std::vector<float> y(128);
  const auto refused_product = [&](const char* word, const auto& change) {
    mr_lowbit_gemm_args args{};
    args.format = MR_LOWBIT_MXFP4, args.experts = 1, args.n = 64, args.k = 128, args.m = 1;
    args.weights = units.data(), args.x = x.data(), args.y = y.data(), args.out_type = MR_F32;
    change(args);
    EXPECT_REFUSED(multiply_lowbit(device.get(), args), MR_ERROR_INVALID, word);
  };
  refused_product("args.offsets", [](mr_lowbit_gemm_args& a) { a.experts = 2; });
  refused_product("args.bias", [&](mr_lowbit_gemm_args& a) { a.backward = 1, a.bias = y.data(); });
  refused_product("args.ldx", [](mr_lowbit_gemm_args& a) { a.ldx = 5; });
  refused_product("args.out_type", [](mr_lowbit_gemm_args& a) { a.out_type = MR_I8; });
  const int32_t too_many[2] = {0, 2};
  refused_product("args.offsets[1]", [&](mr_lowbit_gemm_args& a) { a.offsets = too_many; });
}

// Bits are those of every instruction set but for AMX, which has an order of its own.
TEST(Fp4Gemm, EveryInstructionSetAgainstSumsInDouble) {
  for (const mr_lowbit_format format : {MR_LOWBIT_MXFP4, MR_LOWBIT_NVFP4}) {
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{5, 70, 192}, {90, 330, 736}}) {
      std::mt19937 random(14);
      const Published a = random_rows_matrix(random, format, 1, m, k),
                      b = random_rows_matrix(random, format, 1, n, k);
      std::vector<float> expected;
      for (const std::string& isa : isas()) {
        SCOPED_TRACE(testing::Message() << isa << ", format " << format << ", " << m << " rows");
        const DevicePtr device = open_cpu(isa.c_str());
        std::vector<float> c(static_cast<size_t>(m * n), -7.0f);
        mr_fp4_gemm_args args{};
        args.format = format, args.m = m, args.n = n, args.k = k;
        args.a = a.codes.data(), args.a_scales = a.scales.data();
        args.b = b.codes.data(), args.b_scales = b.scales.data();
        args.out_type = MR_F32, args.c = c.data();
        size_t bytes = 0;
        ASSERT_EQ(mr_fp4_gemm_workspace_bytes(device.get(), &args, &bytes), MR_OK) << mr_last_error();
        const Guarded workspace(bytes);
        std::memset(workspace.data(), 0xff, bytes);
        ASSERT_EQ(mr_fp4_gemm(device.get(), &args, workspace.data(), bytes, nullptr), MR_OK);
        double error = 0, largest = 1e-30;
        for (int64_t i = 0; i < m * n; ++i) {
          const double *of_a = a.values.data() + i / n * k, *of_b = b.values.data() + i % n * k;
          double sum = 0;
          for (int64_t j = 0; j < k; ++j) sum += of_a[j] * of_b[j];
          error = std::max(error, std::abs(c[static_cast<size_t>(i)] - sum));
          largest = std::max(largest, std::abs(sum));
          if (isa != "amx") continue;
          expected[static_cast<size_t>(i)] = sum_of_tiles(
              k, [&](int64_t j) { return of_a[j]; }, [&](int64_t j) { return of_b[j]; });
        }
        EXPECT_LE(error / largest, 3e-6);
        if (expected.empty()) expected = c;
        EXPECT_EQ(std::memcmp(expected.data(), c.data(), c.size() * 4), 0);
      }
    }
  }
}

TEST(Fp4Gemm, GapsAndWrongArguments) {
  const DevicePtr device = open_cpu();
  std::mt19937 random(13);
  for (const mr_lowbit_format format : {MR_LOWBIT_MXFP4, MR_LOWBIT_NVFP4}) {
    constexpr int64_t kM = 5, kN = 70, kK = 192, kLdc = kN + 3;
    const Published a = random_rows_matrix(random, format, 1, kM, kK),
                    b = random_rows_matrix(random, format, 1, kN, kK);
    std::vector<float> c(kM * kLdc, -7.0f);
    mr_fp4_gemm_args args{};
    args.format = format, args.m = kM, args.n = kN, args.k = kK, args.alpha = 0.5f;
    args.a = a.codes.data(), args.a_scales = a.scales.data();
    args.b = b.codes.data(), args.b_scales = b.scales.data();
    args.out_type = MR_F32, args.c = c.data(), args.ldc = kLdc;
    size_t bytes = 0;
    ASSERT_EQ(mr_fp4_gemm_workspace_bytes(device.get(), &args, &bytes), MR_OK) << mr_last_error();
    const Guarded workspace(bytes);
    ASSERT_EQ(mr_fp4_gemm(device.get(), &args, workspace.data(), bytes, nullptr), MR_OK) << mr_last_error();
    double error = 0, largest = 1e-30;
    for (int64_t i = 0; i < kM * kLdc; ++i) {
      const float got = c[static_cast<size_t>(i)];
      if (i % kLdc >= kN) {
        ASSERT_EQ(got, -7.0f) << "between rows";
        continue;
      }
      double sum = 0;
      for (int64_t k = 0; k < kK; ++k)
        sum += 0.5 * a.values[static_cast<size_t>(i / kLdc * kK + k)] *
               b.values[static_cast<size_t>(i % kLdc * kK + k)];
      error = std::max(error, std::abs(got - sum));
      largest = std::max(largest, std::abs(sum));
    }
    EXPECT_LE(error / largest, 3e-6);
    args.k = 40;
    EXPECT_REFUSED(mr_fp4_gemm(device.get(), &args, workspace.data(), bytes, nullptr), MR_ERROR_INVALID,
                   "args.k");
    args.k = kK, args.format = MR_LOWBIT_INT4_32;
    EXPECT_REFUSED(mr_fp4_gemm(device.get(), &args, workspace.data(), bytes, nullptr), MR_ERROR_INVALID,
                   "args.format");
  }
}

// ---------------------------------------------------------------- experts

struct StoredRows {
  std::vector<uint8_t> bytes;
  std::vector<double> values;
};
StoredRows random_stored_rows(std::mt19937& random, mr_dtype type, int64_t count) {
  StoredRows s;
  for (const float v : random_floats(random, count)) {
    if (type == MR_F8_E4M3) {
      const auto code = static_cast<uint8_t>(random() & 0xdfu);  // no NaN
      s.bytes.push_back(code);
      s.values.push_back(to_float(Fp8E4M3{code}));
      continue;
    }
    const uint16_t bits = type == MR_BF16 ? to_bfloat16(v).bits : to_half(v).bits;
    s.bytes.push_back(static_cast<uint8_t>(bits & 255));
    s.bytes.push_back(static_cast<uint8_t>(bits >> 8));
    s.values.push_back(type == MR_BF16 ? to_float(BFloat16{bits}) : to_float(Half{bits}));
  }
  return s;
}

void compare_grouped(mr_device* device, mr_grouped_op op, mr_dtype type) {
  SCOPED_TRACE(testing::Message() << "op " << op << ", type " << type);
  std::mt19937 random(11);
  constexpr int64_t kExperts = 4, kN = 70, kK = 150, kRows = 40, kBlocks = 2;
  const int32_t offsets[kExperts + 1] = {0, 17, 17, 18, kRows};
  const bool forward = op == MR_GROUPED_FORWARD, wgrad = op == MR_GROUPED_WGRAD, fp8 = type == MR_F8_E4M3;
  const int64_t a_cols = forward ? kK : kN, out_rows = wgrad ? kExperts * kN : kRows,
                cols = forward ? kN : kK;
  const StoredRows a = random_stored_rows(random, type, kRows * a_cols),
                   b = random_stored_rows(random, type, (wgrad ? kRows : kExperts * kN) * kK);
  const std::vector<float> a_scales = random_floats(random, kRows * kBlocks),
                           b_scales = random_floats(random, (wgrad ? kRows : kExperts) * kBlocks);
  std::vector<float> c(static_cast<size_t>(out_rows * cols), NAN);
  mr_grouped_gemm_args args{};
  args.op = op, args.type = type, args.experts = kExperts, args.m = kRows, args.n = kN, args.k = kK;
  args.offsets = offsets, args.a = a.bytes.data(), args.b = b.bytes.data();
  args.out_type = MR_F32, args.c = c.data(), args.alpha = 0.25f;
  if (fp8) args.a_scales = a_scales.data(), args.b_scales = b_scales.data();
  size_t bytes = 0;
  ASSERT_EQ(mr_grouped_gemm_workspace_bytes(device, &args, &bytes), MR_OK) << mr_last_error();
  const Guarded workspace(bytes);
  ASSERT_EQ(mr_grouped_gemm(device, &args, workspace.data(), bytes, nullptr), MR_OK) << mr_last_error();
  std::vector<double> expected(c.size(), 0.0);
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (int64_t n = 0; n < kN; ++n) {
        for (int64_t k = 0; k < kK; ++k) {
          // Scales of rows lie [row][blocks], those of an expert's one block of rows [expert][blocks of k].
          const int64_t a_blocks = forward ? kBlocks : 1, a_block = (forward ? k : n) / 128;
          const double scale =
              !fp8 ? 0.25
                   : 0.25 * a_scales[static_cast<size_t>(r * a_blocks + a_block)] *
                         static_cast<double>(
                             b_scales[static_cast<size_t>((wgrad ? r : e) * kBlocks + k / 128)]);
          const auto w_at = static_cast<size_t>((e * kN + n) * kK + k),
                     x_at = static_cast<size_t>(r * kK + k), y_at = static_cast<size_t>(r * kN + n);
          if (forward) {
            expected[y_at] += scale * a.values[x_at] * b.values[w_at];
          } else if (wgrad) {
            expected[w_at] += scale * a.values[y_at] * b.values[x_at];
          } else {
            expected[x_at] += scale * a.values[y_at] * b.values[w_at];
          }
        }
      }
    }
  }
  double error = 0, largest = 1e-30;
  for (size_t i = 0; i < c.size(); ++i) {
    ASSERT_TRUE(std::isfinite(c[i])) << i;
    error = std::max(error, std::abs(c[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  EXPECT_LE(error / largest, 3e-6);
}

TEST(GroupedGemm, EveryTypeAndGradient) {
  const DevicePtr device = open_cpu();
  for (const mr_dtype type : {MR_BF16, MR_F16, MR_F8_E4M3}) {
    for (const mr_grouped_op op : {MR_GROUPED_FORWARD, MR_GROUPED_DGRAD, MR_GROUPED_WGRAD})
      compare_grouped(device.get(), op, type);
  }
}

TEST(GroupedGemm, WrongArguments) {
  const DevicePtr device = open_cpu();
  const std::vector<uint16_t> a(64), b(64);
  std::vector<float> c(64);
  const int32_t offsets[2] = {0, 8};
  const auto refused = [&](mr_status status, const char* word, const auto& change) {
    mr_grouped_gemm_args args{};
    args.type = MR_BF16, args.experts = 1, args.m = 8, args.n = 8, args.k = 8, args.offsets = offsets;
    args.a = a.data(), args.b = b.data(), args.c = c.data(), args.out_type = MR_F32;
    change(args);
    size_t bytes = 0;
    EXPECT_REFUSED(mr_grouped_gemm_workspace_bytes(device.get(), &args, &bytes), status, word);
  };
  refused(MR_ERROR_INVALID, "args.type", [](mr_grouped_gemm_args& x) { x.type = MR_F32; });
  refused(MR_ERROR_INVALID, "args.a_scales",
          [](mr_grouped_gemm_args& x) { x.type = MR_F8_E4M3, x.op = MR_GROUPED_WGRAD; });
  refused(MR_ERROR_INVALID, "args.offsets", [](mr_grouped_gemm_args& x) { x.offsets = nullptr; });
  refused(MR_ERROR_INVALID, "args.a", [](mr_grouped_gemm_args& x) { x.a = nullptr; });
  refused(MR_ERROR_INVALID, "args.ldb", [](mr_grouped_gemm_args& x) { x.ldb = 16; });
  refused(MR_ERROR_INVALID, "a_scales", [&](mr_grouped_gemm_args& x) { x.a_scales = c.data(); });
  refused(MR_ERROR_INVALID, "args.a_scales", [](mr_grouped_gemm_args& x) { x.type = MR_F8_E4M3; });
}

// A CPU reads them before it computes: nothing is read or written beyond the arrays.
TEST(GroupedGemm, OffsetsThatAreNotRowsOfTheExpertsAreRefused) {
  const DevicePtr device = open_cpu();
  const std::vector<uint16_t> a(64), b(128);
  std::vector<float> c(64, 7.0f);
  struct Wrong {
    std::array<int32_t, 3> offsets;
    const char* word;
  };
  for (const Wrong& wrong :
       {Wrong{{1, 2, 8}, "offsets[0]"}, Wrong{{0, 9, 8}, "offsets[1]"}, Wrong{{0, 4, 2}, "offsets[2]"},
        Wrong{{0, -1, 8}, "offsets[1]"}, Wrong{{0, 2, 7}, "offsets[2]"}}) {
    mr_grouped_gemm_args args{};
    args.type = MR_BF16, args.experts = 2, args.m = args.n = args.k = 8, args.offsets = wrong.offsets.data();
    args.a = a.data(), args.b = b.data(), args.c = c.data(), args.out_type = MR_F32;
    size_t bytes = 0;
    ASSERT_EQ(mr_grouped_gemm_workspace_bytes(device.get(), &args, &bytes), MR_OK) << mr_last_error();
    const Guarded workspace(bytes);
    EXPECT_REFUSED(mr_grouped_gemm(device.get(), &args, workspace.data(), bytes, nullptr), MR_ERROR_INVALID,
                   wrong.word);
  }
  EXPECT_EQ(c, std::vector<float>(64, 7.0f));
}

}  // namespace
}  // namespace millrace::api_test
