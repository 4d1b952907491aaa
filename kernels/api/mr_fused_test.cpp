// The fused operations of the C API on every instruction set this machine runs: against double, and each
// one's bits against scalar's. Memory ends at a page nobody may touch; outputs are poisoned and gaps between
// rows stay so. tests/gpu/fused_test.py compares the same functions with torch.
#include "kernels/api/rows_test_support.h"
#include "kernels/quant/philox.h"
#include "kernels/reference/naive_rotary.h"

namespace millrace::api_test {
namespace {

struct Shape {
  int64_t rows, cols, gap;
};
constexpr Shape kShapes[] = {{1, 1, 0}, {1, 16, 0}, {3, 7, 2}, {37, 33, 5}, {2, 257, 0}, {5, 130, 30}};

mr_status norm_backward(mr_device* device, const mr_norm_backward_args& args) {
  size_t bytes = 0;
  const mr_status status = mr_norm_backward_workspace_bytes(device, &args, &bytes);
  if (status != MR_OK) return status;
  const Guarded workspace(bytes);
  std::memset(workspace.data(), kPoison, bytes);
  return mr_norm_backward(device, &args, workspace.data(), bytes, nullptr);
}

TEST(MrFused, Norms) {
  std::mt19937 random(1);
  int number = 0;
  for (const Shape& shape : kShapes) {
    for (const mr_norm_kind kind : {MR_NORM_RMS, MR_NORM_LAYER}) {
      const auto [rows, cols, gap] = shape;
      const mr_dtype in = kFloatTypes[number % 3], out = kFloatTypes[number / 2 % 3];
      const bool layer = kind == MR_NORM_LAYER, with_residual = number++ % 3 != 0;
      Matrix x(rows, cols, in, gap, random), residual(rows, cols, out, gap, random),
          dy(rows, cols, out, gap, random);
      Matrix weight(1, cols, MR_BF16, 0, random), bias(1, cols, MR_F32, 0, random);
      Matrix sum(rows, cols, in, gap), y(rows, cols, out, gap), dx(rows, cols, in, gap);
      Matrix mean(1, rows, MR_F32, 0), rstd(1, rows, MR_F32, 0), dweight(1, cols, MR_F32, 0),
          dbias(1, cols, out, 0);
      mr_norm_args args{};
      args.kind = kind;
      args.rows = rows;
      args.cols = cols;
      args.x = x.view();
      if (with_residual) args.residual = residual.view(), args.sum = sum.view();
      args.y = y.view();
      args.weight = weight.vector();
      args.bias = bias.vector();
      args.weight_offset = 0.5f;
      args.eps = 1e-5f;
      args.mean = reinterpret_cast<float*>(mean.at(0, 0));
      args.rstd = reinterpret_cast<float*>(rstd.at(0, 0));
      same_on_all({&y, &sum, &mean, &rstd},
                  [&](mr_device* device) { return mr_norm(device, &args, nullptr); });
      Matrix& s = with_residual ? sum : x;
      const mr_norm_backward_args back{kind,          rows,        cols,
                                       s.view(),      dy.view(),   mr_rows{},
                                       dx.view(),     args.weight, args.weight_offset,
                                       args.mean,     args.rstd,   dweight.vector(),
                                       dbias.vector()};
      same_on_all({&dx, &dweight, &dbias}, [&](mr_device* device) { return norm_backward(device, back); });
      Row factor = weight.row(0), want_dweight(static_cast<size_t>(cols)),
          want_dbias(static_cast<size_t>(cols));
      for (double& v : factor) v += 0.5;
      for (int64_t r = 0; r < rows; ++r) {
        const std::string what = "row " + std::to_string(r) + " of " + std::to_string(cols);
        if (with_residual) {
          Row want = x.row(r), other = residual.row(r);
          for (size_t i = 0; i < want.size(); ++i) want[i] += other[i];
          expect_close(sum.row(r), want, in, "sum, " + what);
        }
        const reference::NormedRow of = reference::normed(s.row(r), layer, 1e-5);
        Row want = of.n;
        for (size_t i = 0; i < want.size(); ++i) want[i] = want[i] * factor[i] + bias.row(0)[i];
        expect_close(y.row(r), want, out, what);
        expect_close(dx.row(r),
                     reference::norm_backward(of, dy.row(r), factor, layer, want_dweight, want_dbias), in,
                     "dx, " + what);
      }
      expect_close(dweight.row(0), want_dweight, MR_F32, "dweight");
      expect_close(dbias.row(0), want_dbias, out, "dbias");
    }
  }
}

TEST(MrFused, NormsInPlaceAndOfManyBlocks) {
  std::mt19937 random(2);
  const int64_t rows = 1100, cols = 20;  // 64 blocks of 18 rows
  Matrix x(rows, cols, MR_F32, 0, random), dy(rows, cols, MR_F32, 0, random),
      rstd(1, rows, MR_F32, 0, random);
  Matrix dx(rows, cols, MR_F32, 0), dweight(1, cols, MR_F32, 0);
  mr_norm_backward_args args{};
  args.rows = rows;
  args.cols = cols;
  args.x = x.view();
  args.dy = dy.view();
  args.dx = dx.view();
  args.rstd = reinterpret_cast<float*>(rstd.at(0, 0));
  args.dweight = dweight.vector();
  same_on_all({&dx, &dweight}, [&](mr_device* device) { return norm_backward(device, args); });
  Row want(cols);
  const Row all_rstd = rstd.row(0);
  for (int64_t r = 0; r < rows; ++r) {
    const Row of_x = x.row(r), of_dy = dy.row(r);
    for (size_t i = 0; i < cols; ++i) want[i] += of_dy[i] * of_x[i] * all_rstd[static_cast<size_t>(r)];
  }
  expect_close(dweight.row(0), want, MR_F32, "dweight of 1,100 rows");
  const DevicePtr device = open_cpu();
  const std::vector<uint8_t> apart = dx.bytes();
  args.dx = args.dy;  // the gradient in the place of dy
  ASSERT_EQ(norm_backward(device.get(), args), MR_OK) << mr_last_error();
  EXPECT_EQ(dy.bytes(), apart);
  args.rows = 0;  // the sum over no rows is zero
  dweight.poison();
  ASSERT_EQ(norm_backward(device.get(), args), MR_OK) << mr_last_error();
  EXPECT_EQ(dweight.row(0), Row(cols));
}

TEST(MrFused, QuantizedNorms) {
  std::mt19937 random(3);
  for (const Shape& shape : kShapes) {
    for (const mr_norm_quantize how : {MR_QUANTIZE_FP8_1X128, MR_QUANTIZE_FP8_ROW, MR_QUANTIZE_INT8_ROW}) {
      const auto [rows, cols, gap] = shape;
      const int64_t width = how == MR_QUANTIZE_FP8_1X128 ? 128 : cols, groups = (cols + width - 1) / width;
      Matrix x(rows, cols, MR_BF16, gap, random, 3.0f), scales(rows, groups, MR_F32, 1);
      // Bytes, as halves of a two-byte type.
      const int64_t code_stride = (cols + 1) / 2 * 2;
      Matrix codes(rows, code_stride / 2, MR_F16, 0);
      mr_norm_args args{};
      args.rows = rows;
      args.cols = cols;
      args.x = x.view();
      args.eps = 1e-6f;
      args.quantize = how;
      args.codes = codes.at(0, 0);
      args.codes_stride = code_stride;
      args.scales = reinterpret_cast<float*>(scales.at(0, 0));
      args.scales_stride = groups + 1;
      same_on_all({&codes, &scales}, [&](mr_device* device) { return mr_norm(device, &args, nullptr); });
      for (int64_t r = 0; r < rows; ++r) {
        const Row y = reference::normed(x.row(r), false, 1e-6).n;
        for (int64_t c = 0; c < cols; ++c) {
          const double scale = scales.row(r)[static_cast<size_t>(c / width)];
          double most = 0;
          for (int64_t k = c / width * width; k < std::min(cols, (c / width + 1) * width); ++k) {
            most = std::max(most, std::abs(y[static_cast<size_t>(k)]));
          }
          const bool int8 = how == MR_QUANTIZE_INT8_ROW;
          ASSERT_NEAR(scale, most / (int8 ? 127 : 448), 1e-5 * most);
          const uint8_t code = *(codes.at(r, 0) + c);
          const double value = int8 ? static_cast<int8_t>(code) : to_float(Fp8E4M3{code});
          const double want = y[static_cast<size_t>(c)];
          const double step = int8 ? 0.501 * scale : std::max(std::abs(want) / 15.9, scale * 0x1p-10 * 1.01);
          ASSERT_NEAR(value * scale, want, step) << "row " << r << ", column " << c;
        }
      }
    }
  }
}

TEST(MrFused, Activations) {
  std::mt19937 random(4);
  int number = 0;
  for (const Shape& shape : kShapes) {
    for (int kind = MR_ACTIVATION_GELU; kind <= MR_ACTIVATION_GEGLU_TANH; ++kind) {
      const auto [rows, cols, gap] = shape;
      const mr_dtype in = kFloatTypes[number % 3], out = kFloatTypes[number++ / 2 % 3];
      const bool gated = kind >= MR_ACTIVATION_SWIGLU, clamped = kind == MR_ACTIVATION_CLAMPED_SWIGLU;
      const double alpha = 1.702, limit = 2.0;
      Matrix x(rows, cols, in, gap, random, 3.0f), up(rows, cols, in, gap, random, 2.0f);
      Matrix dy(rows, cols, out, gap, random), y(rows, cols, out, gap), dx(rows, cols, in, gap),
          dup(rows, cols, in, gap);
      const mr_rows none{};
      const mr_activation_args args{static_cast<mr_activation_kind>(kind),
                                    rows,
                                    cols,
                                    x.view(),
                                    gated ? up.view() : none,
                                    y.view(),
                                    1.702f,
                                    2.0f};
      same_on_all({&y}, [&](mr_device* device) { return mr_activation_rows(device, &args, nullptr); });
      const mr_activation_backward_args back{args.kind, rows,      cols,      args.x,
                                             args.up,   dy.view(), dx.view(), gated ? dup.view() : none,
                                             1.702f,    2.0f};
      same_on_all({&dx, &dup},
                  [&](mr_device* device) { return mr_activation_rows_backward(device, &back, nullptr); });
      const auto gate = kind == MR_ACTIVATION_GELU || kind == MR_ACTIVATION_GEGLU ? reference::Gate::kGelu
                        : kind == MR_ACTIVATION_GELU_TANH || kind == MR_ACTIVATION_GEGLU_TANH
                            ? reference::Gate::kGeluTanh
                            : reference::Gate::kSilu;
      for (int64_t r = 0; r < rows; ++r) {
        Row want(static_cast<size_t>(cols)), want_dx = want, want_dup = want;
        for (size_t i = 0; i < want.size(); ++i) {
          const double g = x.row(r)[i], u = gated ? up.row(r)[i] : 1.0, d = dy.row(r)[i];
          // g sigmoid(alpha g) = silu(alpha g) / alpha
          const double inner = clamped ? alpha * std::min(g, limit) : g;
          const double value = reference::gate_value(gate, inner) / (clamped ? alpha : 1.0);
          const double slope = clamped && g > limit ? 0.0 : reference::gate_slope(gate, inner);
          const double by = clamped ? std::clamp(u, -limit, limit) + 1.0 : u;
          want[i] = value * by;
          want_dx[i] = d * by * slope;
          want_dup[i] = clamped && std::abs(u) > limit ? 0.0 : d * value;
        }
        const std::string what = "kind " + std::to_string(kind) + ", row " + std::to_string(r);
        expect_close(y.row(r), want, out, what);
        expect_close(dx.row(r), want_dx, in, "dx, " + what);
        if (gated) expect_close(dup.row(r), want_dup, in, "dup, " + what);
      }
    }
  }
}

TEST(MrFused, Rotary) {
  std::mt19937 random(5);
  struct Heads {
    int32_t heads, head_dim, half, interleaved;
  };
  int number = 0;
  for (const Heads& of : {Heads{2, 64, 32, 0}, Heads{3, 64, 20, 1}, Heads{2, 9, 3, 0}, Heads{1, 40, 20, 1},
                          Heads{2, 96, 16, 0}, Heads{1, 4, 0, 0}}) {
    const int64_t rows = 5, cols = of.heads * of.head_dim, gap = 3;
    const mr_dtype type = kFloatTypes[number++ % 3];
    Matrix x(rows, cols, type, gap, random), y(rows, cols, type, gap), back(rows, cols, type, gap);
    std::vector<float> inv_freq;
    for (int i = 0; i < of.half; ++i) inv_freq.push_back(std::pow(10000.0f, -static_cast<float>(i) / 32.0f));
    const std::vector<int32_t> positions{0, 1, 77, 4095, 131071};
    mr_rotary_args args{{inv_freq.data(), of.half, 1.25f, of.interleaved},
                        positions.data(),
                        rows,
                        of.heads,
                        of.head_dim,
                        x.view(),
                        y.view(),
                        0};
    same_on_all({&y}, [&](mr_device* device) { return mr_rotary_rows(device, &args, nullptr); });
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<float> want;
      for (const double v : x.row(r)) want.push_back(static_cast<float>(v));
      for (int32_t h = 0; h < of.heads; ++h) {
        reference::rotate({inv_freq, 1.25f, of.interleaved != 0}, positions[static_cast<size_t>(r)],
                          want.data() + h * of.head_dim);
      }
      expect_close(y.row(r), {want.begin(), want.end()}, type,
                   "position " + std::to_string(positions[static_cast<size_t>(r)]));
    }
    // There and back is the magnitude's square: the transpose of the rotation is its inverse.
    args.x = y.view();
    args.y = back.view();
    args.inverse = 1;
    same_on_all({&back}, [&](mr_device* device) { return mr_rotary_rows(device, &args, nullptr); });
    for (int64_t r = 0; r < rows; ++r) {
      Row want = x.row(r);
      for (size_t i = 0; i < want.size(); ++i) {
        if (static_cast<int32_t>(i) % of.head_dim < 2 * of.half) want[i] *= 1.25 * 1.25;
      }
      expect_close(back.row(r), want, type, "and back");
    }
  }
}

TEST(MrFused, SoftmaxAndCrossEntropy) {
  std::mt19937 random(6);
  int number = 0;
  for (const Shape& shape : kShapes) {
    const auto [rows, cols, gap] = shape;
    const mr_dtype in = kFloatTypes[number % 3], out = kFloatTypes[(number + number / 3) % 3];
    const float scale = number++ % 2 == 0 ? 0.7f : -1.5f;
    Matrix x(rows, cols, in, gap, random, 4.0f), dy(rows, cols, out, gap, random);
    Matrix y(rows, cols, out, gap), dx(rows, cols, in, gap);
    const mr_softmax_args args{rows, cols, x.view(), y.view(), scale};
    same_on_all({&y}, [&](mr_device* device) { return mr_softmax(device, &args, nullptr); });
    const mr_softmax_backward_args back{rows, cols, y.view(), dy.view(), dx.view(), scale};
    same_on_all({&dx}, [&](mr_device* device) { return mr_softmax_backward(device, &back, nullptr); });

    std::vector<int32_t> targets;
    for (int64_t r = 0; r < rows; ++r) targets.push_back(r == 2 ? -7 : static_cast<int32_t>(random() % cols));
    Matrix loss(1, rows, MR_F32, 0), lse(1, rows, MR_F32, 0), dloss(1, rows, MR_F32, 0, random),
        dlogits(rows, cols, out, gap);
    const auto floats = [](Matrix& m) { return reinterpret_cast<float*>(m.at(0, 0)); };
    const mr_cross_entropy_args entropy{rows, cols, x.view(), targets.data(), -7, floats(loss), floats(lse)};
    same_on_all({&loss, &lse},
                [&](mr_device* device) { return mr_cross_entropy(device, &entropy, nullptr); });
    const mr_cross_entropy_backward_args entropy_back{rows, cols,        x.view(),      targets.data(),
                                                      -7,   floats(lse), floats(dloss), dlogits.view()};
    same_on_all({&dlogits},
                [&](mr_device* device) { return mr_cross_entropy_backward(device, &entropy_back, nullptr); });
    for (int64_t r = 0; r < rows; ++r) {
      const std::string what = "row " + std::to_string(r) + " of " + std::to_string(cols);
      const auto at = static_cast<size_t>(r);
      expect_close(y.row(r), reference::softmax(x.row(r), scale), out, what);
      expect_close(dx.row(r), reference::softmax_backward(y.row(r), dy.row(r), scale), in, "dx, " + what);
      const double want_lse = reference::log_sum_exp(x.row(r)), d = dloss.row(0)[at];
      const bool ignored = targets[at] == -7;
      EXPECT_NEAR(lse.row(0)[at], want_lse, 1e-5);
      EXPECT_NEAR(loss.row(0)[at], ignored ? 0.0 : want_lse - x.row(r)[static_cast<size_t>(targets[at])],
                  1e-5);
      Row want = reference::softmax(x.row(r), 1.0);
      if (!ignored) want[static_cast<size_t>(targets[at])] -= 1.0;
      for (double& v : want) v *= ignored ? 0.0 : d;
      expect_close(dlogits.row(r), want, out, "dlogits, " + what);
    }
  }
}

// Numbers that are rounded by hand somewhere: ties, overflow, infinities, NaN with any payload, alone and
// among others.
TEST(MrFused, EveryKindOfNumberIsRoundedToBFloat16) {
  const std::vector<uint32_t> odd{0x3f808000u, 0x3f818000u, 0x3f808001u, 0x7f7fffffu,
                                  0x7f800000u, 0xff800000u, 0x7f800001u, 0x7fc00000u,
                                  0xffffffffu, 0x7f80ffffu, 0x00008000u, 0x80018000u};
  std::vector<float> x(16 * odd.size() + 5, 1.5f);
  for (size_t i = 0; i < odd.size(); ++i) std::memcpy(&x[16 * i + i % 16], &odd[i], 4);
  x[2] = INFINITY, x[5] = -INFINITY;  // whose sum is NaN
  Matrix table(1, static_cast<int64_t>(x.size()), MR_F32, 0),
      y(1, static_cast<int64_t>(x.size()), MR_BF16, 0);
  std::memcpy(table.at(0, 0), x.data(), x.size() * sizeof(float));
  const int32_t token = 0;
  const mr_embedding_args args{1, static_cast<int64_t>(x.size()), 1, &token, table.view(), y.view(), 1.0f};
  same_on_all({&y}, [&](mr_device* device) { return mr_embedding(device, &args, nullptr); });
  for (size_t i = 0; i < x.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, y.at(0, static_cast<int64_t>(i)), 2);
    // A multiplication by 1 makes a signalling NaN a quiet one.
    EXPECT_EQ(bits, to_bfloat16(x[i]).bits) << "element " << i;
  }
}

// y of ones with an eps of 0 is the weight itself: codes have the bits of y / scale, whatever it is made of.
TEST(MrFused, CodesAreThoseOfADivision) {
  std::mt19937 random(19);
  constexpr int64_t kCols = 128;
  int all_ones = 0;
  for (int number = 0; number < 60; ++number) {
    const float magnitude = std::ldexp(1.0f, number * 4 - 120);  // 2^-120 to 2^116
    Matrix weight(1, kCols, MR_F32, 0, random, magnitude), x(1, kCols, MR_F32, 0);
    for (int64_t c = 0; c < kCols; ++c) write(x.at(0, c), MR_F32, 1.0f);
    if (number % 2 == 0) {  // a scale whose fraction is all ones, where there is one
      const float scale = std::nextafter(magnitude, 0.0f);
      for (float most = 448.0f * scale; most <= 448.0f * magnitude; most = std::nextafter(most, INFINITY)) {
        if (most / 448.0f != scale) continue;
        for (int64_t c = 0; c < kCols; ++c)
          write(weight.at(0, c), MR_F32, static_cast<float>(read(weight.at(0, c), MR_F32)) * 90.0f);
        write(weight.at(0, 7), MR_F32, most);
        ++all_ones;
        break;
      }
    }
    for (const mr_norm_quantize quantize : {MR_QUANTIZE_FP8_1X128, MR_QUANTIZE_INT8_ROW}) {
      for (const std::string& isa : isas()) {
        const DevicePtr device = open_cpu(isa.c_str(), 1);
        std::vector<uint8_t> codes(kCols);
        float scale = -1.0f;
        mr_norm_args args{};
        args.kind = MR_NORM_RMS, args.rows = 1, args.cols = kCols;
        args.x = x.view(), args.weight = weight.vector();
        args.quantize = quantize, args.codes = codes.data(), args.scales = &scale;
        ASSERT_EQ(mr_norm(device.get(), &args, nullptr), MR_OK) << mr_last_error();
        const bool int8 = quantize == MR_QUANTIZE_INT8_ROW;
        float most = 0.0f;
        for (const double v : weight.row(0)) most = std::max(most, static_cast<float>(std::abs(v)));
        ASSERT_EQ(scale, most / (int8 ? 127.0f : 448.0f)) << isa;
        for (int64_t c = 0; c < kCols; ++c) {
          const float q = static_cast<float>(read(weight.at(0, c), MR_F32)) / scale;
          const auto want =
              int8 ? static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(q))) : to_fp8_e4m3(q).bits;
          ASSERT_EQ(codes[static_cast<size_t>(c)], want) << isa << ", 2^" << number * 4 - 120 << ", " << q;
        }
      }
    }
  }
  EXPECT_GT(all_ones, 5);
}

TEST(MrFused, Embedding) {
  std::mt19937 random(8);
  int number = 0;
  for (const Shape& shape : kShapes) {
    const auto [rows, cols, gap] = shape;
    const int64_t vocab = 1 + rows / 2;
    const mr_dtype in = kFloatTypes[number % 3], out = kFloatTypes[(number++ + 1) % 3];
    Matrix table(vocab, cols, in, gap, random), dy(rows, cols, out, gap, random);
    Matrix y(rows, cols, out, gap), dtable(vocab, cols, in, gap);
    std::vector<int32_t> tokens;
    for (int64_t t = 0; t < rows; ++t) tokens.push_back(static_cast<int32_t>(random() % vocab));
    const mr_embedding_args args{rows, cols, vocab, tokens.data(), table.view(), y.view(), 3.0f};
    same_on_all({&y}, [&](mr_device* device) { return mr_embedding(device, &args, nullptr); });
    mr_embedding_backward_args back{rows, cols, vocab, tokens.data(), dy.view(), dtable.view(), 3.0f, 0};
    const auto run = [&](mr_device* device) {
      size_t bytes = 0;
      const mr_status status = mr_embedding_backward_workspace_bytes(device, &back, &bytes);
      if (status != MR_OK) return status;
      const Guarded workspace(bytes);
      std::memset(workspace.data(), kPoison, bytes);
      return mr_embedding_backward(device, &back, workspace.data(), bytes, nullptr);
    };
    same_on_all({&dtable}, run);
    std::vector<Row> want(static_cast<size_t>(vocab), Row(static_cast<size_t>(cols)));
    for (int64_t t = 0; t < rows; ++t) {
      Row of = table.row(tokens[static_cast<size_t>(t)]);
      for (size_t i = 0; i < of.size(); ++i) {
        of[i] *= 3.0;
        want[static_cast<size_t>(tokens[static_cast<size_t>(t)])][i] += 3.0 * dy.row(t)[i];
      }
      expect_close(y.row(t), of, out, "token " + std::to_string(t));
    }
    for (int64_t v = 0; v < vocab; ++v)
      expect_close(dtable.row(v), want[static_cast<size_t>(v)], in, "dtable");
    back.accumulate = 1;
    ASSERT_EQ(run(open_cpu().get()), MR_OK) << mr_last_error();
    for (Row& row : want) {
      for (double& v : row) v *= 2.0;
    }
    for (int64_t v = 0; v < vocab; ++v)
      expect_close(dtable.row(v), want[static_cast<size_t>(v)], in, "accumulated");
  }
}

TEST(MrFused, PhiloxHasItsKnownAnswers) {
  // Of the authors' Random123, kat_vectors.
  const auto expect = [](philox::Words counter, uint64_t key, std::vector<uint32_t> want) {
    const philox::Words got = philox::generate(counter, philox::keys_of(key));
    EXPECT_EQ(std::vector<uint32_t>(got.w, got.w + 4), want);
  };
  expect({{0, 0, 0, 0}}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect({{~0u, ~0u, ~0u, ~0u}}, ~uint64_t{0}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(MrFused, Dropout) {
  std::mt19937 random(9);
  int number = 0;
  for (const Shape& shape : kShapes) {
    const auto [rows, cols, gap] = shape;
    const mr_dtype in = kFloatTypes[number % 3], out = kFloatTypes[number++ / 2 % 3];
    Matrix x(rows, cols, in, gap, random), y(rows, cols, out, gap);
    const uint64_t seed = 0x0123456789abcdef, offset = 0xfedcba9876543210;
    const mr_dropout_args args{rows, cols, x.view(), y.view(), 0.375f, seed, offset};
    same_on_all({&y}, [&](mr_device* device) { return mr_dropout(device, &args, nullptr); });
    const philox::Keys keys = philox::keys_of(seed);
    for (int64_t r = 0; r < rows; ++r) {
      Row want = x.row(r);
      for (size_t c = 0; c < want.size(); ++c) {
        const philox::Words words = philox::generate(
            {{static_cast<uint32_t>(c / 4), static_cast<uint32_t>(r), 0x76543210, 0xfedcba98}}, keys);
        want[c] *= words.w[c % 4] >= 0x60000000u ? 1.6 : 0.0;
      }
      expect_close(y.row(r), want, out, "row " + std::to_string(r));
    }
  }
  // Long rows are cut into tasks: the columns keep their numbers.
  Matrix x(1, 40000, MR_F32, 0, random), y(1, 40000, MR_F32, 0), part(1, 4, MR_F32, 0);
  const mr_dropout_args args{1, 40000, x.view(), y.view(), 0.5f, 3, 4};
  same_on_all({&y}, [&](mr_device* device) { return mr_dropout(device, &args, nullptr); });
  const philox::Words words = philox::generate({{39996 / 4, 0, 4, 0}}, philox::keys_of(3));
  for (size_t w = 0; w < 4; ++w) EXPECT_EQ(y.row(0)[39996 + w] != 0.0, words.w[w] >= 0x80000000u);
}

TEST(MrFused, NoRows) {
  const DevicePtr device = open_cpu();
  mr_norm_args norm{};
  norm.cols = 8;
  EXPECT_EQ(mr_norm(device.get(), &norm, nullptr), MR_OK) << mr_last_error();
  mr_softmax_args softmax{};
  softmax.cols = 8;
  EXPECT_EQ(mr_softmax(device.get(), &softmax, nullptr), MR_OK) << mr_last_error();
  mr_dropout_args dropout{};
  dropout.cols = 8;
  EXPECT_EQ(mr_dropout(device.get(), &dropout, nullptr), MR_OK) << mr_last_error();
}

TEST(MrFused, RefusesBadArguments) {
  const DevicePtr device = open_cpu(nullptr, 1);
  std::vector<float> x(64, 1.0f), y(64), s(64);
  const mr_rows from{x.data(), MR_F32, 0}, to{y.data(), MR_F32, 0};
  mr_norm_args good{};
  good.rows = 4;
  good.cols = 16;
  good.x = from;
  good.y = to;
  good.eps = 1e-5f;
  const auto refused = [&](auto change, mr_status status, const char* word) {
    mr_norm_args bad = good;
    change(bad);
    EXPECT_REFUSED(mr_norm(device.get(), &bad, nullptr), status, word);
  };
  EXPECT_EQ(mr_norm(device.get(), &good, nullptr), MR_OK) << mr_last_error();
  std::fill(y.begin(), y.end(), -1.0f);
  EXPECT_REFUSED(mr_norm(nullptr, &good, nullptr), MR_ERROR_INVALID, "device");
  EXPECT_REFUSED(mr_norm(device.get(), nullptr, nullptr), MR_ERROR_INVALID, "args");
  refused([](auto& a) { a.x.data = nullptr; }, MR_ERROR_INVALID, "args.x");
  refused([](auto& a) { a.y.data = nullptr; }, MR_ERROR_INVALID, "args.y");
  refused([](auto& a) { a.x.data = static_cast<uint8_t*>(a.x.data) + 2; }, MR_ERROR_INVALID, "args.x");
  refused([](auto& a) { a.x.stride = 15; }, MR_ERROR_INVALID, "args.x");
  refused([](auto& a) { a.x.type = MR_Q8_0; }, MR_ERROR_UNSUPPORTED, "args.x.type is q8_0");
  refused([](auto& a) { a.rows = -1; }, MR_ERROR_INVALID, "args.rows");
  refused([](auto& a) { a.cols = 0; }, MR_ERROR_INVALID, "args.cols");
  refused([](auto& a) { a.eps = -1.0f; }, MR_ERROR_INVALID, "args.eps");
  refused([](auto& a) { a.eps = NAN; }, MR_ERROR_INVALID, "args.eps");
  refused([](auto& a) { a.residual = a.x; }, MR_ERROR_INVALID, "args.sum");
  refused([&](auto& a) { a.sum = {s.data(), MR_F32, 0}; }, MR_ERROR_INVALID, "args.residual");
  refused([](auto& a) { a.codes = a.y.data; }, MR_ERROR_INVALID, "args.codes");
  refused([](auto& a) { a.quantize = MR_QUANTIZE_FP8_ROW; }, MR_ERROR_INVALID, "args.codes");
  refused([](auto& a) { a.y = {a.x.data, MR_BF16, 0}; }, MR_ERROR_INVALID, "args.y");
  refused([](auto& a) { a.x.stride = INT64_MAX / 2; }, MR_ERROR_INVALID, "args.x");

  std::vector<float> rstd(4, 1.0f), w(16);
  mr_norm_backward_args back{};
  back.rows = 4;
  back.cols = 16;
  back.x = back.dy = from;
  back.dx = to;
  EXPECT_REFUSED(mr_norm_backward(device.get(), &back, nullptr, 0, nullptr), MR_ERROR_INVALID, "args.rstd");
  back.rstd = rstd.data();
  back.dweight = {w.data(), MR_F32};
  size_t bytes = 0;
  ASSERT_EQ(mr_norm_backward_workspace_bytes(device.get(), &back, &bytes), MR_OK);
  const Guarded workspace(bytes);
  EXPECT_REFUSED(mr_norm_backward(device.get(), &back, workspace.data(), bytes - 1, nullptr),
                 MR_ERROR_NO_MEMORY, std::to_string(bytes));
  EXPECT_REFUSED(mr_norm_backward(device.get(), &back, nullptr, bytes, nullptr), MR_ERROR_INVALID,
                 "workspace");

  mr_activation_args act{MR_ACTIVATION_GELU, 4, 16, from, from, to, 0.0f, 0.0f};
  EXPECT_REFUSED(mr_activation_rows(device.get(), &act, nullptr), MR_ERROR_INVALID, "args.up");
  act.kind = static_cast<mr_activation_kind>(7);
  EXPECT_REFUSED(mr_activation_rows(device.get(), &act, nullptr), MR_ERROR_INVALID, "args.kind");
  act.kind = MR_ACTIVATION_CLAMPED_SWIGLU;
  EXPECT_REFUSED(mr_activation_rows(device.get(), &act, nullptr), MR_ERROR_INVALID, "args.limit");
  const mr_softmax_args softmax{4, 16, from, to, INFINITY};
  EXPECT_REFUSED(mr_softmax(device.get(), &softmax, nullptr), MR_ERROR_INVALID, "args.scale");
  mr_dropout_args dropout{4, 16, from, to, 1.0f, 0, 0};
  EXPECT_REFUSED(mr_dropout(device.get(), &dropout, nullptr), MR_ERROR_INVALID, "args.p");
  const std::vector<int32_t> ids{0, 15, 16, 1};
  const mr_cross_entropy_args entropy{4, 16, from, ids.data(), -100, rstd.data(), w.data()};
  EXPECT_REFUSED(mr_cross_entropy(device.get(), &entropy, nullptr), MR_ERROR_INVALID,
                 "args.targets[2] is 16");
  const mr_embedding_args embedding{4, 16, 3, ids.data(), from, to, 1.0f};
  EXPECT_REFUSED(mr_embedding(device.get(), &embedding, nullptr), MR_ERROR_INVALID, "args.tokens[1] is 15");
  mr_rotary_args rotary{{x.data(), 9, 1.0f, 0}, ids.data(), 4, 1, 16, from, to, 0};
  EXPECT_REFUSED(mr_rotary_rows(device.get(), &rotary, nullptr), MR_ERROR_INVALID, "num_freqs");
  EXPECT_EQ(y, std::vector<float>(64, -1.0f)) << "a refused call wrote";
}

}  // namespace
}  // namespace millrace::api_test
