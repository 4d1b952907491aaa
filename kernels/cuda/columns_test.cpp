// Columns taken out and put together again are the matrix they were. Needs a GPU.
#include "kernels/cuda/columns.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "kernels/cuda/gpu_test.h"

namespace millrace::cuda {
namespace {

TEST(CudaColumns, TakenAndJoinedAgain) {
  SKIP_WITHOUT_GPU("columns of ranks were not tested");
  const Device device = Device::open(0);
  const Stream stream;
  const Launch at{device, stream.get()};
  const std::vector<std::vector<int64_t>> cuts = {
      {0, 32, 64, 96}, {0, 0, 40, 40, 57}, {0, 8}, {0, 4, 9, 16}, {0, 1024, 4096}};
  for (const std::vector<int64_t>& bounds : cuts) {
    for (const int64_t rows : {0, 1, 3, 700}) {
      SCOPED_TRACE(testing::Message() << bounds.back() << " columns, " << rows << " rows");
      ColumnParts cut;
      cut.parts = static_cast<int32_t>(bounds.size()) - 1;
      std::copy(bounds.begin(), bounds.end(), cut.bounds);
      std::vector<float> values(static_cast<size_t>(rows * bounds.back()));
      std::iota(values.begin(), values.end(), 0.0f);
      const size_t bytes = values.size() * sizeof(float);
      const DeviceBuffer whole(bytes, "a test"), parts(bytes, "a test"), joined(bytes, "a test");
      if (bytes > 0) {
        MILLRACE_CUDA_TRY(
            cudaMemcpyAsync(whole.as<void>(), values.data(), bytes, cudaMemcpyHostToDevice, at.stream));
        MILLRACE_CUDA_TRY(cudaMemsetAsync(joined.as<void>(), 0xff, bytes, at.stream));
      }
      for (size_t p = 0; p + 1 < bounds.size(); ++p) {
        launch_take_columns(whole.as<float>(), bounds.back(), bounds[p], bounds[p + 1] - bounds[p], rows,
                            parts.as<float>() + bounds[p] * rows, at);
      }
      launch_join_columns(parts.as<float>(), cut, rows, joined.as<float>(), at);
      stream.synchronize();
      std::vector<float> found(values.size());
      if (bytes > 0)
        MILLRACE_CUDA_TRY(cudaMemcpy(found.data(), joined.as<void>(), bytes, cudaMemcpyDeviceToHost));
      EXPECT_EQ(found, values);
    }
  }
}

}  // namespace
}  // namespace millrace::cuda
