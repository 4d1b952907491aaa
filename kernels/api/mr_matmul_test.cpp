// Products, quantizing and dequantizing through the C API, against kernels/reference: every type, instruction
// set and kind of shape; strides; accumulation; bad arguments.
#include "kernels/api/api_test_support.h"
#include "kernels/quant/codec.h"
#include "kernels/reference/naive_linear.h"

namespace millrace::api_test {
namespace {

constexpr mr_dtype kTypes[] = {MR_F32,  MR_F16,  MR_BF16,  MR_F8_E4M3,     MR_Q8_0,
                               MR_Q4_0, MR_Q4_1, MR_Q5_0,  MR_Q5_1,        MR_Q4_K,
                               MR_Q5_K, MR_Q6_K, MR_MXFP4, MR_MXFP4_SPLIT, MR_Q4_Z};

std::vector<float> row_of(const TestMatrix& m, int64_t row) {
  std::vector<float> values(static_cast<size_t>(m.matrix.cols));
  quant::dequantize_row(m.view, row, values.data());
  return values;
}

// How far a product may be off: half a step of the activations' codes (of a power of two's at most) times the
// weights, where the type's kernels take codes, and float32's rounding of the sum.
double bound_of(mr_dtype type, const std::vector<float>& w, const float* x) {
  double codes = 0, sum = 0;
  for (size_t first = 0; first < w.size(); first += 32) {
    double amax = 0, weights = 0;
    for (size_t i = first; i < std::min(first + 32, w.size()); ++i) {
      amax = std::max(amax, std::fabs(static_cast<double>(x[i])));
      weights += std::fabs(static_cast<double>(w[i]));
      sum += std::fabs(static_cast<double>(w[i]) * x[i]);
    }
    codes += 0.5 * amax / (type == MR_MXFP4 || type == MR_MXFP4_SPLIT ? 63.0 : 127.0) * weights;
  }
  return (type <= MR_F8_E4M3 ? 0.0 : codes * 1.001) + 1e-5 * sum + 1e-6;
}

struct MatmulCase {
  mr_dtype type;
  int64_t rows, out, in;
  bool strided;
};

void check_matmul(mr_device* device, const MatmulCase& c, std::mt19937& random) {
  const TestMatrix m = random_matrix(device, random, c.type, 1, c.out, c.in);
  const MadeWeight weight = make_weight(device, m.matrix);
  const int64_t x_stride = c.strided ? c.in + 5 : c.in, y_stride = c.strided ? c.out + 3 : c.out;
  const std::vector<float> x = random_floats(random, c.rows * x_stride), bias = random_floats(random, c.out);
  std::vector<float> y = random_floats(random, c.rows * y_stride);
  const std::vector<float> before = y;
  size_t bytes = 0;
  ASSERT_EQ(mr_matmul_workspace_bytes(device, weight.handle.get(), c.rows, &bytes), MR_OK) << mr_last_error();
  const Guarded workspace(bytes);
  for (const int accumulate : {0, 1}) {
    y = before;
    const mr_matmul_args args{weight.handle.get(),
                              accumulate == 0 ? bias.data() : nullptr,
                              x.data(),
                              c.strided ? x_stride : 0,
                              y.data(),
                              c.strided ? y_stride : 0,
                              c.rows,
                              accumulate};
    ASSERT_EQ(mr_matmul(device, &args, workspace.data(), bytes, nullptr), MR_OK) << mr_last_error();
    for (int64_t r = 0; r < c.out; ++r) {
      const std::vector<float> w = row_of(m, r);
      for (int64_t t = 0; t < c.rows; ++t) {
        double sum = accumulate != 0 ? before[t * y_stride + r] : bias[r];
        for (int64_t i = 0; i < c.in; ++i) sum += static_cast<double>(w[i]) * x[t * x_stride + i];
        ASSERT_NEAR(y[t * y_stride + r], sum, bound_of(c.type, w, &x[t * x_stride]))
            << mr_device_description(device) << ", " << mr_dtype_name(c.type) << ", " << c.rows << " rows of "
            << c.in << ", output " << r << " of row " << t;
      }
    }
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t i = c.out; i < y_stride; ++i) ASSERT_EQ(y[t * y_stride + i], before[t * y_stride + i]);
    }
  }
}

TEST(MrMatmul, IsTheReferencesForEveryType) {
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    std::mt19937 random(1);
    for (const mr_dtype type : kTypes) {
      for (const int64_t rows : {1, 5, 40})
        check_matmul(device.get(), {type, rows, 37, 512, rows == 5}, random);
    }
    for (const mr_dtype type : {MR_F32, MR_F16, MR_BF16, MR_F8_E4M3}) {
      check_matmul(device.get(), {type, 19, 3, 37, true}, random);  // columns that are no block
    }
    check_matmul(device.get(), {MR_Q8_0, 2, 300, 64, false}, random);  // enough rows for shrinking parts
    check_matmul(device.get(), {MR_MXFP4, 300, 64, 96, true}, random);
  }
}

TEST(MrMatmul, AWeightOfACpuIsNotAdopted) {
  const DevicePtr device = open_cpu();
  std::mt19937 random(3);
  const TestMatrix m = random_matrix(device.get(), random, MR_Q8_0, 1, 8, 64);
  size_t made = 0, kept = 1;
  ASSERT_EQ(mr_weight_bytes(device.get(), &m.matrix, &made), MR_OK);
  ASSERT_EQ(mr_weight_kept_bytes(device.get(), &m.matrix, &kept), MR_OK);
  EXPECT_EQ(made, kept);
  const Guarded memory(made + 256);
  mr_weight* weight = nullptr;
  EXPECT_REFUSED(mr_weight_adopt(device.get(), &m.matrix, memory.data(), made, &weight), MR_ERROR_UNSUPPORTED,
                 "mr_weight_create");
  EXPECT_REFUSED(mr_weight_adopt(device.get(), &m.matrix, nullptr, made, &weight), MR_ERROR_INVALID,
                 "memory");
  EXPECT_EQ(weight, nullptr);
}

TEST(MrMatmul, ARowHasTheSameBitsAloneAndAmongOthers) {
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str()), alone = open_cpu(isa.c_str(), 1);
    std::mt19937 random(2);
    for (const mr_dtype type : kTypes) {
      const TestMatrix m = random_matrix(device.get(), random, type, 1, 50, 256);
      const MadeWeight many = make_weight(device.get(), m.matrix), one = make_weight(alone.get(), m.matrix);
      const std::vector<float> x = random_floats(random, 33 * 256);
      std::vector<float> y(33 * 50), row(50);
      const auto multiply = [](mr_device* on, const mr_matmul_args& args) {
        size_t bytes = 0;
        ASSERT_EQ(mr_matmul_workspace_bytes(on, args.weight, args.rows, &bytes), MR_OK);
        const Guarded workspace(bytes);
        ASSERT_EQ(mr_matmul(on, &args, workspace.data(), bytes, nullptr), MR_OK) << mr_last_error();
      };
      multiply(device.get(), {many.handle.get(), nullptr, x.data(), 0, y.data(), 0, 33, 0});
      for (const int64_t t : {0, 17, 32}) {
        multiply(alone.get(), {one.handle.get(), nullptr, &x[t * 256], 0, row.data(), 0, 1, 0});
        EXPECT_EQ(std::memcmp(row.data(), &y[t * 50], 50 * sizeof(float)), 0)
            << isa << ", " << mr_dtype_name(type) << ", row " << t;
      }
    }
  }
}

TEST(MrMatmul, RefusesBadMatrices) {
  const DevicePtr device = open_cpu(nullptr, 1);
  std::vector<float> data(64 * 64);
  const mr_matrix good{MR_F32, 1, 8, 64, data.data(), 0, nullptr, MR_F32, 0, 0, 0};
  size_t bytes = 0;
  const auto refused = [&](auto change, mr_status status, const char* word) {
    mr_matrix bad = good;
    change(bad);
    EXPECT_REFUSED(mr_weight_bytes(device.get(), &bad, &bytes), status, word);
  };
  EXPECT_REFUSED(mr_weight_bytes(device.get(), nullptr, &bytes), MR_ERROR_INVALID, "matrix");
  EXPECT_REFUSED(mr_weight_bytes(device.get(), &good, nullptr), MR_ERROR_INVALID, "bytes");
  refused([](auto& m) { m.data = nullptr; }, MR_ERROR_INVALID, "matrix.data");
  refused([](auto& m) { m.data = static_cast<const char*>(m.data) + 2; }, MR_ERROR_INVALID, "matrix.data");
  refused([](auto& m) { m.rows = -1; }, MR_ERROR_INVALID, "matrix.rows");
  refused([](auto& m) { m.cols = 0; }, MR_ERROR_INVALID, "matrix.cols");
  refused([](auto& m) { m.experts = 0; }, MR_ERROR_INVALID, "matrix.experts");
  refused([](auto& m) { m.type = static_cast<mr_dtype>(15); }, MR_ERROR_INVALID, "matrix.type");
  refused([](auto& m) { m.type = MR_Q4_K; }, MR_ERROR_INVALID, "multiple of 256");
  refused([](auto& m) { m.row_stride_bytes = 100; }, MR_ERROR_INVALID, "row_stride_bytes");
  refused([](auto& m) { m.row_stride_bytes = 258; }, MR_ERROR_INVALID, "multiple of 4");
  refused([](auto& m) { m.row_stride_bytes = -256; }, MR_ERROR_INVALID, "row_stride_bytes");
  refused([](auto& m) { m.rows = INT32_MAX, m.row_stride_bytes = int64_t{1} << 40; }, MR_ERROR_INVALID,
          "bytes of");
  refused([](auto& m) { m.scales = m.data; }, MR_ERROR_INVALID, "matrix.scales");
  refused([](auto& m) { m.type = MR_MXFP4_SPLIT; }, MR_ERROR_INVALID, "matrix.scales");
  refused([](auto& m) { m.type = MR_F8_E4M3, m.scales = m.data, m.scale_type = MR_Q8_0; }, MR_ERROR_INVALID,
          "q8_0");
  refused([](auto& m) { m.type = MR_F8_E4M3, m.scales = m.data; }, MR_ERROR_INVALID, "rows_per_scale");
  refused(
      [](auto& m) { m.type = MR_F8_E4M3, m.scales = m.data, m.rows_per_scale = 8, m.cols_per_scale = 16; },
      MR_ERROR_INVALID, "scales_per_row");
}

TEST(MrMatmul, RefusesBadProducts) {
  const DevicePtr device = open_cpu(nullptr, 1), other = open_cpu(nullptr, 1);
  std::mt19937 random(4);
  const TestMatrix m = random_matrix(device.get(), random, MR_Q8_0, 1, 8, 64);
  const TestMatrix experts = random_matrix(device.get(), random, MR_Q8_0, 2, 8, 64);
  const MadeWeight weight = make_weight(device.get(), m.matrix),
                   two = make_weight(device.get(), experts.matrix);
  std::vector<float> x(4 * 64), y(4 * 8);
  size_t bytes = 0;
  ASSERT_EQ(mr_matmul_workspace_bytes(device.get(), weight.handle.get(), 4, &bytes), MR_OK);
  const Guarded workspace(bytes);
  const mr_matmul_args good{weight.handle.get(), nullptr, x.data(), 0, y.data(), 0, 4, 0};
  const auto refused = [&](auto change, mr_status status, const char* word) {
    mr_matmul_args bad = good;
    change(bad);
    EXPECT_REFUSED(mr_matmul(device.get(), &bad, workspace.data(), bytes, nullptr), status, word);
  };
  EXPECT_EQ(mr_matmul(device.get(), &good, workspace.data(), bytes, nullptr), MR_OK) << mr_last_error();
  EXPECT_REFUSED(mr_matmul(device.get(), &good, workspace.data(), bytes - 64, nullptr), MR_ERROR_NO_MEMORY,
                 "workspace");
  EXPECT_REFUSED(mr_matmul(device.get(), &good, nullptr, bytes, nullptr), MR_ERROR_INVALID, "workspace");
  EXPECT_REFUSED(mr_matmul(other.get(), &good, workspace.data(), bytes, nullptr), MR_ERROR_INVALID,
                 "another device");
  EXPECT_REFUSED(mr_matmul(device.get(), nullptr, workspace.data(), bytes, nullptr), MR_ERROR_INVALID,
                 "args");
  refused([](auto& a) { a.x = nullptr; }, MR_ERROR_INVALID, "args.x");
  refused([](auto& a) { a.y = nullptr; }, MR_ERROR_INVALID, "args.y");
  refused([](auto& a) { a.weight = nullptr; }, MR_ERROR_INVALID, "args.weight");
  refused([&](auto& a) { a.weight = two.handle.get(); }, MR_ERROR_INVALID, "2 experts");
  refused([](auto& a) { a.rows = -4; }, MR_ERROR_INVALID, "args.rows");
  refused([](auto& a) { a.x_stride = 63; }, MR_ERROR_INVALID, "x_stride");
  refused([](auto& a) { a.y_stride = -8; }, MR_ERROR_INVALID, "y_stride");
  refused([](auto& a) { a.accumulate = 2; }, MR_ERROR_INVALID, "accumulate");
}

TEST(MrQuant, DequantizesWhatItQuantized) {
  const DevicePtr device = open_cpu();
  std::mt19937 random(9);
  const std::vector<float> x = random_floats(random, 40 * 512);
  for (const mr_dtype type : kTypes) {
    if (type == MR_F8_E4M3 || type == MR_MXFP4_SPLIT) continue;  // no blocks with scales of their own
    size_t row_bytes = 0;
    ASSERT_EQ(mr_row_bytes(type, 512, &row_bytes), MR_OK);
    std::vector<uint8_t> codes(40 * row_bytes);
    ASSERT_EQ(mr_quantize(device.get(), type, x.data(), 40, 512, nullptr, codes.data()), MR_OK)
        << mr_last_error();
    const mr_matrix matrix{type, 1, 40, 512, codes.data(), 0, nullptr, MR_F32, 0, 0, 0};
    std::vector<float> back(39 * 512);
    ASSERT_EQ(mr_dequantize(device.get(), &matrix, 1, 39, back.data()), MR_OK) << mr_last_error();
    const double error = relative_error(back, {x.begin() + 512, x.end()});
    EXPECT_LT(error, type == MR_F32    ? 1e-9
                     : type <= MR_BF16 ? 0.003
                     : type == MR_Q8_0 ? 0.01
                                       : 0.15)
        << mr_dtype_name(type);
  }
}

TEST(MrQuant, RowsBeforeANaNAreNotWritten) {
  std::vector<float> x(40 * 64, 1.0f);
  x.back() = NAN;
  std::vector<uint8_t> out(40 * 68, 0xee);
  EXPECT_REFUSED(mr_quantize(open_cpu(nullptr, 1).get(), MR_Q8_0, x.data(), 40, 64, nullptr, out.data()),
                 MR_ERROR_INVALID, "NaN");
  EXPECT_EQ(out, std::vector<uint8_t>(40 * 68, 0xee));
}

TEST(MrQuant, RefusesBadArguments) {
  const DevicePtr device = open_cpu(nullptr, 1);
  std::vector<float> x(64, 1.0f);
  std::vector<uint8_t> out(512);
  size_t bytes = 0;
  EXPECT_REFUSED(mr_row_bytes(MR_Q8_0, 33, &bytes), MR_ERROR_INVALID, "multiple of 32");
  EXPECT_REFUSED(mr_quantize(device.get(), MR_Q8_0, nullptr, 1, 64, nullptr, out.data()), MR_ERROR_INVALID,
                 "x");
  EXPECT_REFUSED(mr_quantize(device.get(), MR_Q8_0, x.data(), 1, 64, nullptr, nullptr), MR_ERROR_INVALID,
                 "out");
  EXPECT_REFUSED(mr_quantize(device.get(), MR_Q8_0, x.data(), -1, 64, nullptr, out.data()), MR_ERROR_INVALID,
                 "rows");
  EXPECT_REFUSED(mr_quantize(device.get(), MR_F8_E4M3, x.data(), 1, 64, nullptr, out.data()),
                 MR_ERROR_UNSUPPORTED, "f8_e4m3");
  x[5] = NAN;
  EXPECT_REFUSED(mr_quantize(device.get(), MR_Q8_0, x.data(), 1, 64, nullptr, out.data()), MR_ERROR_INVALID,
                 "NaN");
  const mr_matrix matrix{MR_F32, 1, 2, 32, x.data(), 0, nullptr, MR_F32, 0, 0, 0};
  std::vector<float> back(64);
  EXPECT_REFUSED(mr_dequantize(device.get(), &matrix, 1, 2, back.data()), MR_ERROR_INVALID, "rows");
  EXPECT_REFUSED(mr_dequantize(device.get(), &matrix, -1, 2, back.data()), MR_ERROR_INVALID, "first");
  EXPECT_REFUSED(mr_dequantize(device.get(), &matrix, 0, 2, nullptr), MR_ERROR_INVALID, "out");
}

}  // namespace
}  // namespace millrace::api_test
