// The persistent kernel of a token's router and experts against the kernels it stands in for, to the bit and
// several launches in turn. Needs a GPU.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/quant/random_rows.h"

namespace millrace::cuda {
namespace {

constexpr int kLaunches = 3;

template <class T>
DeviceBuffer to_device(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T), "test");
  MILLRACE_CUDA_TRY(cudaMemcpy(buffer.as<void>(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice));
  return buffer;
}
std::vector<uint32_t> words_of(const DeviceBuffer& buffer) {
  std::vector<uint32_t> values(buffer.bytes() / sizeof(uint32_t));
  MILLRACE_CUDA_TRY(cudaMemcpy(values.data(), buffer.as<void>(), buffer.bytes(), cudaMemcpyDeviceToHost));
  return values;
}
DeviceBuffer zeros(size_t bytes) { return to_device(std::vector<uint8_t>(bytes)); }
std::vector<float> numbers(int64_t count, float sigma, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = normal(random);
  return values;
}

struct Matrix {
  DeviceBuffer tiles;
  PackedMatrix packed;

  Matrix(const Device& device, DType type, int64_t rows, int64_t cols, std::mt19937& random,
         int64_t experts = 1)
      : packed(packed_shape(type, rows * experts, cols)) {
    const DeviceBuffer source = to_device(random_rows(type, rows * experts, cols, random));
    DeviceMatrix m;
    m.data = source.as<const uint8_t>();
    m.rows = rows * experts, m.cols = cols, m.type = type;
    m.row_bytes = static_cast<int64_t>(bytes_of(type, cols));
    tiles = DeviceBuffer(static_cast<size_t>(packed.tiles_per_expert) * packed.tile_bytes, "test");
    launch_repack(m, 0, packed, tiles.as<uint8_t>(), {device, nullptr});
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
    packed.tiles = tiles.as<const uint8_t>();
    packed.rows = rows, packed.tiles_per_expert /= static_cast<int32_t>(experts);
  }
};

TEST(PersistentMoe, SameBitsAsRouterAndExperts) {
  SKIP_WITHOUT_GPU("the persistent kernel of small experts was not tested on one");
  const Device device = Device::open(0);
  if (!device.has_bulk_copies()) GTEST_SKIP() << "*** code for GPUs before sm_90 has other kernels ***";
  const Launch at{device, nullptr};
  std::mt19937 random(4);
  constexpr int32_t kExperts = 32, kChosen = 8;
  for (const DType type : {DType::kQ4_K, DType::kQ4_0}) {
    for (const auto& [hidden, ffn] : {std::pair<int64_t, int64_t>{1280, 512}, {2048, 768}, {2048, 1024}}) {
      const Matrix gate(device, type, ffn, hidden, random, kExperts),
          up(device, type, ffn, hidden, random, kExperts), down(device, type, hidden, ffn, random, kExperts);
      const std::vector<float> residual = numbers(hidden, 1.0f, random);
      const DeviceBuffer weight = to_device(numbers(kExperts * hidden, 0.05f, random)),
                         norm = to_device(numbers(hidden, 1.0f, random)),
                         sync = zeros(sizeof(PersistentMoeSync)), scores = zeros(kExperts * 4),
                         normed = zeros(static_cast<size_t>(hidden) * 4),
                         x_bf16 = zeros(static_cast<size_t>(hidden) * 2),
                         act = zeros(static_cast<size_t>(kChosen * ffn) * 4);
      DeviceBuffer outs[2];
      for (DeviceBuffer& out : outs) {
        out = to_device(residual);
        Router router;
        router.weight = weight.as<const float>(), router.norm_weight = norm.as<const float>();
        router.x = out.as<const float>(), router.eps = 1e-5f;
        router.tokens = 1, router.experts = kExperts, router.cols = static_cast<int32_t>(hidden);
        router.scores = scores.as<float>(), router.normed = normed.as<float>();
        router.x_bf16 = x_bf16.as<uint16_t>();
        GemvExperts op;
        op.gate = gate.packed, op.up = up.packed, op.down = down.packed;
        op.scores = scores.as<const float>(), op.x_bf16 = x_bf16.as<const uint16_t>();
        op.tokens = 1, op.experts = kExperts, op.k = kChosen;
        op.act = act.as<float>(), op.residual = out.as<float>();
        ASSERT_TRUE(supports_persistent_moe(router, op, device));
        for (int i = 0; i < kLaunches; ++i) {
          if (&out == outs) {
            launch_router(router, at);
            launch_gemv_experts(op, at);
          } else {
            launch_persistent_moe(router, op, sync.as<PersistentMoeSync>(), at);
          }
        }
        MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
      }
      EXPECT_EQ(words_of(outs[0]), words_of(outs[1])) << info(type).name << ", hidden " << hidden;
    }
  }
}

}  // namespace
}  // namespace millrace::cuda
