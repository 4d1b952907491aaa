// The C API on a GPU against the same calls on a CPU: products in every weight format, experts, paged
// attention of prompts and single rows, norms, rotary, routing, sampling. Bounds are derived from norms: a
// GPU rounds weights and activations to bf16, so each term of a sum is off by at most 3 * 2^-9 of itself.
// Needs a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "kernels/cuda/gpu_test.h"
#include "kernels/cuda/resources.h"
#include "kernels/quant/codec.h"
#include "millrace/kernels.h"
#include "tensor/dtype.h"

namespace millrace::api::gpu {
namespace {

#define MR_TRY(call) ASSERT_EQ(call, MR_OK) << mr_last_error()

constexpr double kBf16Term = 3.0 / 512.0;  // of a product of two numbers rounded to bf16

// A device and its memory, host memory for a CPU.
class Api {
 public:
  explicit Api(const char* name) : gpu_(std::string(name) != "cpu") {
    const mr_device_options options{2, nullptr};
    EXPECT_EQ(mr_device_open(name, &options, &device), MR_OK) << mr_last_error();
  }
  ~Api() {
    host_.clear();
    gpu_memory_.clear();
    mr_device_close(device);
  }
  Api(const Api&) = delete;
  Api& operator=(const Api&) = delete;

  // 256-byte aligned; filled with ones' bits, so that what is not written is NaN.
  void* memory(size_t bytes) {
    if (gpu_) {
      gpu_memory_.emplace_back(std::max<size_t>(bytes, 1), "a test");
      MILLRACE_CUDA_TRY(cudaMemset(gpu_memory_.back().as<void>(), 0xff, gpu_memory_.back().bytes()));
      return gpu_memory_.back().as<void>();
    }
    host_.emplace_back(bytes + 256, std::byte{0xff});
    auto at = reinterpret_cast<uintptr_t>(host_.back().data());
    return reinterpret_cast<void*>((at + 255) / 256 * 256);
  }
  template <class T>
  T* put(const std::vector<T>& values) {
    auto* to = static_cast<T*>(memory(values.size() * sizeof(T)));
    MILLRACE_CUDA_TRY(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
    return to;
  }
  template <class T>
  std::vector<T> get(const T* from, size_t count) {
    EXPECT_EQ(mr_device_synchronize(device, nullptr), MR_OK) << mr_last_error();
    std::vector<T> values(count);
    MILLRACE_CUDA_TRY(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDefault));
    return values;
  }
  mr_weight* weight(const mr_matrix& matrix) {
    size_t bytes = 0;
    mr_weight* made = nullptr;
    EXPECT_EQ(mr_weight_bytes(device, &matrix, &bytes), MR_OK) << mr_last_error();
    EXPECT_EQ(mr_weight_create(device, &matrix, memory(bytes), bytes, &made), MR_OK) << mr_last_error();
    return made;
  }

  mr_device* device = nullptr;

 private:
  bool gpu_;
  std::vector<cuda::DeviceBuffer> gpu_memory_;
  std::vector<std::vector<std::byte>> host_;
};

std::vector<float> numbers(uint32_t seed, int64_t count, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = normal(random);
  return x;
}

// A matrix in host memory, of numbers that the type was quantized from.
struct HostMatrix {
  std::vector<std::byte> bytes;
  mr_matrix matrix{};
  HostMatrix(mr_dtype type, int64_t experts, int64_t rows, int64_t cols, uint32_t seed) {
    const auto dtype = static_cast<DType>(type);
    const std::vector<float> x = numbers(seed, experts * rows * cols, 0.1f);
    bytes.resize(static_cast<size_t>(experts * rows) * bytes_of(dtype, cols));
    quant::quantize(dtype, x.data(), bytes.data(), static_cast<int64_t>(x.size()));
    matrix.type = type;
    matrix.experts = experts;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.data = bytes.data();
  }
  std::vector<float> floats(mr_device* device) const {
    std::vector<float> x(static_cast<size_t>(matrix.experts * matrix.rows * matrix.cols));
    EXPECT_EQ(mr_dequantize(device, &matrix, 0, matrix.experts * matrix.rows, x.data()), MR_OK)
        << mr_last_error();
    return x;
  }
};

void report(const char* what) { std::printf("[  figure  ] cuda C API: %s as on the CPU\n", what); }

TEST(CudaApi, ProductsInEveryFormat) {
  SKIP_WITHOUT_GPU("the C API was not tested on one");
  Api gpu("cuda");
  constexpr int64_t kOut = 72, kIn = 256, kStride = kIn + 4, kOutStride = kOut + 3;
  for (const mr_dtype type :
       {MR_F32, MR_F16, MR_BF16, MR_Q8_0, MR_Q4_0, MR_Q4_1, MR_Q5_0, MR_Q5_1, MR_MXFP4}) {
    const HostMatrix host(type, 1, kOut, kIn, 7);
    const std::vector<float> w = host.floats(gpu.device), bias = numbers(8, kOut);
    mr_weight* weight = gpu.weight(host.matrix);
    for (const int64_t rows : {1, 3, 5, 33, 130}) {
      SCOPED_TRACE(std::string(mr_dtype_name(type)) + ", " + std::to_string(rows) + " rows");
      const std::vector<float> x = numbers(9, rows * kStride), old = numbers(10, rows * kOutStride);
      size_t bytes = 0;
      MR_TRY(mr_matmul_workspace_bytes(gpu.device, weight, rows, &bytes));
      mr_matmul_args args{};
      args.weight = weight;
      args.bias = gpu.put(bias);
      args.x = gpu.put(x);
      args.x_stride = kStride;
      args.y = gpu.put(old);
      args.y_stride = kOutStride;
      args.rows = rows;
      args.accumulate = rows % 2 == 0 ? 0 : 1;
      MR_TRY(mr_matmul(gpu.device, &args, gpu.memory(bytes), bytes, nullptr));
      const std::vector<float> y = gpu.get(args.y, old.size());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < kOutStride; ++o) {
          const auto at = static_cast<size_t>(r * kOutStride + o);
          if (o >= kOut) {
            ASSERT_EQ(y[at], old[at]) << "between rows";
            continue;
          }
          double sum = bias[static_cast<size_t>(o)], size = 0;
          for (int64_t c = 0; c < kIn; ++c) {
            const double term =
                double{w[static_cast<size_t>(o * kIn + c)]} * x[static_cast<size_t>(r * kStride + c)];
            sum += term;
            size += std::fabs(term);
          }
          if (args.accumulate != 0) sum += old[at];
          ASSERT_NEAR(y[at], sum, kBf16Term * size + 1e-6) << "row " << r << ", output " << o;
        }
      }
    }
    mr_weight_destroy(weight);
  }
  report("products");
}

TEST(CudaApi, ARowsBitsDoNotDependOnTheBatch) {
  SKIP_WITHOUT_GPU("the C API was not tested on one");
  Api gpu("cuda");
  constexpr int64_t kOut = 136, kIn = 320, kRows = 70;
  for (const mr_dtype type : {MR_BF16, MR_Q8_0, MR_MXFP4}) {
    const HostMatrix host(type, 1, kOut, kIn, 3);
    mr_weight* weight = gpu.weight(host.matrix);
    const float* x = gpu.put(numbers(4, kRows * kIn));
    size_t bytes = 0;
    MR_TRY(mr_matmul_workspace_bytes(gpu.device, weight, kRows, &bytes));
    void* workspace = gpu.memory(bytes);
    auto *all = static_cast<float*>(gpu.memory(kRows * kOut * 4)),
         *one = static_cast<float*>(gpu.memory(kOut * 4));
    mr_matmul_args args{weight, nullptr, x, 0, all, 0, kRows, 0};
    MR_TRY(mr_matmul(gpu.device, &args, workspace, bytes, nullptr));
    const std::vector<float> want = gpu.get(all, kRows * kOut);
    for (const int64_t row : {int64_t{0}, int64_t{31}, kRows - 1}) {
      args = {weight, nullptr, x + row * kIn, 0, one, 0, 1, 0};
      MR_TRY(mr_matmul(gpu.device, &args, workspace, bytes, nullptr));
      ASSERT_EQ(std::memcmp(gpu.get(one, kOut).data(), want.data() + row * kOut, kOut * 4), 0)
          << mr_dtype_name(type) << ", row " << row;
    }
    mr_weight_destroy(weight);
  }
  report("rows alone and in a batch");
}

// y of one layer of experts.
std::vector<float> run_moe(Api& api, mr_dtype type, int64_t rows, bool clamped) {
  constexpr int64_t kExperts = 6, kFfn = 96, kHidden = 160;
  constexpr int32_t kTopK = 4;
  const HostMatrix gate(type, kExperts, kFfn, kHidden, 1), up(type, kExperts, kFfn, kHidden, 2),
      down(type, kExperts, kHidden, kFfn, 3);
  mr_weight* weights[] = {api.weight(gate.matrix), api.weight(up.matrix), api.weight(down.matrix)};
  const float* scores = api.put(numbers(4, rows * kExperts));
  auto* chosen = static_cast<int32_t*>(api.memory(static_cast<size_t>(rows) * kTopK * 4));
  auto* share = static_cast<float*>(api.memory(static_cast<size_t>(rows) * kTopK * 4));
  EXPECT_EQ(
      mr_moe_route(api.device, scores, rows, kExperts, kTopK, MR_SOFTMAX_CHOSEN, chosen, share, nullptr),
      MR_OK)
      << mr_last_error();
  mr_moe_args args{};
  args.gate = weights[0], args.up = weights[1], args.down = weights[2];
  args.gate_bias = api.put(numbers(5, kExperts * kFfn));
  args.down_bias = api.put(numbers(6, kExperts * kHidden));
  args.activation = clamped ? MR_CLAMPED_SWIGLU : MR_SWIGLU;
  args.alpha = 1.702f, args.limit = 7.0f;
  args.k = kTopK;
  args.chosen = chosen;
  args.weights = share;
  args.x = api.put(numbers(7, rows * kHidden));
  args.y = api.put(numbers(8, rows * kHidden));
  args.rows = rows;
  size_t bytes = 0;
  EXPECT_EQ(mr_moe_workspace_bytes(api.device, &args, &bytes), MR_OK) << mr_last_error();
  EXPECT_EQ(mr_moe(api.device, &args, api.memory(bytes), bytes, nullptr), MR_OK) << mr_last_error();
  std::vector<float> y = api.get(args.y, static_cast<size_t>(rows * kHidden));
  for (mr_weight* weight : weights) mr_weight_destroy(weight);
  return y;
}

double norm_of(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += double{v} * v;
  return std::sqrt(sum);
}
// By the norm of the whole, as errors of many roundings are.
void expect_as_cpu(const std::vector<float>& got, const std::vector<float>& want, double bound) {
  ASSERT_EQ(got.size(), want.size());
  std::vector<float> error(got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::isfinite(got[i])) << i;
    error[i] = got[i] - want[i];
  }
  EXPECT_LE(norm_of(error), bound * norm_of(want));
}

TEST(CudaApi, Experts) {
  SKIP_WITHOUT_GPU("the C API was not tested on one");
  for (const mr_dtype type : {MR_F32, MR_BF16, MR_Q8_0, MR_MXFP4}) {
    for (const int64_t rows : {1, 7, 80}) {
      SCOPED_TRACE(std::string(mr_dtype_name(type)) + ", " + std::to_string(rows) + " rows");
      Api cpu("cpu"), gpu("cuda");
      // Two products one after the other, and what a CPU rounds to 8 bits.
      expect_as_cpu(run_moe(gpu, type, rows, rows != 7), run_moe(cpu, type, rows, rows != 7), 4 * kBf16Term);
    }
  }
  report("experts");
}

struct AttentionCase {
  int32_t heads, kv_heads, head_dim, window;
  mr_dtype kv_type;
  std::vector<std::pair<int32_t, int32_t>> sequences;  // tokens before, new ones
};

// All tokens of every sequence appended in one step, then the last `new ones` of each attended to.
std::vector<float> run_attention(Api& api, const AttentionCase& c) {
  mr_attention_config config{c.heads, c.kv_heads, c.head_dim, c.kv_type, 4096, 8, 4096};
  size_t block_bytes = 0, bytes = 0;
  EXPECT_EQ(mr_kv_block_bytes(api.device, &config, &block_bytes), MR_OK) << mr_last_error();
  EXPECT_EQ(mr_attention_workspace_bytes(api.device, &config, &bytes), MR_OK) << mr_last_error();
  mr_attention* attention = nullptr;
  EXPECT_EQ(mr_attention_create(api.device, &config, api.memory(bytes), bytes, &attention), MR_OK)
      << mr_last_error();
  constexpr int32_t kBlocks = 256;
  const mr_kv_cache cache{api.memory(block_bytes * kBlocks), kBlocks, 0};
  std::vector<int32_t> tables;
  const auto sequences = static_cast<int32_t>(c.sequences.size());
  for (int32_t i = 0; i < sequences * 64; ++i) tables.push_back((i * 7 + 3) % kBlocks);
  const std::vector<float> inv_freq = [&] {
    std::vector<float> f;
    for (int i = 0; i < c.head_dim / 2; ++i)
      f.push_back(std::pow(1e4f, -2.0f * static_cast<float>(i) / 64.0f));
    return f;
  }();
  const mr_rotary rotary{api.put(inv_freq), c.head_dim / 2, 1.0f, 0};
  const float* sinks = api.put(numbers(11, c.heads));
  std::vector<float> result;
  for (const bool new_ones : {false, true}) {
    std::vector<int32_t> starts{0}, contexts;
    for (const auto& [before, fresh] : c.sequences) {
      starts.push_back(starts.back() + (new_ones ? fresh : before));
      contexts.push_back(new_ones ? before : 0);
    }
    const int64_t rows = starts.back();
    const mr_batch batch{sequences, starts.data(), contexts.data(), tables.data(), 64};
    EXPECT_EQ(mr_attention_plan(attention, &batch, nullptr), MR_OK) << mr_last_error();
    const uint32_t seed = new_ones ? 20 : 30;
    float* query = api.put(numbers(seed, rows * c.heads * c.head_dim));
    float* key = api.put(numbers(seed + 1, rows * c.kv_heads * c.head_dim));
    const float* value = api.put(numbers(seed + 2, rows * c.kv_heads * c.head_dim));
    EXPECT_EQ(mr_attention_append(attention, &cache, &rotary, query, key, value, nullptr), MR_OK)
        << mr_last_error();
    if (!new_ones) continue;
    const auto count = static_cast<size_t>(rows * c.heads * c.head_dim);
    auto* out = static_cast<float*>(api.memory(count * 4));
    const mr_attention_args args{c.window, 0.0f, sinks};
    EXPECT_EQ(mr_attention_run(attention, &cache, &args, query, out, nullptr), MR_OK) << mr_last_error();
    result = api.get(out, count);
  }
  mr_attention_destroy(attention);
  return result;
}

TEST(CudaApi, PagedAttentionOfPromptsAndSingleRows) {
  SKIP_WITHOUT_GPU("the C API was not tested on one");
  const std::vector<std::pair<int32_t, int32_t>> single = {{1, 1}, {40, 1}, {700, 1}},
                                                 ragged = {{0, 17}, {33, 200}, {129, 1}, {5, 64}};
  for (const auto& sequences : {single, ragged}) {
    for (AttentionCase c : {AttentionCase{8, 2, 64, 0, MR_BF16, {}},
                            {8, 2, 64, 128, MR_BF16, {}},
                            {4, 4, 128, 0, MR_BF16, {}},
                            {6, 2, 80, 0, MR_F32, {}},
                            {8, 2, 64, 0, MR_F8_E4M3, {}}}) {
      c.sequences = sequences;
      SCOPED_TRACE(std::to_string(c.head_dim) + " " + mr_dtype_name(c.kv_type) + " window " +
                   std::to_string(c.window));
      Api cpu("cpu"), gpu("cuda");
      // Scores of unit vectors' products, softmax weights and values are each rounded to bf16.
      expect_as_cpu(run_attention(gpu, c), run_attention(cpu, c), 8 * kBf16Term);
    }
  }
  report("attention");
}

TEST(CudaApi, NormsRotaryAndRouting) {
  SKIP_WITHOUT_GPU("the C API was not tested on one");
  Api cpu("cpu"), gpu("cuda");
  constexpr int64_t kRows = 9, kCols = 1000, kStride = 1024;
  const auto normed = [&](Api& api) {
    auto* y = static_cast<float*>(api.memory(kRows * kStride * 4));
    const std::vector<float> x = numbers(1, kRows * kStride);
    EXPECT_EQ(mr_rmsnorm(api.device, api.put(x), kStride, api.put(numbers(2, kCols)), 1e-5f, kRows, kCols, y,
                         kCols, nullptr),
              MR_OK)
        << mr_last_error();
    return api.get(y, kRows * kCols);
  };
  expect_as_cpu(normed(gpu), normed(cpu), 1e-6);
  const auto rotated = [&](Api& api) {
    const std::vector<int32_t> positions = {0, 1, 2, 77, 4095, 100000};
    const mr_rotary rotary{api.put(std::vector<float>{1.0f, 0.3f, 0.01f, 1e-4f}), 4, 1.25f, 1};
    float* x = api.put(numbers(3, 6 * 50));
    EXPECT_EQ(mr_rotary_apply(api.device, &rotary, api.put(positions), 6, 3, 16, x, 50, nullptr), MR_OK)
        << mr_last_error();
    return api.get(x, 6 * 50);
  };
  expect_as_cpu(rotated(gpu), rotated(cpu), 1e-6);
  const auto routed = [&](Api& api) {
    auto* chosen = static_cast<int32_t*>(api.memory(20 * 4 * 4));
    auto* weights = static_cast<float*>(api.memory(20 * 4 * 4));
    EXPECT_EQ(mr_moe_route(api.device, api.put(numbers(4, 20 * 33)), 20, 33, 4, MR_SOFTMAX_ALL, chosen,
                           weights, nullptr),
              MR_OK)
        << mr_last_error();
    return std::pair{api.get(chosen, 80), api.get(weights, 80)};
  };
  const auto got = routed(gpu), want = routed(cpu);
  EXPECT_EQ(got.first, want.first);
  expect_as_cpu(got.second, want.second, 1e-6);
  report("norms, rotary and routing");
}

TEST(CudaApi, SampledTokensAreTheSame) {
  SKIP_WITHOUT_GPU("the C API was not tested on one");
  Api cpu("cpu"), gpu("cuda");
  constexpr int64_t kRows = 64, kVocab = 5003;
  std::vector<mr_sample_params> params;
  std::mt19937 random(5);
  for (int64_t r = 0; r < kRows; ++r) {
    const double uniform = static_cast<double>(random()) / 4294967296.0;
    params.push_back({r % 8 == 0 ? 0.0f : 0.25f * static_cast<float>(r % 7 + 1), r % 3 == 0 ? 40 : 0,
                      r % 2 == 0 ? 0.9f : 1.0f, r % 5 == 0 ? 0.05f : 0.0f, uniform});
  }
  const auto sampled = [&](Api& api) {
    size_t bytes = 0;
    EXPECT_EQ(mr_sample_workspace_bytes(api.device, kRows, kVocab, &bytes), MR_OK) << mr_last_error();
    auto* tokens = static_cast<int32_t*>(api.memory(kRows * 4));
    EXPECT_EQ(mr_sample(api.device, api.put(numbers(6, kRows * kVocab, 3.0f)), kRows, kVocab, params.data(),
                        tokens, api.memory(bytes), bytes, nullptr),
              MR_OK)
        << mr_last_error();
    return api.get(tokens, kRows);
  };
  EXPECT_EQ(sampled(gpu), sampled(cpu));
  report("sampled tokens");
}

TEST(CudaApi, NamesWhatItCannotDo) {
  SKIP_WITHOUT_GPU("the C API was not tested on one");
  Api gpu("cuda");
  float x = 1.0f;
  uint8_t out[34];
  EXPECT_EQ(mr_quantize(gpu.device, MR_F32, &x, 1, 1, nullptr, out), MR_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(mr_last_error()).find("cpu device"), std::string::npos) << mr_last_error();
  const mr_attention_config config{8, 2, 64, MR_Q8_0, 16, 4, 64};
  size_t bytes = 0;
  EXPECT_EQ(mr_kv_block_bytes(gpu.device, &config, &bytes), MR_ERROR_UNSUPPORTED);
  mr_device* none = nullptr;
  EXPECT_EQ(mr_device_open("cuda:99", nullptr, &none), MR_ERROR_DEVICE);
  EXPECT_EQ(none, nullptr);
}

}  // namespace
}  // namespace millrace::api::gpu
