// GEMV of every packed type against double sums over what the codec's decoders give, and each row of a batch
// against that row alone, to the bit. Needs a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/quant/dequantize.cuh"
#include "kernels/cuda/quant/random_rows.h"

namespace millrace::cuda {
namespace {

constexpr DType kTypes[] = {DType::kQ4_K, DType::kQ5_K, DType::kQ6_K, DType::kQ4_0, DType::kQ4_1,
                            DType::kQ4_Z, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0, DType::kBF16};
constexpr size_t kGuard = 256;  // values behind the outputs, which nobody may touch

template <class T>
DeviceBuffer to_device(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T), "test");
  MILLRACE_CUDA_TRY(cudaMemcpy(buffer.as<void>(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice));
  return buffer;
}
template <class T>
std::vector<T> to_host(const DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  MILLRACE_CUDA_TRY(cudaMemcpy(values.data(), buffer.as<void>(), buffer.bytes(), cudaMemcpyDeviceToHost));
  return values;
}

struct Matrix {
  std::vector<float> values;  // [rows, cols], as the codec has them
  DeviceBuffer tiles;
  PackedMatrix packed;

  Matrix(const Device& device, DType type, int64_t rows, int64_t cols, std::mt19937& random)
      : values(static_cast<size_t>(rows * cols)), packed(packed_shape(type, rows, cols)) {
    const std::vector<uint8_t> raw = random_rows(type, rows, cols, random);
    DeviceMatrix m;
    m.data = raw.data();
    m.rows = rows, m.cols = cols, m.type = type;
    m.row_bytes = static_cast<int64_t>(bytes_of(type, cols));
    with_decoder(type, [&](auto decoder) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; c += 8)
          decltype(decoder)::decode8(m, r, c, 8, &values[static_cast<size_t>(r * cols + c)]);
      }
    });
    const DeviceBuffer source = to_device(raw);
    m.data = source.as<const uint8_t>();
    tiles = DeviceBuffer(static_cast<size_t>(packed.tiles_per_expert) * packed.tile_bytes, "test");
    launch_repack(m, 0, packed, tiles.as<uint8_t>(), {device, nullptr});
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
    packed.tiles = tiles.as<const uint8_t>();
  }
  double dot(int64_t row, const double* x) const {
    double sum = 0;
    for (int64_t c = 0; c < packed.cols; ++c)
      sum += values[static_cast<size_t>(row * packed.cols + c)] * x[c];
    return sum;
  }
};

std::vector<float> numbers(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}
std::vector<double> rms_normed(const float* x, const std::vector<float>& weight, double eps) {
  double sum = 0;
  for (size_t i = 0; i < weight.size(); ++i) sum += static_cast<double>(x[i]) * x[i];
  const double scale = 1 / std::sqrt(sum / static_cast<double>(weight.size()) + eps);
  std::vector<double> y(weight.size());
  for (size_t i = 0; i < y.size(); ++i) y[i] = x[i] * scale * weight[i];
  return y;
}
// ||found - expected|| / ||expected||; NaN is infinite.
double relative_error(const std::vector<double>& found, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (found[i] - expected[i]) * (found[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::isfinite(error) ? std::sqrt(error / norm) : INFINITY;
}
// Weights and activations of eight bits of mantissa, each off by a third of 2^-8 or so; independent.
constexpr double kBound = 4e-3;

struct Shape {
  int64_t rows, cols;
};
// Rows that fill no tile, a pair's single tile; columns with idle warps, a last K step, several stages.
std::vector<Shape> shapes_of(DType type) {
  if (info(type).block_elements == 256) return {{37, 256}, {1096, 1280}, {264, 4096}, {40, 14336}};
  return {{9, 32}, {37, 160}, {1096, 1280}, {264, 2880}, {264, 4096}, {40, 14336}};
}

TEST(DenseGemv, TwoMatricesWithNormAndBias) {
  SKIP_WITHOUT_GPU("GEMV was not tested on one");
  const Device device = Device::open(0);
  std::mt19937 random(1);
  for (const DType type : kTypes) {
    for (const Shape& shape : shapes_of(type)) {
      const Matrix first(device, type, shape.rows, shape.cols, random),
          second(device, type, 17, shape.cols, random);
      const std::vector<float> x = numbers(static_cast<size_t>(4 * shape.cols), random),
                               weight = numbers(static_cast<size_t>(shape.cols), random),
                               bias = numbers(static_cast<size_t>(shape.rows), random);
      const DeviceBuffer dx = to_device(x), dw = to_device(weight), db = to_device(bias);
      std::vector<std::vector<float>> outs;
      for (const int32_t tokens : {4, 1, 3}) {
        const auto rows = static_cast<size_t>(shape.rows), count = static_cast<size_t>(tokens);
        std::vector<float> start(count * (rows + 17) + kGuard, -7.5f);
        const DeviceBuffer out = to_device(start);
        Gemv op;
        op.num_parts = 2;
        op.parts[0] = {first.packed, db.as<const float>(), out.as<float>()};
        op.parts[1] = {second.packed, nullptr, out.as<float>() + count * rows};
        op.x = dx.as<const float>(), op.norm_weight = dw.as<const float>(), op.eps = 1e-5f;
        op.tokens = tokens;
        launch_gemv(op, {device, nullptr});
        MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
        outs.push_back(to_host<float>(out));
        std::vector<double> found, expected;
        for (size_t t = 0; t < count; ++t) {
          const std::vector<double> normed =
              rms_normed(&x[t * static_cast<size_t>(shape.cols)], weight, 1e-5);
          for (int64_t r = 0; r < shape.rows; ++r) {
            found.push_back(outs.back()[t * rows + static_cast<size_t>(r)]);
            expected.push_back(first.dot(r, normed.data()) + bias[static_cast<size_t>(r)]);
          }
          for (int64_t r = 0; r < 17; ++r) {
            found.push_back(outs.back()[count * rows + t * 17 + static_cast<size_t>(r)]);
            expected.push_back(second.dot(r, normed.data()));
          }
        }
        EXPECT_LT(relative_error(found, expected), kBound)
            << info(type).name << " " << shape.rows << " x " << shape.cols << ", tokens " << tokens;
        for (size_t i = 0; i < kGuard; ++i) ASSERT_EQ(outs.back()[count * (rows + 17) + i], -7.5f);
      }
      EXPECT_EQ(0, std::memcmp(outs[0].data(), outs[1].data(), static_cast<size_t>(shape.rows) * 4))
          << info(type).name;
      EXPECT_EQ(0, std::memcmp(outs[0].data(), outs[2].data(), static_cast<size_t>(3 * shape.rows) * 4))
          << info(type).name;
    }
  }
}

// Gate and up with the activation, then down with the residual: a feed-forward block.
TEST(DenseGemv, GateUpThenDown) {
  SKIP_WITHOUT_GPU("GEMV was not tested on one");
  const Device device = Device::open(0);
  std::mt19937 random(2);
  for (const DType type : kTypes) {
    const int64_t hidden = 512, ffn = 2304;
    const Matrix gate(device, type, ffn, hidden, random), up(device, type, ffn, hidden, random),
        down(device, type, hidden, ffn, random);
    const std::vector<float> x = numbers(static_cast<size_t>(4 * hidden), random),
                             weight(static_cast<size_t>(hidden), 0.02f);
    const DeviceBuffer dw = to_device(weight);
    std::vector<float> outs[2];
    for (const int32_t tokens : {4, 1}) {
      const auto count = static_cast<size_t>(tokens), width = static_cast<size_t>(ffn);
      const DeviceBuffer dx = to_device(x);
      const DeviceBuffer act = to_device(std::vector<uint16_t>(count * width + kGuard, 0x1234));
      Gemv op;
      op.num_parts = 2;
      op.parts[0] = {gate.packed, nullptr, nullptr}, op.parts[1] = {up.packed, nullptr, nullptr};
      op.x = dx.as<const float>(), op.norm_weight = dw.as<const float>(), op.eps = 1e-5f;
      op.tokens = tokens;
      op.act = act.as<uint16_t>();
      launch_gemv(op, {device, nullptr});
      Gemv second;
      second.num_parts = 1;
      second.parts[0] = {down.packed, nullptr, dx.as<float>()};
      second.x_bf16 = act.as<const uint16_t>();
      second.tokens = tokens, second.add = true;
      launch_gemv(second, {device, nullptr});
      MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
      const std::vector<uint16_t> acts = to_host<uint16_t>(act);
      for (size_t i = 0; i < kGuard; ++i) ASSERT_EQ(acts[count * width + i], 0x1234);
      outs[tokens == 1] = to_host<float>(dx);
      std::vector<double> found, expected, found_acts, expected_acts;
      for (size_t t = 0; t < count; ++t) {
        const std::vector<double> normed = rms_normed(&x[t * static_cast<size_t>(hidden)], weight, 1e-5);
        std::vector<double> mine(width);
        for (int64_t r = 0; r < ffn; ++r) {
          const double g = gate.dot(r, normed.data());
          expected_acts.push_back(g / (1 + std::exp(-g)) * up.dot(r, normed.data()));
          mine[static_cast<size_t>(r)] = bf16_bits_to_float(acts[t * width + static_cast<size_t>(r)]);
          found_acts.push_back(mine[static_cast<size_t>(r)]);
        }
        for (int64_t r = 0; r < hidden; ++r) {
          const size_t i = t * static_cast<size_t>(hidden) + static_cast<size_t>(r);
          expected.push_back(down.dot(r, mine.data()));
          found.push_back(static_cast<double>(outs[tokens == 1][i]) - x[i]);
        }
      }
      EXPECT_LT(relative_error(found_acts, expected_acts), 3 * kBound)
          << info(type).name << ", tokens " << tokens;
      EXPECT_LT(relative_error(found, expected), kBound) << info(type).name << ", tokens " << tokens;
    }
    EXPECT_EQ(0, std::memcmp(outs[0].data(), outs[1].data(), static_cast<size_t>(hidden) * 4))
        << info(type).name;
  }
}

}  // namespace
}  // namespace millrace::cuda
