// Every tile of a GEMM gives the same bits, those of the GEMV, in odd
// shapes and for any number of parts, and writes nothing else. Needs a GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <iterator>

#include "base/error.h"
#include "kernels/cuda/compare.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/cluster_schedule.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/quant/random_rows.h"
#include "kernels/cuda/variants.h"

namespace millrace::cuda {
namespace {

struct Case {
  int64_t rows;
  std::vector<int64_t> outputs;  // of the parts
  int64_t cols;
  bool add, bias;
};

constexpr int64_t kGuard = 4096;  // floats behind each part's outputs, which nobody may touch

// In the stream's order, as everything here: a copy or memset of the default stream is not done before the
// kernels of another begin.
template <class T>
DeviceBuffer to_device(const std::vector<T>& values, const Stream& stream) {
  DeviceBuffer buffer(values.size() * sizeof(T), "test");
  MILLRACE_CUDA_TRY(cudaMemcpyAsync(buffer.as<void>(), values.data(), values.size() * sizeof(T),
                                    cudaMemcpyHostToDevice, stream.get()));
  stream.synchronize();
  return buffer;
}

class Problem {
 public:
  Problem(const Device& device, const Case& c, DType type, uint32_t seed)
      : at_{device, stream_.get()}, case_(c), type_(type), random_(seed) {
    for (const int64_t outputs : c.outputs) add_part(outputs);
    std::vector<float> x(static_cast<size_t>(c.rows * c.cols));
    for (float& v : x) v = number();
    x_ = to_device(x, stream_);
    operand_ = DeviceBuffer(bf16_rows_bytes(c.rows, c.cols, device), "test");
    // The rows past the last of a tile are whatever memory holds: NaN here.
    MILLRACE_CUDA_TRY(cudaMemsetAsync(operand_.as<void>(), 0xff, operand_.bytes(), stream_.get()));
    RoundRows round;
    round.x = x_.as<const float>();
    round.rows = c.rows;
    round.cols = c.cols;
    round.weights = packed_format(type, c.cols);
    round.to = {operand_.as<uint8_t>()};
    launch_round_rows(round, at_);
    size_t floats = 0;
    for (const int64_t outputs : c.outputs) floats += static_cast<size_t>(c.rows * outputs + kGuard);
    old_.resize(floats);
    for (float& v : old_) v = number();
    old_device_ = to_device(old_, stream_);
    split_ = DeviceBuffer(split_workspace_bytes(device), "test");
    if (split_.bytes() > 0)
      MILLRACE_CUDA_TRY(cudaMemsetAsync(split_.as<void>(), 0, split_.bytes(), stream_.get()));
  }

  // What a launch leaves in the outputs and behind them, poisoned before: with NaN, or what is added to.
  std::vector<float> gemm(GemmTile tile) {
    launch(tile);
    return outputs();
  }
  // How many of them differ from those of the launch after which keep() was called.
  void keep() { std::swap(out_, kept_); }
  uint64_t differing(GemmTile tile) {
    launch(tile);
    MILLRACE_CUDA_TRY(cudaMemsetAsync(count_.as<void>(), 0, sizeof(uint64_t), stream_.get()));
    launch_count_differences(out_.as<void>(), kept_.as<void>(), static_cast<int64_t>(old_.size()),
                             count_.as<uint64_t>(), at_);
    uint64_t count = 0;
    MILLRACE_CUDA_TRY(
        cudaMemcpyAsync(&count, count_.as<void>(), sizeof(count), cudaMemcpyDeviceToHost, stream_.get()));
    stream_.synchronize();
    return count;
  }
  // The first rows of each part, by the streaming kernels: laid out as above.
  std::vector<float> streamed(int64_t rows) {
    Gemv op;
    float* to = fresh_outputs();
    for (size_t i = 0; i < parts_.size(); ++i) {
      op.parts[op.num_parts++] = {parts_[i].w, case_.bias ? parts_[i].bias.as<float>() : nullptr, to};
      to += case_.rows * parts_[i].w.rows + kGuard;
    }
    op.x = x_.as<const float>();
    op.tokens = static_cast<int32_t>(rows);
    op.add = case_.add;
    launch_gemv(op, at_);
    return outputs();
  }
  bool streams() const { return supports_gemv(parts_[0].w, at_.device); }
  bool fits(GemmTile tile) { return supports_tile(tile, gemm_op(tile)); }
  bool splits = true;          // work items along K, where there are more than clusters
  int32_t cluster_shape = -1;  // of GemmTile::kCluster

 private:
  struct Part {
    DeviceBuffer tiles, dequantized, bias;
    PackedMatrix w;
  };
  void add_part(int64_t outputs) {
    std::mt19937 random(next());
    const std::vector<uint8_t> raw = random_rows(type_, outputs, case_.cols, random);
    const DeviceBuffer from_buffer = to_device(raw, stream_);
    Part part;
    part.w = packed_shape(type_, outputs, case_.cols);
    part.tiles = DeviceBuffer(static_cast<size_t>(part.w.tiles_per_expert) * part.w.tile_bytes, "test");
    part.w.tiles = part.tiles.as<const uint8_t>();
    DeviceMatrix from;
    from.data = from_buffer.as<const uint8_t>();
    from.rows = outputs;
    from.cols = case_.cols;
    from.row_bytes = static_cast<int64_t>(bytes_of(type_, case_.cols));
    from.type = type_;
    launch_repack(from, 0, part.w, part.tiles.as<uint8_t>(), at_);
    if (at_.device.has_wgmma() && dequantized_bytes(part.w) > 0) {
      part.dequantized = DeviceBuffer(dequantized_bytes(part.w), "test");
      launch_dequantize(part.w, part.dequantized.as<uint8_t>(), at_);
      part.w.dequantized = part.dequantized.as<const uint8_t>();
    }
    stream_.synchronize();
    std::vector<float> bias(static_cast<size_t>(outputs));
    for (float& v : bias) v = number();
    part.bias = to_device(bias, stream_);
    parts_.push_back(std::move(part));
  }
  void launch(GemmTile tile) {
    fresh_outputs();
    launch_gemm(gemm_op(tile), at_);
  }
  Gemm gemm_op(GemmTile tile) {
    Gemm op;
    auto* to = out_.as<float>();
    for (size_t i = 0; i < parts_.size(); ++i) {
      op.parts[op.num_parts++] = {parts_[i].w, case_.bias ? parts_[i].bias.as<float>() : nullptr, to};
      to += case_.rows * parts_[i].w.rows + kGuard;
    }
    op.x = {operand_.as<uint8_t>()};
    op.rows = case_.rows;
    op.add = case_.add;
    op.tile = tile;
    op.cluster_shape = cluster_shape;
    if (splits) op.split = split_workspace(split_.as<void>(), at_.device);
    op.split.force = splits;
    return op;
  }
  uint32_t next() { return random_ = random_ * 1664525u + 1013904223u; }
  // From -1 to 1, in steps that no sum of products is exact in.
  float number() { return static_cast<float>(static_cast<int32_t>(next())) * 0x1p-31f; }
  float* fresh_outputs() {
    if (out_.bytes() == 0) out_ = DeviceBuffer(old_.size() * sizeof(float), "test");
    if (case_.add) {
      MILLRACE_CUDA_TRY(cudaMemcpyAsync(out_.as<void>(), old_device_.as<void>(), out_.bytes(),
                                        cudaMemcpyDeviceToDevice, stream_.get()));
    } else {
      MILLRACE_CUDA_TRY(cudaMemsetAsync(out_.as<void>(), 0xff, out_.bytes(), stream_.get()));
    }
    return out_.as<float>();
  }
  std::vector<float> outputs() {
    stream_.synchronize();
    std::vector<float> host(old_.size());
    MILLRACE_CUDA_TRY(cudaMemcpy(host.data(), out_.as<void>(), out_.bytes(), cudaMemcpyDeviceToHost));
    return host;
  }

  Stream stream_;
  Launch at_;
  Case case_;
  DType type_;
  uint32_t random_;
  std::vector<Part> parts_;
  DeviceBuffer x_, operand_, out_, kept_, old_device_, split_, count_{sizeof(uint64_t), "test"};
  std::vector<float> old_;
};

const Case kCases[] = {
    {1, {8}, 32, false, false},
    {5, {7}, 64, false, true},
    {64, {136}, 96, true, false},
    {65, {100, 36}, 1024, false, true},
    {127, {128, 128, 128}, 1056, true, true},
    {129, {257}, 2880, false, true},
    {255, {2880}, 4096, true, false},
    {256, {264, 520, 8}, 2880, false, true},
    {257, {2880}, 4096, true, true},
    {385, {1024}, 6144, false, false},
    {512, {4096, 512, 512}, 2880, false, true},
    {513, {4096, 512, 512}, 2880, false, true},
    {2300, {4096, 512, 512}, 2880, true, true},  // several work items a CTA, two bands
    {3000, {4096, 1032}, 1088, false, true},     // two work items and a part each
    {4500, {640}, 64, false, false},
    {3, {1400}, 5120, true, true},  // streamed in four parts a tile, more than a tile a CTA
};

class GemmTileTest : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, GemmTileTest,
                         ::testing::Values(DType::kBF16, DType::kQ8_0, DType::kQ4_1, DType::kQ5_1,
                                           DType::kQ6_K),
                         [](const auto& p) { return std::string(millrace::info(p.param).name); });

TEST_P(GemmTileTest, AllGiveTheSameBits) {
  SKIP_WITHOUT_GPU("GEMM was not tested on one");
  const Device device = Device::open(0);
  uint32_t seed = 1;
  for (const Case& c : kCases) {
    if (c.cols % info(GetParam()).block_elements != 0) continue;
    SCOPED_TRACE(fmt::format("{} rows, {} outputs of {} parts, {} columns{}{}", c.rows, c.outputs[0],
                             c.outputs.size(), c.cols, c.add ? ", add" : "", c.bias ? ", bias" : ""));
    Problem p(device, c, GetParam(), ++seed);
    const std::vector<float> want = p.gemm(GemmTile::kDefault);
    int64_t written = 0, expected = 0;
    for (const float v : want) written += std::isnan(v) ? 0 : 1;
    for (const int64_t n : c.outputs) expected += n * c.rows;
    if (!c.add) {
      EXPECT_EQ(written, expected);  // all of it, and nothing behind it
    }
    p.keep();
    for (const GemmCandidate& candidate : gemm_candidates()) {
      if (!device.has_wgmma() || !p.fits(candidate.tile)) continue;
      p.splits = false;
      ASSERT_EQ(p.differing(candidate.tile), 0u) << candidate.name;
      p.splits = true;
      for (int again = 0; again < 3; ++again)
        ASSERT_EQ(p.differing(candidate.tile), 0u) << candidate.name << ", split";
    }
    for (int shape = 0; shape < static_cast<int>(std::size(kClusterShapes)); ++shape) {
      if (!device.has_wgmma() || !p.fits(GemmTile::kCluster)) break;
      p.cluster_shape = shape;
      for (const bool split : {false, true}) {
        p.splits = split;
        ASSERT_EQ(p.differing(GemmTile::kCluster), 0u)
            << kClusterShapes[shape].tiles << " tiles, " << kClusterShapes[shape].tokens << " tokens"
            << (split ? ", split" : "");
      }
    }
    if (!p.streams()) continue;
    const int64_t rows = std::min<int64_t>(c.rows, 4);
    const std::vector<float> few = p.streamed(rows);
    size_t first = 0;
    for (const int64_t n : c.outputs) {
      for (size_t i = first; i < first + static_cast<size_t>(rows * n); ++i) {
        if (std::bit_cast<uint32_t>(want[i]) != std::bit_cast<uint32_t>(few[i]))
          FAIL() << "streamed at " << i << ": " << want[i] << ", " << few[i];
      }
      first += static_cast<size_t>(c.rows * n + kGuard);
    }
  }
}

TEST(GemmTile, OneChainIsCloseToSixteen) {
  SKIP_WITHOUT_GPU("GEMM was not tested on one");
  const Device device = Device::open(0);
  if (!device.has_wgmma()) GTEST_SKIP() << "*** no warpgroup instructions: one chain was not tested ***";
  for (const Case& c : kCases) {
    Problem p(device, c, DType::kBF16, 77);
    const std::vector<float> want = p.gemm(GemmTile::kDefault), got = p.gemm(GemmTile::kClusterNoSplitK);
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::isnan(want[i]) != std::isnan(got[i])) FAIL() << i << ": " << want[i] << ", " << got[i];
      if (std::isnan(want[i])) continue;
      error += (double{want[i]} - got[i]) * (double{want[i]} - got[i]);
      size += double{want[i]} * want[i];
    }
    EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(size)) << c.rows << " rows, " << c.cols << " columns";
  }
}

// Also what a table that says so launches.
TEST(GemmTile, ATableChooses) {
  SKIP_WITHOUT_GPU("GEMM was not tested on one");
  Device device = Device::open(0);
  const Case c{300, {520}, 2880, false, true};
  Problem p(device, c, DType::kBF16, 3);
  p.gemm(GemmTile::kDefault);
  p.keep();
  for (const GemmCandidate& candidate : gemm_candidates()) {
    if (!device.has_wgmma() || !p.fits(candidate.tile)) continue;
    device.use_tuning(Tuning(
        {{TunedKernel::kGemm, PackedFormat::kBf16, 520, 2880, 512, static_cast<uint32_t>(candidate.tile)}}));
    EXPECT_EQ(p.differing(GemmTile::kDefault), 0u) << candidate.name;
  }
}

}  // namespace
}  // namespace millrace::cuda
