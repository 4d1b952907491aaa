// Routing, experts, norms, sampling and devices through the C API, against kernels/reference.
#include "base/sampling_math.h"
#include "kernels/api/api_test_support.h"
#include "kernels/reference/naive_moe.h"
#include "kernels/reference/naive_norm.h"

namespace millrace::api_test {
namespace {

TEST(MrDevice, IsOpenedByName) {
  mr_device* device = nullptr;
  ASSERT_EQ(mr_device_open("cpu", nullptr, &device), MR_OK) << mr_last_error();
  EXPECT_EQ(std::string(mr_device_description(device)).substr(0, 5), "cpu, ");
  EXPECT_EQ(mr_device_synchronize(device, nullptr), MR_OK);
  mr_device_close(device);
  mr_device_close(nullptr);
  EXPECT_REFUSED(mr_device_open(nullptr, nullptr, &device), MR_ERROR_INVALID, "name");
  EXPECT_REFUSED(mr_device_open("cpu", nullptr, nullptr), MR_ERROR_INVALID, "device");
  EXPECT_REFUSED(mr_device_open("tpu", nullptr, &device), MR_ERROR_INVALID, "tpu");
  EXPECT_REFUSED(mr_device_open("cuda:x", nullptr, &device), MR_ERROR_INVALID, "cuda:x");
  const mr_device_options negative{-1, nullptr}, unknown{1, "z80"};
  EXPECT_REFUSED(mr_device_open("cpu", &negative, &device), MR_ERROR_INVALID, "threads");
  EXPECT_REFUSED(mr_device_open("cpu", &unknown, &device), MR_ERROR_UNSUPPORTED, "z80");
  EXPECT_EQ(device, nullptr);
  EXPECT_STREQ(mr_status_name(MR_ERROR_NO_MEMORY), "MR_ERROR_NO_MEMORY");
  EXPECT_NE(std::string(mr_version()), "");
}

TEST(MrDevice, KnowsTypes) {
  int32_t elements = 0, bytes = 0;
  ASSERT_EQ(mr_dtype_block(MR_Q4_K, &elements, &bytes), MR_OK);
  EXPECT_EQ(elements, 256);
  EXPECT_EQ(bytes, 144);
  for (int type = MR_F32; type <= MR_Q4_Z; ++type) {
    mr_dtype parsed = MR_F32;
    ASSERT_EQ(mr_dtype_parse(mr_dtype_name(static_cast<mr_dtype>(type)), &parsed), MR_OK) << mr_last_error();
    EXPECT_EQ(parsed, type);
  }
  mr_dtype parsed = MR_F32;
  EXPECT_REFUSED(mr_dtype_parse("q9_q", &parsed), MR_ERROR_INVALID, "q9_q");
  EXPECT_REFUSED(mr_dtype_parse("i32", &parsed), MR_ERROR_INVALID, "i32");
  EXPECT_REFUSED(mr_dtype_block(static_cast<mr_dtype>(15), &elements, &bytes), MR_ERROR_INVALID, "type");
}

TEST(MrMoe, RoutesAsTheReferenceDoes) {
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    std::mt19937 random(6);
    const int32_t experts = 75, k = 6, rows = 40;
    std::vector<float> scores = random_floats(random, rows * experts, 3.0f);
    for (int32_t i = 0; i < rows * experts; i += 5) scores[i] = std::round(scores[i]);  // ties
    scores[3] = NAN;
    for (const auto over : {MR_SOFTMAX_CHOSEN, MR_SOFTMAX_ALL}) {
      if (over == MR_SOFTMAX_ALL) scores[3] = 0.5f;  // a NaN is in everybody's sum then
      std::vector<int32_t> chosen(rows * k), expected(k);
      std::vector<float> weights(rows * k), expected_weights(k);
      ASSERT_EQ(mr_moe_route(device.get(), scores.data(), rows, experts, k, over, chosen.data(),
                             weights.data(), nullptr),
                MR_OK)
          << mr_last_error();
      for (int32_t t = 0; t < rows; ++t) {
        reference::route_top_k(
            &scores[t * experts], experts, k,
            over == MR_SOFTMAX_ALL ? reference::SoftmaxOver::kAll : reference::SoftmaxOver::kChosen,
            expected.data(), expected_weights.data());
        for (int32_t i = 0; i < k; ++i) {
          EXPECT_EQ(chosen[t * k + i], expected[i]) << isa << ", token " << t;
          EXPECT_NEAR(weights[t * k + i], expected_weights[i], 1e-5f) << isa << ", token " << t;
        }
      }
    }
    EXPECT_REFUSED(mr_moe_route(device.get(), nullptr, 1, 4, 2, MR_SOFTMAX_ALL, nullptr, nullptr, nullptr),
                   MR_ERROR_INVALID, "scores");
    EXPECT_REFUSED(
        mr_moe_route(device.get(), scores.data(), 1, 4, 5, MR_SOFTMAX_ALL, nullptr, nullptr, nullptr),
        MR_ERROR_INVALID, "k is 5");
  }
}

struct Experts {
  TestMatrix gate, up, down;
  MadeWeight gate_weight, up_weight, down_weight;
};
Experts random_experts(mr_device* device, std::mt19937& random, mr_dtype type, mr_dtype down_type,
                       int64_t experts, int64_t hidden, int64_t inner) {
  Experts e{random_matrix(device, random, type, experts, inner, hidden),
            random_matrix(device, random, type, experts, inner, hidden),
            random_matrix(device, random, down_type, experts, hidden, inner),
            {},
            {},
            {}};
  e.gate_weight = make_weight(device, e.gate.matrix);
  e.up_weight = make_weight(device, e.up.matrix);
  e.down_weight = make_weight(device, e.down.matrix);
  return e;
}

mr_status run_moe(mr_device* device, const mr_moe_args& args) {
  size_t bytes = 0;
  const mr_status sized = mr_moe_workspace_bytes(device, &args, &bytes);
  if (sized != MR_OK) return sized;
  const Guarded workspace(bytes);
  return mr_moe(device, &args, workspace.data(), bytes, nullptr);
}

void check_moe(mr_device* device, mr_dtype type, mr_dtype down_type, int64_t rows, int64_t hidden,
               int64_t inner, double bound) {
  std::mt19937 random(8);
  const int64_t experts = 5;
  const int32_t k = 3;
  const Experts e = random_experts(device, random, type, down_type, experts, hidden, inner);
  const std::vector<float> x = random_floats(random, rows * hidden, 0.1f),
                           gate_bias = random_floats(random, experts * inner),
                           up_bias = random_floats(random, experts * inner),
                           down_bias = random_floats(random, experts * hidden);
  std::vector<int32_t> chosen(static_cast<size_t>(rows * k));
  std::vector<float> weights = random_floats(random, rows * k);
  for (int64_t i = 0; i < rows * k; ++i) chosen[i] = static_cast<int32_t>((i + random() % 2) % experts);
  for (const mr_activation activation : {MR_SWIGLU, MR_CLAMPED_SWIGLU}) {
    const bool biased = activation == MR_CLAMPED_SWIGLU;
    std::vector<float> y = random_floats(random, rows * hidden), expected = y;
    const mr_moe_args args{e.gate_weight.handle.get(),
                           e.up_weight.handle.get(),
                           e.down_weight.handle.get(),
                           biased ? gate_bias.data() : nullptr,
                           biased ? up_bias.data() : nullptr,
                           biased ? down_bias.data() : nullptr,
                           activation,
                           1.702f,
                           7.0f,
                           k,
                           chosen.data(),
                           weights.data(),
                           x.data(),
                           y.data(),
                           rows};
    ASSERT_EQ(run_moe(device, args), MR_OK) << mr_last_error();
    const reference::FeedForward op{{&e.gate.view, args.gate_bias},
                                    {&e.up.view, args.up_bias},
                                    {&e.down.view, args.down_bias},
                                    biased ? Activation::kClampedSwiglu : Activation::kSilu};
    for (int64_t t = 0; t < rows; ++t) {
      reference::experts_add(op, &chosen[t * k], &weights[t * k], k, &x[t * hidden], &expected[t * hidden]);
    }
    EXPECT_LT(relative_error(y, expected), bound)
        << mr_device_description(device) << ", " << mr_dtype_name(type) << ", " << rows << " rows";
  }
}

TEST(MrMoe, ExpertsAreTheReferences) {
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    for (const int64_t rows : {1, 7, 50}) {
      check_moe(device.get(), MR_F32, MR_F32, rows, 40, 24, 1e-5);
      check_moe(device.get(), MR_MXFP4, MR_MXFP4, rows, 96, 64, 0.03);
      check_moe(device.get(), MR_Q8_0, MR_BF16, rows, 64, 160, 0.02);
    }
    check_moe(device.get(), MR_Q4_K, MR_Q6_K, 20, 256, 256, 0.02);
  }
}

TEST(MrMoe, RefusesBadArguments) {
  const DevicePtr device = open_cpu(nullptr, 1);
  std::mt19937 random(8);
  const Experts e = random_experts(device.get(), random, MR_F32, MR_F32, 4, 32, 64);
  std::vector<int32_t> chosen{0, 1, 2, 3};
  std::vector<float> weights(4), x(64), y(64);
  const mr_moe_args good{e.gate_weight.handle.get(),
                         e.up_weight.handle.get(),
                         e.down_weight.handle.get(),
                         nullptr,
                         nullptr,
                         nullptr,
                         MR_SWIGLU,
                         0.0f,
                         0.0f,
                         2,
                         chosen.data(),
                         weights.data(),
                         x.data(),
                         y.data(),
                         2};
  const auto refused = [&](auto change, mr_status status, const char* word) {
    mr_moe_args bad = good;
    change(bad);
    EXPECT_REFUSED(run_moe(device.get(), bad), status, word);
  };
  EXPECT_EQ(run_moe(device.get(), good), MR_OK) << mr_last_error();
  refused([](auto& a) { a.gate = nullptr; }, MR_ERROR_INVALID, "args.gate");
  refused([](auto& a) { a.down = a.up; }, MR_ERROR_INVALID, "args.down");
  refused([](auto& a) { a.up = a.down; }, MR_ERROR_INVALID, "args.up");
  refused([](auto& a) { a.k = 5; }, MR_ERROR_INVALID, "args.k");
  refused([](auto& a) { a.rows = -1; }, MR_ERROR_INVALID, "args.rows");
  refused([](auto& a) { a.chosen = nullptr; }, MR_ERROR_INVALID, "args.chosen");
  refused([](auto& a) { a.x = nullptr; }, MR_ERROR_INVALID, "args.x");
  chosen[3] = 4;
  EXPECT_REFUSED(run_moe(device.get(), good), MR_ERROR_INVALID, "args.chosen is 4");
}

TEST(MrNorm, IsTheReferences) {
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    std::mt19937 random(3);
    for (const int64_t cols : {1, 31, 64, 200}) {
      const std::vector<float> x = random_floats(random, 37 * (cols + 3)),
                               weight = random_floats(random, cols);
      std::vector<float> y(37 * (cols + 1), 7.0f), expected(37 * (cols + 1), 7.0f);
      ASSERT_EQ(mr_rmsnorm(device.get(), x.data(), cols + 3, weight.data(), 1e-5f, 37, cols, y.data(),
                           cols + 1, nullptr),
                MR_OK)
          << mr_last_error();
      for (int64_t r = 0; r < 37; ++r) {
        reference::rmsnorm(&x[r * (cols + 3)], weight.data(), 1e-5f, cols, &expected[r * (cols + 1)]);
      }
      EXPECT_LT(relative_error(y, expected), 1e-6) << isa << ", " << cols;
    }
  }
  const DevicePtr device = open_cpu(nullptr, 1);
  std::vector<float> x(64);
  EXPECT_REFUSED(mr_rmsnorm(device.get(), x.data(), 0, nullptr, 0.1f, 2, 32, x.data(), 0, nullptr),
                 MR_ERROR_INVALID, "weight");
  EXPECT_REFUSED(mr_rmsnorm(device.get(), x.data(), 31, x.data(), 0.1f, 2, 32, x.data(), 0, nullptr),
                 MR_ERROR_INVALID, "x_stride");
  EXPECT_REFUSED(mr_rmsnorm(device.get(), x.data(), 0, x.data(), 0.1f, -2, 32, x.data(), 0, nullptr),
                 MR_ERROR_INVALID, "rows");
}

// The rule, plainly: sort, cut, add up in the order of ids.
int32_t plain_draw(const std::vector<float>& logits, const mr_sample_params& p) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  std::vector<std::pair<float, int32_t>> kept;
  for (size_t i = 0; i < logits.size(); ++i) {
    kept.emplace_back(sampling::weight_of(logits[i], largest, 1.0f / p.temperature), static_cast<int32_t>(i));
  }
  std::sort(kept.begin(), kept.end(),
            [](auto& a, auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  if (p.temperature < 1e-6f || p.top_k == 1) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  if (p.top_k > 0) kept.resize(std::min(kept.size(), static_cast<size_t>(p.top_k)));
  uint64_t total = 0, sum = 0;
  for (const auto& [weight, id] : kept) total += sampling::units_of(weight);
  if (p.top_p < 1.0f) {
    size_t n = 0;
    while (sum < sampling::units_of_mass(p.top_p, total)) sum += sampling::units_of(kept[n++].first);
    kept.resize(n);
  }
  std::erase_if(kept, [&](auto& e) { return e.first < p.min_p; });
  std::sort(kept.begin(), kept.end(), [](auto& a, auto& b) { return a.second < b.second; });
  total = 0;
  for (const auto& [weight, id] : kept) total += sampling::units_of(weight);
  uint64_t left = sampling::drawn_unit(p.uniform, total);
  for (const auto& [weight, id] : kept) {
    if (left < sampling::units_of(weight)) return id;
    left -= sampling::units_of(weight);
  }
  return -99;
}

TEST(MrSample, DrawsByTheRule) {
  const DevicePtr device = open_cpu();
  std::mt19937 random(12);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const int64_t rows = 600, vocab = 333;
  std::vector<float> logits = random_floats(random, rows * vocab, 3.0f);
  for (size_t i = 0; i < logits.size(); i += 3) logits[i] = std::round(logits[i]);  // ties
  std::vector<mr_sample_params> params;
  for (int64_t r = 0; r < rows; ++r) {
    params.push_back({r % 7 == 0 ? 0.0f : 0.3f + static_cast<float>(r % 5) * 0.5f,
                      r % 3 == 0 ? 0 : static_cast<int32_t>(random() % 400),
                      r % 4 == 0 ? 1.0f : 0.05f + 0.9f * static_cast<float>(uniform(random)),
                      r % 5 == 0 ? 0.2f : 0.0f, uniform(random)});
  }
  size_t bytes = 0;
  ASSERT_EQ(mr_sample_workspace_bytes(device.get(), rows, vocab, &bytes), MR_OK);
  const Guarded workspace(bytes);
  std::vector<int32_t> tokens(rows);
  ASSERT_EQ(mr_sample(device.get(), logits.data(), rows, vocab, params.data(), tokens.data(),
                      workspace.data(), bytes, nullptr),
            MR_OK)
      << mr_last_error();
  for (int64_t r = 0; r < rows; ++r) {
    EXPECT_EQ(tokens[r], plain_draw({&logits[r * vocab], &logits[r * vocab] + vocab}, params[r]))
        << "row " << r;
  }

  logits[4] = NAN;
  std::fill_n(&logits[vocab], vocab, -INFINITY);
  ASSERT_EQ(mr_sample(device.get(), logits.data(), 2, vocab, params.data(), tokens.data(), workspace.data(),
                      bytes, nullptr),
            MR_OK);
  EXPECT_EQ(tokens[0], MR_TOKEN_NAN);
  EXPECT_EQ(tokens[1], MR_TOKEN_NONE);
  const auto refused = [&](auto change, const char* word) {
    mr_sample_params bad = params[1];
    change(bad);
    EXPECT_REFUSED(mr_sample(device.get(), logits.data(), 1, vocab, &bad, tokens.data(), workspace.data(),
                             bytes, nullptr),
                   MR_ERROR_INVALID, word);
  };
  refused([](auto& p) { p.top_p = 0.0f; }, "top_p");
  refused([](auto& p) { p.top_k = -1; }, "top_k");
  refused([](auto& p) { p.min_p = NAN; }, "min_p");
  refused([](auto& p) { p.uniform = 1.0; }, "uniform");
  refused([](auto& p) { p.temperature = -1.0f; }, "temperature");
  EXPECT_REFUSED(mr_sample(device.get(), logits.data(), 1, vocab, params.data(), tokens.data(),
                           workspace.data(), 64, nullptr),
                 MR_ERROR_NO_MEMORY, "workspace");
}

}  // namespace
}  // namespace millrace::api_test
