// What ranks gather from their GPUs is everybody's part, in rank order. Needs a GPU: one for all of them.
#include "backend/cuda/device_link.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "backend/cuda/nccl_link.h"
#include "base/error.h"
#include "dist/local_communicator.h"
#include "kernels/cuda/gpu_test.h"

namespace millrace::cuda {
namespace {

// counts[r] values of rank r: r * 1000 + i. True: `link` gathers them, twice in a row.
bool gathers(DeviceLink& link, int rank, const std::vector<int64_t>& counts, const Device& device) {
  const Stream stream;
  std::vector<float> expected, own;
  for (size_t r = 0; r < counts.size(); ++r) {
    for (int64_t i = 0; i < counts[r]; ++i) {
      expected.push_back(static_cast<float>(r * 1000 + static_cast<size_t>(i)));
      if (static_cast<int>(r) == rank) own.push_back(expected.back());
    }
  }
  const size_t bytes = expected.size() * sizeof(float);
  const DeviceBuffer mine(own.size() * sizeof(float), "a test"), all(bytes, "a test");
  if (!own.empty()) {
    MILLRACE_CUDA_TRY(cudaMemcpyAsync(mine.as<void>(), own.data(), own.size() * sizeof(float),
                                      cudaMemcpyHostToDevice, stream.get()));
  }
  for (int turn = 0; turn < 2; ++turn) {
    link.all_gather(mine.as<float>(), all.as<float>(), counts, {device, stream.get()});
    std::vector<float> found(expected.size());
    MILLRACE_CUDA_TRY(
        cudaMemcpyAsync(found.data(), all.as<void>(), bytes, cudaMemcpyDeviceToHost, stream.get()));
    stream.synchronize();
    if (found != expected) return false;
  }
  return true;
}

TEST(DeviceLink, StagedBetweenRanksOfOneGpu) {
  SKIP_WITHOUT_GPU("the staged link was not tested");
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{5}, {3, 4}, {0, 7, 0}, {100, 1, 2, 300}}) {
    auto group = dist::make_local_group(static_cast<int>(counts.size()));
    std::vector<int> right(counts.size());
    std::vector<std::thread> ranks;
    for (size_t r = 0; r < counts.size(); ++r) {
      ranks.emplace_back([&, r] {
        const Device device = Device::open(0);
        // Several ranks have one GPU: never NCCL.
        const LinkKind kind = counts.size() > 1 ? LinkKind::kAuto : LinkKind::kStaged;
        const auto link = make_device_link(*group[r], device, 1000, kind);
        right[r] = link->name() == "staged over local" && link->blocks() &&
                   gathers(*link, static_cast<int>(r), counts, device);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(right, std::vector<int>(counts.size(), 1));
  }
}

// Of one rank: more of them need GPUs of their own.
TEST(DeviceLink, NcclOfOneRank) {
  SKIP_WITHOUT_GPU("NCCL was not tested");
  const Device device = Device::open(0);
  auto group = dist::make_local_group(1);
  const NcclFound found = find_nccl();
  if (found.version.empty()) {
    EXPECT_THROW(make_device_link(*group[0], device, 1000, LinkKind::kNccl), Error);
    GTEST_SKIP() << "*** NCCL is not there and was not tested: " << found.fault << " ***";
  }
  const auto link = make_device_link(*group[0], device, 1000, LinkKind::kNccl);
  EXPECT_EQ(link->name(), "nccl " + found.version);
  EXPECT_FALSE(link->blocks());
  EXPECT_TRUE(gathers(*link, 0, {777}, device));
  const DeviceLinkSpeed speed = measure(*link, *group[0], device);
  EXPECT_GT(speed.bytes_per_s, 0);
  std::printf("[  figure  ] cuda link of one rank: %s, %.1f us, %.1f GB/s\n", speed.name.c_str(),
              1e6 * speed.latency_s, 1e-9 * speed.bytes_per_s);
}

}  // namespace
}  // namespace millrace::cuda
