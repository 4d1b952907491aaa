// Gradients of linear attention on a GPU against the same calls on a CPU, which adds in double (and is
// compared with central differences and torch, mr_linear_backward_test.cpp); the same bits each time; what is
// refused. Operands are rounded to bf16 where there are warpgroup products, to TF32 elsewhere: a term of a
// sum is off by 2^-8 of itself at most. Needs a GPU.
#include <map>

#include "kernels/api/cuda/linear_test_support.h"

namespace millrace::api::gpu {
namespace {

struct GradientCase {
  int32_t key_heads, heads, key_dim, value_dim;
  std::vector<int32_t> lengths;
};
const std::vector<GradientCase> kGradientCases = {{1, 1, 1, 1, {1}},
                                                  {2, 4, 20, 24, {17, 0, 1, 133}},
                                                  {1, 3, 33, 5, {64, 128, 63}},
                                                  {2, 4, 128, 128, {300, 1, 129}},
                                                  {1, 5, 128, 64, {257}},
                                                  {4, 4, 64, 128, {65}},
                                                  {1, 2, 128, 128, {63, 64, 65, 1000}},
                                                  {1, 9, 64, 64, {0, 192, 66}},
                                                  // So many heads that a CTA of the chains has two strips.
                                                  {1, 70, 128, 128, {260}},
                                                  {1, 70, 64, 128, {260}}};

// Of the largest of an array; 1e-2 was seen of sums over all tokens.
constexpr double kAllowed = 2e-2;

using Gradients = std::map<std::string, std::vector<float>>;

// Of one call on the device `name`; `optional`: with decays, betas, states and all gradients.
class GradientRun {
 public:
  GradientRun(const char* name, const GradientCase& c, bool optional)
      : api_(name), c_(c), optional_(optional) {
    cu_ = {0};
    for (const int32_t n : c.lengths) cu_.push_back(cu_.back() + n);
    tokens_ = cu_.back();
    sequences_ = static_cast<int32_t>(c.lengths.size());
    keys_ = tokens_ * c.key_heads * c.key_dim;
    values_ = tokens_ * c.heads * c.value_dim;
    states_ = int64_t{sequences_} * c.heads * c.key_dim * c.value_dim;
    longest_ = *std::max_element(c.lengths.begin(), c.lengths.end());
    decay_ = normal(4, tokens_ * c.heads, 0.1f);
    beta_ = normal(5, tokens_ * c.heads, 1.0f);
    rates_ = normal(6, c.heads, 0.3f);
    for (float& x : decay_) x = -std::fabs(x);
    for (float& x : rates_) x = -std::fabs(x);
    for (float& x : beta_) x = 1.0f / (1.0f + std::exp(-x));
  }

  Gradients delta() {
    mr_gated_delta_backward_args args{};
    args.forward = {query(),
                    key(),
                    value(),
                    optional_ ? api_.put(decay_) : nullptr,
                    optional_ ? api_.put(beta_) : nullptr,
                    0.0f,
                    state(7),
                    nullptr,
                    api_.put(cu_),
                    nullptr,
                    sequences_,
                    c_.key_heads,
                    c_.heads,
                    c_.key_dim,
                    c_.value_dim,
                    longest_};
    args.d_out = api_.put(normal(9, values_, 1.0f));
    args.d_final_state = state(10);
    args.dq = wanted("q", keys_);
    args.dk = wanted("k", keys_);
    args.dv = wanted("v", values_);
    if (optional_) {
      args.dg = wanted("g", tokens_ * c_.heads);
      args.dbeta = wanted("beta", tokens_ * c_.heads);
      args.d_initial_state = wanted("state", states_);
    }
    run(args, mr_gated_delta_backward_workspace_bytes, mr_gated_delta_backward);
    return got();
  }

  Gradients scan() {
    mr_selective_scan_backward_args args{};
    args.forward = {value(),  api_.put(beta_), api_.put(rates_),
                    key(),    query(),         optional_ ? api_.put(normal(8, c_.heads, 1.0f)) : nullptr,
                    state(7), nullptr,         api_.put(cu_),
                    nullptr,  sequences_,      c_.key_heads,
                    c_.heads, c_.key_dim,      c_.value_dim,
                    longest_};
    args.d_out = api_.put(normal(9, values_, 1.0f));
    args.d_final_state = state(10);
    args.dx = wanted("x", values_);
    args.db = wanted("b", keys_);
    args.dc = wanted("c", keys_);
    args.ddt = wanted("dt", tokens_ * c_.heads);
    args.da = wanted("a", c_.heads);
    if (optional_) {
      args.dd = wanted("d", c_.heads);
      args.d_initial_state = wanted("state", states_);
    }
    run(args, mr_selective_scan_backward_workspace_bytes, mr_selective_scan_backward);
    return got();
  }

 private:
  float* query() { return api_.put(normal(1, keys_, 0.4f)); }
  float* key() { return api_.put(normal(2, keys_, 0.7f / std::sqrt(static_cast<float>(c_.key_dim)))); }
  float* value() { return api_.put(normal(3, values_, 1.0f)); }
  float* state(uint32_t seed) { return optional_ ? api_.put(normal(seed, states_, 0.5f)) : nullptr; }
  float* wanted(const char* name, int64_t count) {
    float* at = api_.put(std::vector<float>(static_cast<size_t>(count), NAN));
    wanted_[name] = {at, static_cast<size_t>(count)};
    return at;
  }
  template <class Args>
  void run(const Args& args, mr_status (*bytes_of)(mr_device*, const Args*, size_t*),
           mr_status (*backward)(mr_device*, const Args*, void*, size_t, mr_stream)) {
    size_t bytes = 0;
    ASSERT_EQ(bytes_of(api_.device, &args, &bytes), MR_OK) << mr_last_error();
    float* workspace = api_.put(std::vector<float>(bytes / sizeof(float) + 1, NAN));
    ASSERT_EQ(backward(api_.device, &args, workspace, bytes, nullptr), MR_OK) << mr_last_error();
  }
  Gradients got() {
    Gradients all;
    for (const auto& [name, at] : wanted_) all[name] = api_.get(at.first, at.second);
    return all;
  }

  LinearApi api_;
  const GradientCase& c_;
  const bool optional_;
  std::vector<int32_t> cu_;
  int64_t tokens_ = 0, keys_ = 0, values_ = 0, states_ = 0;
  int32_t sequences_ = 0, longest_ = 0;
  std::vector<float> decay_, beta_, rates_;
  std::map<std::string, std::pair<float*, size_t>> wanted_;
};

TEST(CudaLinearBackward, AsOnTheCpuAndTheSameBitsEachTime) {
  SKIP_WITHOUT_GPU("gradients of linear attention were not tested on one");
  for (const GradientCase& c : kGradientCases) {
    for (const bool delta : {true, false}) {
      for (const bool optional : {true, false}) {
        const auto gradients = [&](const char* name) {
          GradientRun run(name, c, optional);
          return delta ? run.delta() : run.scan();
        };
        const std::string what = (delta ? "delta, keys " : "scan, keys ") + std::to_string(c.key_dim);
        const Gradients cpu = gradients("cpu"), gpu = gradients("cuda");
        for (const auto& [name, want] : cpu) expect_close(gpu.at(name), want, kAllowed, what + ", d" + name);
        EXPECT_EQ(gradients("cuda"), gpu) << what;
      }
    }
  }
}

TEST(CudaLinearBackward, SaysWhatItNeeds) {
  SKIP_WITHOUT_GPU("what gradients of linear attention refuse was not tested on a GPU");
  LinearApi api("cuda");
  float* x = api.put(std::vector<float>(1024));
  mr_gated_delta_backward_args args{};
  args.forward.q = args.forward.k = args.forward.v = x;
  args.forward.cu_seqlens = api.put(std::vector<int32_t>{0, 1});
  args.forward.sequences = args.forward.key_heads = args.forward.value_heads = 1;
  args.forward.key_dim = args.forward.value_dim = 16;
  args.d_out = x;
  size_t bytes = 0;
  EXPECT_EQ(mr_gated_delta_backward_workspace_bytes(api.device, &args, &bytes), MR_ERROR_INVALID);
  EXPECT_NE(std::string(mr_last_error()).find("most_tokens is 0"), std::string::npos) << mr_last_error();
  args.forward.most_tokens = 1;
  args.forward.key_dim = 129;
  EXPECT_EQ(mr_gated_delta_backward_workspace_bytes(api.device, &args, &bytes), MR_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(mr_last_error()).find("keys of 129"), std::string::npos) << mr_last_error();
}

}  // namespace
}  // namespace millrace::api::gpu
