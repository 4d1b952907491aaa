// Products with four-bit weights, of experts and of e2m1 matrices through the C API on a GPU, against the
// same calls on a CPU, whose sums kernels/api/mr_lowbit_test.cpp compares with double. Needs a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/float_bits.h"
#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/resources.h"
#include "millrace/kernels.h"

namespace millrace::api::gpu {
namespace {

#define MR_LOWBIT_TRY(call) EXPECT_EQ(call, MR_OK) << mr_last_error()

// A device with memory that lives as long, for both kinds: what is put there, and 0xff bytes.
class LowbitDevice {
 public:
  explicit LowbitDevice(const char* name) : gpu_(std::strcmp(name, "cpu") != 0) {
    const mr_device_options options{2, nullptr};
    MR_LOWBIT_TRY(mr_device_open(name, &options, &device));
  }
  ~LowbitDevice() {
    on_gpu_.clear();
    mr_device_close(device);
  }
  LowbitDevice(const LowbitDevice&) = delete;
  LowbitDevice& operator=(const LowbitDevice&) = delete;

  void* memory(size_t bytes) {
    if (gpu_) {
      on_gpu_.emplace_back(bytes + 256, "a test");
      MILLRACE_CUDA_TRY(cudaMemset(on_gpu_.back().as<void>(), 0xff, bytes + 256));
      return on_gpu_.back().as<void>();
    }
    on_host_.emplace_back(bytes + 256, std::byte{0xff});
    const auto at = reinterpret_cast<uintptr_t>(on_host_.back().data());
    return reinterpret_cast<void*>((at + 255) / 256 * 256);
  }
  template <class T>
  T* put(const std::vector<T>& values) {
    auto* to = static_cast<T*>(memory(values.size() * sizeof(T)));
    MILLRACE_CUDA_TRY(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
    return to;
  }
  std::vector<float> get(const void* from, int64_t count) {
    MR_LOWBIT_TRY(mr_device_synchronize(device, nullptr));
    std::vector<float> values(static_cast<size_t>(count));
    MILLRACE_CUDA_TRY(cudaMemcpy(values.data(), from, values.size() * sizeof(float), cudaMemcpyDefault));
    return values;
  }

  mr_device* device = nullptr;

 private:
  bool gpu_;
  std::vector<cuda::DeviceBuffer> on_gpu_;
  std::vector<std::vector<std::byte>> on_host_;
};

std::vector<uint8_t> random_bytes(std::mt19937& random, int64_t count, uint32_t first, uint32_t range) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(first + random() % range);
  return bytes;
}
std::vector<uint16_t> random_halves(std::mt19937& random, int64_t count, bool bf16) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(static_cast<size_t>(count));
  for (uint16_t& v : x)
    v = bf16 ? to_bfloat16(normal(random)).bits : to_half(0.01f * std::fabs(normal(random))).bits;
  return x;
}

// By the largest value: both sum in float32, in orders of their own.
void expect_near_all(const std::vector<float>& got, const std::vector<float>& want, double bound) {
  double largest = 1e-30, error = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(std::isfinite(got[i])) << i;
    largest = std::max(largest, std::fabs(double{want[i]}));
    error = std::max(error, std::fabs(double{got[i]} - want[i]));
  }
  EXPECT_LE(error, bound * largest);
}

struct LowbitCase {
  mr_lowbit_format format;
  mr_lowbit_packing packing;
  int64_t n, k;
  std::vector<int32_t> offsets;  // of experts
  bool backward;
};

std::vector<float> run_lowbit(LowbitDevice& on, const LowbitCase& c) {
  std::mt19937 random(17);
  const auto experts = static_cast<int64_t>(c.offsets.size()) - 1;
  const bool int4 = c.packing != MR_LOWBIT_ROWS, mxfp4 = c.format == MR_LOWBIT_MXFP4;
  const int64_t groups = c.k / (c.format == MR_LOWBIT_NVFP4 ? 16 : c.format == MR_LOWBIT_INT4_128 ? 128 : 32);
  mr_lowbit_matrix m{c.format, c.packing, experts, c.n, c.k, nullptr, nullptr, nullptr};
  m.codes = on.put(random_bytes(random, experts * c.n * c.k / 2, 0, 256));
  if (int4) {
    m.scales = on.put(random_halves(random, experts * c.n * groups, false));
    m.zeros = on.put(random_bytes(random, experts * c.n * groups / 2, 0, 256));
  } else {
    m.scales = on.put(random_bytes(random, experts * c.n * groups, mxfp4 ? 120 : 0, mxfp4 ? 8 : 0x7f));
  }
  size_t bytes = 0;
  MR_LOWBIT_TRY(mr_lowbit_bytes(&m, &bytes));
  void* units = on.memory(bytes);
  MR_LOWBIT_TRY(mr_lowbit_repack(on.device, &m, units, bytes, nullptr));
  const int64_t rows = c.offsets.back(), in = c.backward ? c.n : c.k, out = c.backward ? c.k : c.n;
  mr_lowbit_gemm_args args{};
  args.format = c.format, args.experts = experts, args.n = c.n, args.k = c.k, args.m = rows;
  args.weights = units, args.backward = c.backward, args.offsets = experts > 1 ? on.put(c.offsets) : nullptr;
  args.x = on.put(random_halves(random, rows * in, true));
  args.y = on.memory(static_cast<size_t>(rows * out) * 4), args.out_type = MR_F32;
  MR_LOWBIT_TRY(mr_lowbit_gemm_workspace_bytes(on.device, &args, &bytes));
  MR_LOWBIT_TRY(mr_lowbit_gemm(on.device, &args, on.memory(bytes), bytes, nullptr));
  return on.get(args.y, rows * out);
}

TEST(CudaLowbit, EveryFormatAsOnTheCpu) {
  SKIP_WITHOUT_GPU("four-bit weights were not tested on one");
  const struct {
    mr_lowbit_format format;
    mr_lowbit_packing packing;
  } kinds[] = {{MR_LOWBIT_MXFP4, MR_LOWBIT_ROWS},
               {MR_LOWBIT_NVFP4, MR_LOWBIT_ROWS},
               {MR_LOWBIT_INT4_32, MR_LOWBIT_GPTQ},
               {MR_LOWBIT_INT4_128, MR_LOWBIT_GPTQ_V2},
               {MR_LOWBIT_INT4_32, MR_LOWBIT_AWQ}};
  LowbitDevice cpu("cpu"), gpu("cuda");
  for (const auto& kind : kinds) {
    for (const bool backward : {false, true}) {
      // A GEMV, tiles of 64 and of 256 rows, experts; 4,224 columns are two segments.
      for (const std::vector<int32_t>& offsets :
           {std::vector<int32_t>{0, 3}, {0, 40}, {0, 150}, {0, 70, 70, 71, 210}}) {
        const LowbitCase c{kind.format, kind.packing,
                           200,         offsets.size() == 2 && offsets[1] == 3 ? 4224 : 384,
                           offsets,     backward};
        SCOPED_TRACE(testing::Message()
                     << "format " << c.format << ", rows " << offsets.back() << ", backward " << backward);
        expect_near_all(run_lowbit(gpu, c), run_lowbit(cpu, c), 1e-5);
      }
    }
  }
}

std::vector<float> run_grouped(LowbitDevice& on, mr_grouped_op op, mr_dtype type, int64_t n, int64_t k) {
  std::mt19937 random(19);
  const std::vector<int32_t> offsets{0, 130, 130, 131, 331};
  const int64_t experts = 4, rows = offsets.back(), blocks = (std::max(n, k) + 127) / 128;
  const auto scales = [](int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.25f + 0.125f * static_cast<float>(i % 5);
    return values;
  };
  const bool forward = op == MR_GROUPED_FORWARD, wgrad = op == MR_GROUPED_WGRAD, fp8 = type == MR_F8_E4M3;
  const int64_t a = rows * (forward ? k : n), b = (wgrad ? rows : experts * n) * k;
  const int64_t c = wgrad ? experts * n * k : rows * (forward ? n : k);
  mr_grouped_gemm_args args{};
  args.op = op, args.type = type, args.experts = experts, args.m = rows, args.n = n, args.k = k;
  args.offsets = on.put(offsets);
  if (fp8) {
    args.a = on.put(random_bytes(random, a, 0x20, 0x20)),
    args.b = on.put(random_bytes(random, b, 0xa0, 0x20));
    args.a_scales = on.put(scales(rows * blocks));
    args.b_scales = on.put(scales((wgrad ? rows : experts * ((n + 127) / 128)) * blocks));
  } else {
    args.a = on.put(random_halves(random, a, true)), args.b = on.put(random_halves(random, b, true));
  }
  args.out_type = MR_F32, args.c = on.memory(static_cast<size_t>(c) * 4);
  size_t bytes = 0;
  MR_LOWBIT_TRY(mr_grouped_gemm_workspace_bytes(on.device, &args, &bytes));
  MR_LOWBIT_TRY(mr_grouped_gemm(on.device, &args, on.memory(bytes), bytes, nullptr));
  return on.get(args.c, c);
}

TEST(CudaLowbit, ExpertsAsOnTheCpu) {
  SKIP_WITHOUT_GPU("grouped products were not tested on one");
  LowbitDevice cpu("cpu"), gpu("cuda");
  for (const int64_t k : {192, 133}) {  // aligned rows, and not
    for (const mr_grouped_op op : {MR_GROUPED_FORWARD, MR_GROUPED_DGRAD, MR_GROUPED_WGRAD}) {
      SCOPED_TRACE(testing::Message() << "op " << op << ", k " << k);
      expect_near_all(run_grouped(gpu, op, MR_BF16, 72, k), run_grouped(cpu, op, MR_BF16, 72, k), 4e-6);
    }
    SCOPED_TRACE(testing::Message() << "e4m3, k " << k);
    // Hopper's e4m3 products keep some 14 bits of a sum.
    expect_near_all(run_grouped(gpu, MR_GROUPED_FORWARD, MR_F8_E4M3, 144, k),
                    run_grouped(cpu, MR_GROUPED_FORWARD, MR_F8_E4M3, 144, k), 1e-3);
    for (const mr_grouped_op op : {MR_GROUPED_DGRAD, MR_GROUPED_WGRAD})
      expect_near_all(run_grouped(gpu, op, MR_F8_E4M3, 144, k), run_grouped(cpu, op, MR_F8_E4M3, 144, k),
                      1e-5);
  }
}

TEST(CudaLowbit, E2m1MatricesAsOnTheCpu) {
  SKIP_WITHOUT_GPU("products of e2m1 matrices were not tested on one");
  const auto run = [](LowbitDevice& on, mr_lowbit_format format) {
    std::mt19937 random(23);
    constexpr int64_t kM = 70, kN = 90, kK = 320;
    const bool mxfp4 = format == MR_LOWBIT_MXFP4;
    const auto scales = [&](int64_t rows) {
      return on.put(random_bytes(random, rows * kK / (mxfp4 ? 32 : 16), mxfp4 ? 120 : 0, mxfp4 ? 8 : 0x7f));
    };
    mr_fp4_gemm_args args{};
    args.format = format, args.m = kM, args.n = kN, args.k = kK, args.out_type = MR_F32;
    args.a = on.put(random_bytes(random, kM * kK / 2, 0, 256)), args.a_scales = scales(kM);
    args.b = on.put(random_bytes(random, kN * kK / 2, 0, 256)), args.b_scales = scales(kN);
    args.c = on.memory(kM * kN * 4);
    size_t bytes = 0;
    MR_LOWBIT_TRY(mr_fp4_gemm_workspace_bytes(on.device, &args, &bytes));
    MR_LOWBIT_TRY(mr_fp4_gemm(on.device, &args, on.memory(bytes), bytes, nullptr));
    return on.get(args.c, kM * kN);
  };
  LowbitDevice cpu("cpu"), gpu("cuda");
  for (const mr_lowbit_format format : {MR_LOWBIT_MXFP4, MR_LOWBIT_NVFP4})
    expect_near_all(run(gpu, format), run(cpu, format), 4e-6);
}

}  // namespace
}  // namespace millrace::api::gpu
