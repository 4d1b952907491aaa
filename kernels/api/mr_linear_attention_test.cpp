// Linear attention of the C API on every instruction set of this machine: against the recurrences in double,
// token by token; the same bits cut at chunks and on every table; what is refused. The layers that models
// make of the same kernels are compared with transformers in tests/golden_test.cpp.
#include "kernels/api/api_test_support.h"

namespace millrace::api_test {
namespace {

using Doubles = std::vector<double>;

struct LinearCase {
  int32_t key_heads, heads, key_dim, value_dim;
  std::vector<int32_t> lengths;
  bool initial;
};

const std::vector<LinearCase> kCases = {
    {1, 1, 1, 1, {1}, false},   {2, 4, 20, 24, {17, 0, 1, 33}, true}, {1, 3, 33, 5, {16, 48, 15}, false},
    {2, 2, 64, 64, {70}, true}, {4, 4, 7, 100, {5, 16, 100}, true},
};

struct LinearData {
  LinearData(const LinearCase& c, uint32_t seed) {
    std::mt19937 random(seed);
    cu.push_back(0);
    for (const int32_t n : c.lengths) cu.push_back(cu.back() + n);
    const int64_t tokens = cu.back();
    q = random_floats(random, tokens * c.key_heads * c.key_dim, 0.4f);
    k = random_floats(random, tokens * c.key_heads * c.key_dim,
                      0.7f / std::sqrt(static_cast<float>(c.key_dim)));
    v = random_floats(random, tokens * c.heads * c.value_dim);
    g = random_floats(random, tokens * c.heads, 0.3f);
    for (float& x : g) x = -std::fabs(x);
    beta = random_floats(random, tokens * c.heads);
    for (float& x : beta) x = 1.0f / (1.0f + std::exp(-x));
    per_sequence = int64_t{c.heads} * c.key_dim * c.value_dim;
    state = random_floats(random, per_sequence * static_cast<int64_t>(c.lengths.size()), 0.5f);
    out.assign(v.size(), -1.0f);
    final_state.assign(state.size(), -1.0f);
  }
  std::vector<int32_t> cu;
  std::vector<float> q, k, v, g, beta, state, out, final_state;
  int64_t per_sequence = 0;
};

// S = exp(g) S; S += k w^T with w = beta (v - S^T k), or w = v; o = scale S^T q. v is changed to what is
// written.
void recurrence(const LinearCase& c, const LinearData& d, bool delta, double scale, Doubles& out,
                Doubles& final) {
  out.assign(d.v.size(), 0.0);
  final.assign(d.state.size(), 0.0);
  for (size_t s = 0; s < c.lengths.size(); ++s) {
    for (int32_t h = 0; h < c.heads; ++h) {
      const int32_t kh = h / (c.heads / c.key_heads);
      double* state = final.data() + static_cast<int64_t>(s) * d.per_sequence + h * c.key_dim * c.value_dim;
      const float* first = d.state.data() + (state - final.data());
      for (int32_t i = 0; i < c.key_dim * c.value_dim; ++i) state[i] = c.initial ? first[i] : 0.0;
      for (int32_t t = d.cu[s]; t < d.cu[s + 1]; ++t) {
        const float* k = d.k.data() + (int64_t{t} * c.key_heads + kh) * c.key_dim;
        const float* q = d.q.data() + (int64_t{t} * c.key_heads + kh) * c.key_dim;
        for (int32_t i = 0; i < c.key_dim * c.value_dim; ++i)
          state[i] *= std::exp(static_cast<double>(d.g[static_cast<size_t>(t * c.heads + h)]));
        for (int32_t j = 0; j < c.value_dim; ++j) {
          double known = 0, o = 0;
          for (int32_t i = 0; i < c.key_dim; ++i) known += state[i * c.value_dim + j] * k[i];
          const auto at = static_cast<size_t>((int64_t{t} * c.heads + h) * c.value_dim + j);
          const double b = d.beta[static_cast<size_t>(t * c.heads + h)];
          const double w = delta ? b * (d.v[at] - known) : d.v[at] * b;
          for (int32_t i = 0; i < c.key_dim; ++i) {
            state[i * c.value_dim + j] += k[i] * w;
            o += state[i * c.value_dim + j] * q[i];
          }
          out[at] = scale * o;
        }
      }
    }
  }
}

void expect_near(const std::vector<float>& got, const Doubles& want, const std::string& what) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  // Float32 sums of a few dozen terms, carried through a hundred tokens.
  EXPECT_LE(std::sqrt(error), 2e-6 * std::sqrt(norm) + 1e-30) << what;
}

mr_gated_delta_args delta_args(const LinearCase& c, LinearData& d) {
  return {d.q.data(),
          d.k.data(),
          d.v.data(),
          d.g.data(),
          d.beta.data(),
          0.0f,
          c.initial ? d.state.data() : nullptr,
          d.final_state.data(),
          d.cu.data(),
          d.out.data(),
          static_cast<int32_t>(c.lengths.size()),
          c.key_heads,
          c.heads,
          c.key_dim,
          c.value_dim,
          0};
}

void run(mr_device* device, const mr_gated_delta_args& args) {
  size_t bytes = 0;
  ASSERT_EQ(mr_gated_delta_workspace_bytes(device, &args, &bytes), MR_OK) << mr_last_error();
  const Guarded workspace(bytes);
  ASSERT_EQ(mr_chunk_gated_delta_rule(device, &args, workspace.data(), bytes, nullptr), MR_OK)
      << mr_last_error();
}

TEST(LinearAttention, GatedDeltaRuleIsTheRecurrence) {
  for (size_t i = 0; i < kCases.size(); ++i) {
    const LinearCase& c = kCases[i];
    Doubles out, final;
    recurrence(c, LinearData(c, 7), true, 1.0 / std::sqrt(c.key_dim), out, final);
    std::vector<float> first, first_state;
    for (const std::string& isa : isas()) {
      LinearData d(c, 7);
      run(open_cpu(isa.c_str()).get(), delta_args(c, d));
      expect_near(d.out, out, isa + " case " + std::to_string(i));
      expect_near(d.final_state, final, isa + " state of case " + std::to_string(i));
      if (first.empty()) first = d.out, first_state = d.final_state;
      EXPECT_EQ(d.out, first) << isa;
      EXPECT_EQ(d.final_state, first_state) << isa;
    }
  }
}

TEST(LinearAttention, SelectiveScanIsTheRecurrence) {
  for (const LinearCase& c : kCases) {
    LinearData d(c, 9);
    std::mt19937 random(3);
    std::vector<float> a = random_floats(random, c.heads), skip = random_floats(random, c.heads);
    for (float& x : a) x = -std::fabs(x);
    const std::vector<float> dt = d.beta;
    for (size_t i = 0; i < d.g.size(); ++i) d.g[i] = a[i % static_cast<size_t>(c.heads)] * dt[i];
    Doubles out, final;
    recurrence(c, d, false, 1.0, out, final);
    for (size_t i = 0; i < out.size(); ++i)
      out[i] += skip[i / static_cast<size_t>(c.value_dim) % static_cast<size_t>(c.heads)] *
                static_cast<double>(d.v[i]);
    const mr_selective_scan_args args{d.v.data(),
                                      dt.data(),
                                      a.data(),
                                      d.k.data(),
                                      d.q.data(),
                                      skip.data(),
                                      c.initial ? d.state.data() : nullptr,
                                      d.final_state.data(),
                                      d.cu.data(),
                                      d.out.data(),
                                      static_cast<int32_t>(c.lengths.size()),
                                      c.key_heads,
                                      c.heads,
                                      c.key_dim,
                                      c.value_dim,
                                      0};
    const DevicePtr device = open_cpu();
    size_t bytes = 0;
    ASSERT_EQ(mr_selective_scan_workspace_bytes(device.get(), &args, &bytes), MR_OK) << mr_last_error();
    const Guarded workspace(bytes);
    ASSERT_EQ(mr_selective_scan(device.get(), &args, workspace.data(), bytes, nullptr), MR_OK)
        << mr_last_error();
    expect_near(d.out, out, "outputs");
    expect_near(d.final_state, final, "states");
  }
}

// A sequence that goes on from the state behind whole chunks has the bits that it has in one piece.
TEST(LinearAttention, CutAtAChunkItHasTheSameBits) {
  const LinearCase c{2, 4, 20, 24, {77}, true};
  LinearData whole(c, 5), cut(c, 5);
  const DevicePtr device = open_cpu(nullptr, 1);
  run(device.get(), delta_args(c, whole));
  std::vector<int32_t> cu = {0, 48};
  mr_gated_delta_args args = delta_args(c, cut);
  args.cu_seqlens = cu.data();
  run(device.get(), args);
  cu = {0, 29};
  args.q += 48 * c.key_heads * c.key_dim;
  args.k += 48 * c.key_heads * c.key_dim;
  args.v += 48 * c.heads * c.value_dim;
  args.out += 48 * c.heads * c.value_dim;
  args.g += 48 * c.heads;
  args.beta += 48 * c.heads;
  args.initial_state = cut.final_state.data();
  run(device.get(), args);
  EXPECT_EQ(cut.out, whole.out);
  EXPECT_EQ(cut.final_state, whole.final_state);
}

TEST(LinearAttention, ShortConvolutionOfEachChannel) {
  for (const int64_t channels : {1, 15, 16, 600}) {
    for (const int32_t taps : {1, 3, 4, 17}) {
      std::mt19937 random(11);
      const std::vector<int32_t> cu = {0, 19, 19, 20, 55};
      const std::vector<float> x = random_floats(random, 55 * channels),
                               weight = random_floats(random, channels * taps),
                               bias = random_floats(random, channels),
                               before = random_floats(random, 4 * (taps - 1) * channels);
      std::vector<float> out(x.size()), first, after(before.size());
      Doubles want;
      for (int s = 0; s < 4; ++s) {
        for (int32_t t = cu[s]; t < cu[s + 1]; ++t) {
          for (int64_t c = 0; c < channels; ++c) {
            double sum = bias[static_cast<size_t>(c)];
            for (int32_t i = 0; i < taps; ++i) {
              const int64_t from = t - taps + 1 + i;
              const double in = from >= cu[s]
                                    ? x[static_cast<size_t>(from * channels + c)]
                                    : before[static_cast<size_t>(
                                          (s * (taps - 1) + taps - 1 + from - cu[s]) * channels + c)];
              sum += in * weight[static_cast<size_t>(c * taps + i)];
            }
            want.push_back(sum / (1.0 + std::exp(-sum)));
          }
        }
      }
      for (const std::string& isa : isas()) {
        const mr_short_conv_args args{x.data(),
                                      weight.data(),
                                      bias.data(),
                                      before.data(),
                                      after.data(),
                                      cu.data(),
                                      out.data(),
                                      channels,
                                      4,
                                      taps,
                                      1,
                                      0};
        ASSERT_EQ(mr_short_conv(open_cpu(isa.c_str()).get(), &args, nullptr), MR_OK) << mr_last_error();
        expect_near(out, want, isa);
        if (first.empty()) first = out;
        EXPECT_EQ(out, first) << isa;
      }
      // Of the last sequence, 35 tokens, the last rows.
      for (int64_t i = 0; i < (taps - 1) * channels; ++i)
        EXPECT_EQ(after[static_cast<size_t>(3 * (taps - 1) * channels + i)],
                  x[static_cast<size_t>((55 - taps + 1) * channels + i)]);
    }
  }
}

TEST(LinearAttention, RefusesWhatIsWrong) {
  const LinearCase c{2, 4, 8, 8, {5, 3}, true};
  LinearData d(c, 1);
  const DevicePtr device = open_cpu();
  const mr_gated_delta_args good = delta_args(c, d);
  size_t bytes = 0;
  ASSERT_EQ(mr_gated_delta_workspace_bytes(device.get(), &good, &bytes), MR_OK);
  const Guarded workspace(bytes);
  const auto refused = [&](mr_gated_delta_args args, const char* word, mr_status status = MR_ERROR_INVALID) {
    EXPECT_REFUSED(mr_chunk_gated_delta_rule(device.get(), &args, workspace.data(), bytes, nullptr), status,
                   word);
  };
  mr_gated_delta_args bad = good;
  bad.value_heads = 3;
  refused(bad, "args.value_heads");
  bad = good;
  bad.key_dim = 0;
  refused(bad, "args.key_dim");
  bad = good;
  bad.v = nullptr;
  refused(bad, "args.v");
  bad = good;
  bad.scale = NAN;
  refused(bad, "args.scale");
  std::vector<int32_t> cu = {0, 5, 4};
  bad = good;
  bad.cu_seqlens = cu.data();
  refused(bad, "args.cu_seqlens[2]");
  bad = good;
  bad.most_tokens = 4;
  refused(bad, "sequence 0 has 5 tokens");
  EXPECT_REFUSED(mr_chunk_gated_delta_rule(device.get(), &good, workspace.data(), bytes - 1, nullptr),
                 MR_ERROR_NO_MEMORY, "workspace");
  mr_short_conv_args conv{};
  conv.channels = 4;
  conv.taps = 18;
  EXPECT_REFUSED(mr_short_conv(device.get(), &conv, nullptr), MR_ERROR_INVALID, "args.taps");
}

}  // namespace
}  // namespace millrace::api_test
