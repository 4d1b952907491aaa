// Linear attention of the C API on a GPU against the same calls on a CPU (which are compared with recurrences
// in double, mr_linear_attention_test.cpp); the same bits in both of its kernels and cut at a chunk. A GPU
// rounds operands to TF32: a term of a sum is off by 2^-10 of itself. Needs a GPU.
#include "kernels/api/cuda/linear_test_support.h"

namespace millrace::api::gpu {
namespace {

struct LinearCase {
  int32_t key_heads, heads, key_dim, value_dim;
  std::vector<int32_t> lengths;
};
const std::vector<LinearCase> kLinearCases = {{1, 1, 1, 1, {1}},
                                              {2, 4, 20, 24, {17, 0, 1, 33}},
                                              {1, 3, 33, 5, {16, 48, 15}},
                                              {2, 4, 128, 128, {300, 1, 129}},
                                              {1, 2, 200, 100, {40}}};

struct LinearResult {
  std::vector<float> out, state;
};

LinearResult run_linear(const char* name, const LinearCase& c, bool delta, int32_t most_tokens) {
  LinearApi api(name);
  std::vector<int32_t> cu = {0};
  for (const int32_t n : c.lengths) cu.push_back(cu.back() + n);
  const int64_t tokens = cu.back(), sequences = static_cast<int64_t>(c.lengths.size());
  const int64_t keys = tokens * c.key_heads * c.key_dim, values = tokens * c.heads * c.value_dim;
  const int64_t states = sequences * c.heads * c.key_dim * c.value_dim;
  std::vector<float> decay = normal(4, tokens * c.heads, 0.3f), beta = normal(5, tokens * c.heads, 1.0f),
                     rates = normal(6, c.heads, 1.0f);
  for (float& x : decay) x = -std::fabs(x);
  for (float& x : rates) x = -std::fabs(x);
  for (float& x : beta) x = 1.0f / (1.0f + std::exp(-x));
  float* q = api.put(normal(1, keys, 0.4f));
  float* k = api.put(normal(2, keys, 0.7f / std::sqrt(static_cast<float>(c.key_dim))));
  float* v = api.put(normal(3, values, 1.0f));
  float* initial = api.put(normal(7, states, 0.5f));
  float* out = api.put(std::vector<float>(static_cast<size_t>(values), NAN));
  float* final_state = api.put(std::vector<float>(static_cast<size_t>(states), NAN));
  const int32_t* lengths = api.put(cu);
  size_t bytes = 0;
  if (delta) {
    const mr_gated_delta_args args{q,
                                   k,
                                   v,
                                   api.put(decay),
                                   api.put(beta),
                                   0.0f,
                                   initial,
                                   final_state,
                                   lengths,
                                   out,
                                   static_cast<int32_t>(sequences),
                                   c.key_heads,
                                   c.heads,
                                   c.key_dim,
                                   c.value_dim,
                                   most_tokens};
    EXPECT_EQ(mr_gated_delta_workspace_bytes(api.device, &args, &bytes), MR_OK) << mr_last_error();
    std::vector<float> work(bytes / 4 + 64);
    auto* workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(work.data()) + 255) / 256 * 256);
    EXPECT_EQ(mr_chunk_gated_delta_rule(api.device, &args, workspace, bytes, nullptr), MR_OK)
        << mr_last_error();
    return {api.get(out, static_cast<size_t>(values)), api.get(final_state, static_cast<size_t>(states))};
  }
  const mr_selective_scan_args args{v,
                                    api.put(beta),
                                    api.put(rates),
                                    k,
                                    q,
                                    api.put(normal(8, c.heads, 1.0f)),
                                    initial,
                                    final_state,
                                    lengths,
                                    out,
                                    static_cast<int32_t>(sequences),
                                    c.key_heads,
                                    c.heads,
                                    c.key_dim,
                                    c.value_dim,
                                    most_tokens};
  EXPECT_EQ(mr_selective_scan_workspace_bytes(api.device, &args, &bytes), MR_OK) << mr_last_error();
  std::vector<float> work(bytes / 4 + 64);
  auto* workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(work.data()) + 255) / 256 * 256);
  EXPECT_EQ(mr_selective_scan(api.device, &args, workspace, bytes, nullptr), MR_OK) << mr_last_error();
  return {api.get(out, static_cast<size_t>(values)), api.get(final_state, static_cast<size_t>(states))};
}

TEST(CudaLinearAttention, AsOnTheCpuAndTheSameBitsInBothKernels) {
  SKIP_WITHOUT_GPU("linear attention was not tested on one");
  for (const LinearCase& c : kLinearCases) {
    for (const bool delta : {true, false}) {
      const std::string what = (delta ? "delta, keys " : "scan, keys ") + std::to_string(c.key_dim);
      const LinearResult cpu = run_linear("cpu", c, delta, 0), gpu = run_linear("cuda", c, delta, 0);
      expect_close(gpu.out, cpu.out, 3e-3, what + ", outputs");
      expect_close(gpu.state, cpu.state, 3e-3, what + ", states");
      if (*std::max_element(c.lengths.begin(), c.lengths.end()) > 16) continue;
      const LinearResult decoded = run_linear("cuda", c, delta, 16);
      EXPECT_EQ(decoded.out, gpu.out) << what;
      EXPECT_EQ(decoded.state, gpu.state) << what;
    }
  }
  const LinearCase short_ones{2, 4, 128, 64, {16, 1, 7}};
  EXPECT_EQ(run_linear("cuda", short_ones, true, 16).out, run_linear("cuda", short_ones, true, 0).out);
}

TEST(CudaLinearAttention, ShortConvolutionsAsOnTheCpu) {
  SKIP_WITHOUT_GPU("short convolutions were not tested on one");
  const std::vector<int32_t> cu = {0, 19, 19, 20, 55};
  for (const int64_t channels : {1, 15, 600}) {
    for (const int32_t taps : {1, 3, 4, 17}) {
      std::vector<std::vector<float>> outs, rows;
      for (const char* name : {"cpu", "cuda"}) {
        LinearApi api(name);
        const size_t before = static_cast<size_t>(4 * (taps - 1) * channels);
        float* out = api.put(std::vector<float>(static_cast<size_t>(55 * channels), NAN));
        float* after = api.put(std::vector<float>(before, NAN));
        const mr_short_conv_args args{api.put(normal(1, 55 * channels, 1.0f)),
                                      api.put(normal(2, channels * taps, 1.0f)),
                                      api.put(normal(3, channels, 1.0f)),
                                      api.put(normal(4, static_cast<int64_t>(before), 1.0f)),
                                      after,
                                      api.put(cu),
                                      out,
                                      channels,
                                      4,
                                      taps,
                                      1,
                                      0};
        ASSERT_EQ(mr_short_conv(api.device, &args, nullptr), MR_OK) << mr_last_error();
        outs.push_back(api.get(out, static_cast<size_t>(55 * channels)));
        rows.push_back(api.get(after, before));
      }
      expect_close(outs[1], outs[0], 1e-6, "taps " + std::to_string(taps));
      EXPECT_EQ(rows[1], rows[0]) << "taps " << taps;
    }
  }
}

TEST(CudaLinearAttention, RefusesKeysThatAreTooLong) {
  SKIP_WITHOUT_GPU("what linear attention refuses was not tested on one");
  LinearApi api("cuda");
  float* x = api.put(std::vector<float>(1024));
  mr_gated_delta_args args{};
  args.q = args.k = args.v = x;
  args.out = x;
  args.cu_seqlens = api.put(std::vector<int32_t>{0, 1});
  args.sequences = args.key_heads = args.value_heads = args.value_dim = 1;
  args.key_dim = 300;
  EXPECT_EQ(mr_chunk_gated_delta_rule(api.device, &args, nullptr, 0, nullptr), MR_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(mr_last_error()).find("args.key_dim is 300"), std::string::npos) << mr_last_error();
}

}  // namespace
}  // namespace millrace::api::gpu
