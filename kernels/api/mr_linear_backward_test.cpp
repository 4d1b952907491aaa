// wkv7 and the gradients of linear attention on this machine's CPU: against the recurrences in double, token
// by token, and their differences; the same bits cut at chunks, on every table and with any number of
// threads; what is refused.
#include <fstream>
#include <functional>
#include <map>

#include "kernels/api/api_test_support.h"

namespace millrace::api_test {
namespace {

using Doubles = std::vector<double>;
using Floats = std::vector<float>;

// A rule's inputs by name, in double: what is differentiated.
using Inputs = std::map<std::string, Doubles>;

struct BackwardCase {
  int32_t key_heads, heads, key_dim, value_dim;
  std::vector<int32_t> cu;
  int32_t sequences() const { return static_cast<int32_t>(cu.size()) - 1; }
  int64_t tokens() const { return cu.back(); }
  int64_t state_size() const { return int64_t{heads} * key_dim * value_dim; }
};

const std::vector<BackwardCase> kBackwardCases = {
    {1, 1, 1, 1, {0, 1}},
    {1, 2, 3, 5, {0, 5, 5, 24}},
    {2, 2, 4, 3, {0, 16, 49, 50}},
    {2, 6, 2, 2, {0, 33}},
};

struct Results {
  Doubles out, final_state;
};

// S = diag(e) S + b (S^T a)^T + k v^T, o = S^T q, of one head and token; S: [key_dim][value_dim].
void step(double* state, int64_t keys, int64_t values, const double* e, const double* a, const double* b,
          const double* k, const double* v, const double* q, double* o) {
  Doubles u(static_cast<size_t>(values), 0.0);
  for (int64_t d = 0; a != nullptr && d < keys; ++d)
    for (int64_t j = 0; j < values; ++j) u[static_cast<size_t>(j)] += a[d] * state[d * values + j];
  std::fill_n(o, values, 0.0);
  for (int64_t d = 0; d < keys; ++d) {
    for (int64_t j = 0; j < values; ++j) {
      double& s = state[d * values + j];
      s = e[d] * s + (b == nullptr ? 0.0 : b[d] * u[static_cast<size_t>(j)]) + k[d] * v[j];
      o[j] += s * q[d];
    }
  }
}

// body(state, token, head, out) of every token, in order.
template <class Body>
Results for_each_step(const BackwardCase& c, const Inputs& in, const Body& body) {
  Results r;
  r.final_state = in.at("state");
  r.out.resize(static_cast<size_t>(c.tokens() * c.heads * c.value_dim));
  for (int32_t s = 0; s < c.sequences(); ++s) {
    for (int32_t h = 0; h < c.heads; ++h) {
      double* state = r.final_state.data() + s * c.state_size() + h * int64_t{c.key_dim} * c.value_dim;
      for (int32_t t = c.cu[static_cast<size_t>(s)]; t < c.cu[static_cast<size_t>(s) + 1]; ++t)
        body(state, t, h, r.out.data() + (int64_t{t} * c.heads + h) * c.value_dim);
    }
  }
  return r;
}

constexpr double kDeltaScale = 0.7, kWkv7Scale = 1.3;

Results delta_rule(const BackwardCase& c, const Inputs& in) {
  return for_each_step(c, in, [&](double* state, int64_t t, int32_t h, double* o) {
    const int64_t key = (t * c.key_heads + h / (c.heads / c.key_heads)) * c.key_dim, at = t * c.heads + h;
    const double *q = &in.at("q")[static_cast<size_t>(key)], *k = &in.at("k")[static_cast<size_t>(key)];
    const double decay = std::exp(in.at("g")[static_cast<size_t>(at)]);
    const double beta = in.at("beta")[static_cast<size_t>(at)];
    for (int64_t i = 0; i < int64_t{c.key_dim} * c.value_dim; ++i) state[i] *= decay;
    std::fill_n(o, c.value_dim, 0.0);
    for (int64_t j = 0; j < c.value_dim; ++j) {
      double known = 0.0;
      for (int64_t d = 0; d < c.key_dim; ++d) known += state[d * c.value_dim + j] * k[d];
      const double w = beta * (in.at("v")[static_cast<size_t>(at * c.value_dim + j)] - known);
      for (int64_t d = 0; d < c.key_dim; ++d) {
        state[d * c.value_dim + j] += k[d] * w;
        o[j] += kDeltaScale * q[d] * state[d * c.value_dim + j];
      }
    }
  });
}

Results scan_rule(const BackwardCase& c, const Inputs& in) {
  return for_each_step(c, in, [&](double* state, int64_t t, int32_t h, double* o) {
    const auto key = static_cast<size_t>((t * c.key_heads + h / (c.heads / c.key_heads)) * c.key_dim);
    const auto at = static_cast<size_t>(t * c.heads + h), head = static_cast<size_t>(h);
    const double dt = in.at("dt")[at], *x = &in.at("x")[at * static_cast<size_t>(c.value_dim)];
    const Doubles e(static_cast<size_t>(c.key_dim), std::exp(dt * in.at("a")[head]));
    Doubles v(x, x + c.value_dim);
    for (double& value : v) value *= dt;
    step(state, c.key_dim, c.value_dim, e.data(), nullptr, nullptr, &in.at("b")[key], v.data(),
         &in.at("c")[key], o);
    for (int64_t j = 0; j < c.value_dim; ++j) o[j] += in.at("d")[head] * x[j];
  });
}

Results wkv7_rule(const BackwardCase& c, const Inputs& in) {
  return for_each_step(c, in, [&](double* state, int64_t t, int32_t h, double* o) {
    const int64_t at = t * c.heads + h;
    const auto of = [&](const char* name, int64_t dim) {
      return &in.at(name)[static_cast<size_t>(at * dim)];
    };
    Doubles e(of("w", c.key_dim), of("w", c.key_dim) + c.key_dim);
    Doubles r(of("r", c.key_dim), of("r", c.key_dim) + c.key_dim);
    for (double& x : e) x = std::exp(x);
    for (double& x : r) x *= kWkv7Scale;
    step(state, c.key_dim, c.value_dim, e.data(), of("a", c.key_dim), of("b", c.key_dim), of("k", c.key_dim),
         of("v", c.value_dim), r.data(), o);
  });
}

using Shapes = std::vector<std::pair<const char*, int64_t>>;

struct Drawn {
  Inputs doubles;
  std::map<std::string, Floats> floats;
  Floats d_out, d_final;
  float* at(const char* name) { return floats.at(name).data(); }
};

// Values that float32 holds. `logs` are not above 0.
Drawn draw(const BackwardCase& c, const Shapes& shapes, const std::string& logs, uint32_t seed) {
  std::mt19937 random(seed);
  Drawn drawn;
  const auto add = [&](const char* name, int64_t size) {
    Floats values = random_floats(random, size, 0.6f);
    for (float& x : values) {
      if (logs == name) x = -std::fabs(x);
    }
    drawn.doubles[name] = Doubles(values.begin(), values.end());
    drawn.floats[name] = std::move(values);
  };
  for (const auto& shape : shapes) add(shape.first, shape.second);
  add("state", c.state_size() * c.sequences());
  drawn.d_out = random_floats(random, c.tokens() * c.heads * c.value_dim);
  drawn.d_final = random_floats(random, c.state_size() * c.sequences());
  return drawn;
}

// The gradients of sum(out d_out) + sum(final d_final) are as central differences of the rule in double say.
void expect_gradients(const BackwardCase& c, Drawn& drawn, const std::map<std::string, Floats>& got,
                      const std::function<Results(const BackwardCase&, const Inputs&)>& rule) {
  const auto loss = [&] {
    const Results r = rule(c, drawn.doubles);
    double sum = 0.0;
    for (size_t i = 0; i < r.out.size(); ++i) sum += r.out[i] * drawn.d_out[i];
    for (size_t i = 0; i < r.final_state.size(); ++i) sum += r.final_state[i] * drawn.d_final[i];
    return sum;
  };
  for (const auto& entry : got) {
    Doubles& values = drawn.doubles.at(entry.first);
    const Floats& gradient = entry.second;
    ASSERT_EQ(values.size(), gradient.size()) << entry.first;
    double largest = 1e-3;
    for (const float x : gradient) largest = std::max(largest, std::fabs(double{x}));
    const size_t some = std::max<size_t>(1, values.size() / 40);  // forty of each
    for (size_t i = 0; i < values.size(); i += some) {
      constexpr double kStep = 1e-5;
      const double was = values[i];
      values[i] = was + kStep;
      const double up = loss();
      values[i] = was - kStep;
      const double want = (up - loss()) / (2 * kStep);
      values[i] = was;
      EXPECT_NEAR(gradient[i], want, 1e-6 * largest) << entry.first << "[" << i << "]";
    }
  }
}

Floats like(const Floats& values) { return Floats(values.size(), NAN); }

template <class Args>
void run_backward(mr_device* device, const Args& args,
                  mr_status (*bytes_of)(mr_device*, const Args*, size_t*),
                  mr_status (*run)(mr_device*, const Args*, void*, size_t, mr_stream)) {
  size_t bytes = 0;
  ASSERT_EQ(bytes_of(device, &args, &bytes), MR_OK) << mr_last_error();
  const Guarded workspace(bytes);
  ASSERT_EQ(run(device, &args, workspace.data(), bytes, nullptr), MR_OK) << mr_last_error();
}

Drawn draw_delta(const BackwardCase& c) {
  const int64_t n = c.tokens();
  return draw(c,
              {{"q", n * c.key_heads * c.key_dim},
               {"k", n * c.key_heads * c.key_dim},
               {"v", n * c.heads * c.value_dim},
               {"g", n * c.heads},
               {"beta", n * c.heads}},
              "g", 21);
}

mr_gated_delta_backward_args delta_args(const BackwardCase& c, Drawn& d, std::map<std::string, Floats>& to) {
  for (const auto& entry : d.floats) to[entry.first] = like(entry.second);
  mr_gated_delta_backward_args args{};
  args.forward = {
      d.at("q"),     d.at("k"), d.at("v"),   d.at("g"), d.at("beta"),  static_cast<float>(kDeltaScale),
      d.at("state"), nullptr,   c.cu.data(), nullptr,   c.sequences(), c.key_heads,
      c.heads,       c.key_dim, c.value_dim, 0};
  args.d_out = d.d_out.data();
  args.d_final_state = d.d_final.data();
  args.dq = to["q"].data();
  args.dk = to["k"].data();
  args.dv = to["v"].data();
  args.dg = to["g"].data();
  args.dbeta = to["beta"].data();
  args.d_initial_state = to["state"].data();
  return args;
}

TEST(LinearBackward, GatedDeltaRule) {
  for (const BackwardCase& c : kBackwardCases) {
    Drawn d = draw_delta(c);
    std::map<std::string, Floats> got, threads;
    run_backward(open_cpu().get(), delta_args(c, d, got), mr_gated_delta_backward_workspace_bytes,
                 mr_gated_delta_backward);
    expect_gradients(c, d, got, delta_rule);
    run_backward(open_cpu(nullptr, 1).get(), delta_args(c, d, threads),
                 mr_gated_delta_backward_workspace_bytes, mr_gated_delta_backward);
    EXPECT_EQ(got, threads);
  }
}

TEST(LinearBackward, SelectiveScanAndPlainLinearAttention) {
  for (const BackwardCase& c : kBackwardCases) {
    for (const bool plain : {false, true}) {
      const int64_t n = c.tokens();
      Drawn d = draw(c,
                     {{"x", n * c.heads * c.value_dim},
                      {"dt", n * c.heads},
                      {"a", c.heads},
                      {"b", n * c.key_heads * c.key_dim},
                      {"c", n * c.key_heads * c.key_dim},
                      {"d", c.heads}},
                     "a", 22);
      for (const char* name : {"dt", "a"}) {
        if (!plain) break;
        const float value = name[0] == 'd' ? 1.0f : 0.0f;
        std::fill(d.floats[name].begin(), d.floats[name].end(), value);
        std::fill(d.doubles[name].begin(), d.doubles[name].end(), value);
      }
      std::map<std::string, Floats> got;
      for (const auto& entry : d.floats) got[entry.first] = like(entry.second);
      mr_selective_scan_backward_args args{};
      args.forward = {d.at("x"),     d.at("dt"), d.at("a"),   d.at("b"), d.at("c"),     d.at("d"),
                      d.at("state"), nullptr,    c.cu.data(), nullptr,   c.sequences(), c.key_heads,
                      c.heads,       c.key_dim,  c.value_dim, 0};
      args.d_out = d.d_out.data();
      args.d_final_state = d.d_final.data();
      args.dx = got["x"].data();
      args.ddt = got["dt"].data();
      args.da = got["a"].data();
      args.db = got["b"].data();
      args.dc = got["c"].data();
      args.dd = got["d"].data();
      args.d_initial_state = got["state"].data();
      run_backward(open_cpu().get(), args, mr_selective_scan_backward_workspace_bytes,
                   mr_selective_scan_backward);
      expect_gradients(c, d, got, scan_rule);
    }
  }
}

Drawn draw_wkv7(const BackwardCase& c) {
  const int64_t keys = c.tokens() * c.heads * c.key_dim;
  return draw(c,
              {{"r", keys},
               {"w", keys},
               {"k", keys},
               {"v", c.tokens() * c.heads * c.value_dim},
               {"a", keys},
               {"b", keys}},
              "w", 23);
}

mr_wkv7_args wkv7_args(const BackwardCase& c, Drawn& d, float* out, float* final_state) {
  return {d.at("r"),
          d.at("w"),
          d.at("k"),
          d.at("v"),
          d.at("a"),
          d.at("b"),
          static_cast<float>(kWkv7Scale),
          d.at("state"),
          final_state,
          c.cu.data(),
          out,
          c.sequences(),
          c.heads,
          c.key_dim,
          c.value_dim,
          0};
}

void run_wkv7(mr_device* device, const mr_wkv7_args& args) {
  size_t bytes = 0;
  ASSERT_EQ(mr_wkv7_workspace_bytes(device, &args, &bytes), MR_OK) << mr_last_error();
  const Guarded workspace(bytes);
  ASSERT_EQ(mr_chunk_wkv7(device, &args, workspace.data(), bytes, nullptr), MR_OK) << mr_last_error();
}

TEST(LinearBackward, Wkv7) {
  for (const BackwardCase& c : kBackwardCases) {
    Drawn d = draw_wkv7(c);
    std::map<std::string, Floats> got;
    for (const auto& entry : d.floats) got[entry.first] = like(entry.second);
    mr_wkv7_backward_args args{};
    args.forward = wkv7_args(c, d, nullptr, nullptr);
    args.d_out = d.d_out.data();
    args.d_final_state = d.d_final.data();
    args.dr = got["r"].data();
    args.dw = got["w"].data();
    args.dk = got["k"].data();
    args.dv = got["v"].data();
    args.da = got["a"].data();
    args.db = got["b"].data();
    args.d_initial_state = got["state"].data();
    run_backward(open_cpu().get(), args, mr_wkv7_backward_workspace_bytes, mr_wkv7_backward);
    expect_gradients(c, d, got, wkv7_rule);
  }
}

void expect_gradient_near(const Floats& got, const Doubles& want, const std::string& what) {
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  // Float32 sums of a few dozen terms, carried through a hundred tokens.
  EXPECT_LE(std::sqrt(error), 3e-6 * std::sqrt(norm) + 1e-30) << what;
}

TEST(Wkv7, IsTheRecurrenceOnEveryTable) {
  const std::vector<BackwardCase> cases = {{1, 1, 1, 1, {0, 1}},
                                           {2, 2, 20, 24, {0, 17, 17, 18, 51}},
                                           {1, 1, 64, 64, {0, 100}},
                                           {3, 3, 33, 5, {0, 16, 64}}};
  for (const BackwardCase& c : cases) {
    Drawn d = draw_wkv7(c);
    // Keys of length 1 and rates below 1, or the state would grow without end.
    for (size_t at = 0; at < d.floats["a"].size(); at += static_cast<size_t>(c.key_dim)) {
      double squares = 1e-6;
      for (size_t i = at; i < at + static_cast<size_t>(c.key_dim); ++i)
        squares += double{d.floats["a"][i]} * d.floats["a"][i];
      for (size_t i = at; i < at + static_cast<size_t>(c.key_dim); ++i) {
        const auto key = static_cast<float>(d.floats["a"][i] / std::sqrt(squares));
        d.floats["a"][i] = -key;
        d.floats["b"][i] = key * std::min(0.9f, std::fabs(d.floats["b"][i]));
      }
    }
    for (const char* name : {"a", "b"})
      d.doubles[name] = Doubles(d.floats[name].begin(), d.floats[name].end());
    const Results want = wkv7_rule(c, d.doubles);
    Floats first, first_state;
    for (const std::string& isa : isas()) {
      Floats out(want.out.size(), NAN), state(want.final_state.size(), NAN);
      run_wkv7(open_cpu(isa.c_str()).get(), wkv7_args(c, d, out.data(), state.data()));
      expect_gradient_near(out, want.out, isa);
      expect_gradient_near(state, want.final_state, isa + " state");
      if (first.empty()) first = out, first_state = state;
      EXPECT_EQ(out, first) << isa;
      EXPECT_EQ(state, first_state) << isa;
    }
  }
}

// A sequence that goes on from the state behind whole chunks has the bits that it has in one piece, and
// strong decays, whose products are below what float32 holds, do no harm.
TEST(Wkv7, CutAtAChunkItHasTheSameBits) {
  const BackwardCase c{2, 2, 20, 24, {0, 77}};
  Drawn d = draw_wkv7(c);
  for (size_t i = 0; i < d.floats["w"].size(); i += 3) d.floats["w"][i] = -30.0f;
  Floats whole(static_cast<size_t>(77 * 2 * 24)), whole_state(static_cast<size_t>(c.state_size()));
  Floats cut = whole, cut_state = whole_state;
  const DevicePtr device = open_cpu(nullptr, 1);
  run_wkv7(device.get(), wkv7_args(c, d, whole.data(), whole_state.data()));
  for (const float x : whole) ASSERT_TRUE(std::isfinite(x));
  std::vector<int32_t> cu = {0, 48};
  mr_wkv7_args args = wkv7_args(c, d, cut.data(), cut_state.data());
  args.cu_seqlens = cu.data();
  run_wkv7(device.get(), args);
  cu = {0, 29};
  for (const float** of : {&args.r, &args.w, &args.k, &args.a, &args.b}) *of += 48 * 2 * 20;
  args.v += 48 * 2 * 24;
  args.out += 48 * 2 * 24;
  args.initial_state = cut_state.data();
  run_wkv7(device.get(), args);
  EXPECT_EQ(cut, whole);
  EXPECT_EQ(cut_state, whole_state);
}

// tests/golden/make_linear_gradients.py: what torch's autograd has in float64.
class TorchGradients {
 public:
  TorchGradients() {
    std::ifstream in("tests/golden/linear_gradients.f32", std::ios::binary | std::ios::ate);
    EXPECT_TRUE(in) << "tests run in the repository's root";
    values_.resize(static_cast<size_t>(in.tellg()) / sizeof(float));
    in.seekg(0);
    in.read(reinterpret_cast<char*>(values_.data()),
            static_cast<std::streamsize>(values_.size() * sizeof(float)));
  }
  Floats take(int64_t count) {
    const auto from = values_.begin() + static_cast<ptrdiff_t>(at_);
    at_ += static_cast<size_t>(count);
    return at_ <= values_.size() ? Floats(from, from + count) : Floats(static_cast<size_t>(count), NAN);
  }
  bool at_end() const { return at_ == values_.size(); }

 private:
  Floats values_;
  size_t at_ = 0;
};

TEST(LinearBackward, AgreesWithTorchsAutograd) {
  const std::vector<int32_t> cu = {0, 19, 19, 36};
  const int32_t key_heads = 2, heads = 4, key_dim = 5, value_dim = 3;
  const int64_t tokens = 36, keys = tokens * key_heads * key_dim, values = tokens * heads * value_dim;
  const int64_t wide = tokens * heads * key_dim, states = 3 * heads * key_dim * value_dim;
  const float scale = 0.75f;
  TorchGradients golden;
  const DevicePtr device = open_cpu();
  std::vector<Floats> in, got;
  const auto read = [&](const std::vector<int64_t>& sizes) {
    in.clear();
    got.clear();
    for (const int64_t size : sizes) in.push_back(golden.take(size));
    for (const Floats& values_in : in) got.push_back(like(values_in));
    in.push_back(golden.take(values));
    in.push_back(golden.take(states));
  };
  const auto compare = [&](const char* what) {
    for (size_t i = 0; i < got.size(); ++i) {
      const Floats want = golden.take(static_cast<int64_t>(got[i].size()));
      expect_gradient_near(got[i], Doubles(want.begin(), want.end()), what + (" " + std::to_string(i)));
    }
  };
  const auto x = [&](size_t i) { return in[i].data(); };
  const auto g = [&](size_t i) { return got[i].data(); };
  read({keys, keys, values, tokens * heads, tokens * heads, states});
  run_backward<mr_gated_delta_backward_args>(device.get(),
                                             {{x(0), x(1), x(2), x(3), x(4), scale, x(5), nullptr, cu.data(),
                                               nullptr, 3, key_heads, heads, key_dim, value_dim, 0},
                                              x(6),
                                              x(7),
                                              g(0),
                                              g(1),
                                              g(2),
                                              g(3),
                                              g(4),
                                              g(5)},
                                             mr_gated_delta_backward_workspace_bytes,
                                             mr_gated_delta_backward);
  compare("gated delta");
  read({values, tokens * heads, heads, keys, keys, heads, states});
  run_backward<mr_selective_scan_backward_args>(
      device.get(),
      {{x(0), x(1), x(2), x(3), x(4), x(5), x(6), nullptr, cu.data(), nullptr, 3, key_heads, heads, key_dim,
        value_dim, 0},
       x(7),
       x(8),
       g(0),
       g(1),
       g(2),
       g(3),
       g(4),
       g(5),
       g(6)},
      mr_selective_scan_backward_workspace_bytes, mr_selective_scan_backward);
  compare("selective scan");
  read({wide, wide, wide, values, wide, wide, states});
  run_backward<mr_wkv7_backward_args>(device.get(),
                                      {{x(0), x(1), x(2), x(3), x(4), x(5), scale, x(6), nullptr, cu.data(),
                                        nullptr, 3, heads, key_dim, value_dim, 0},
                                       x(7),
                                       x(8),
                                       g(0),
                                       g(1),
                                       g(2),
                                       g(3),
                                       g(4),
                                       g(5),
                                       g(6)},
                                      mr_wkv7_backward_workspace_bytes, mr_wkv7_backward);
  compare("wkv7");
  EXPECT_TRUE(golden.at_end());
}

TEST(LinearBackward, RefusesWhatIsWrong) {
  const BackwardCase c{1, 2, 3, 5, {0, 5}};
  Drawn d = draw_delta(c);
  std::map<std::string, Floats> to;
  const mr_gated_delta_backward_args good = delta_args(c, d, to);
  const DevicePtr device = open_cpu();
  size_t bytes = 0;
  ASSERT_EQ(mr_gated_delta_backward_workspace_bytes(device.get(), &good, &bytes), MR_OK);
  const Guarded workspace(bytes);
  mr_gated_delta_backward_args bad = good;
  bad.forward.g = nullptr;
  EXPECT_REFUSED(mr_gated_delta_backward(device.get(), &bad, workspace.data(), bytes, nullptr),
                 MR_ERROR_INVALID, "args.dg");
  bad = good;
  bad.d_out = nullptr;
  EXPECT_REFUSED(mr_gated_delta_backward(device.get(), &bad, workspace.data(), bytes, nullptr),
                 MR_ERROR_INVALID, "args.d_out");
  EXPECT_REFUSED(mr_gated_delta_backward(device.get(), &good, workspace.data(), bytes - 1, nullptr),
                 MR_ERROR_NO_MEMORY, "workspace");
  mr_wkv7_args wkv7{};
  EXPECT_REFUSED(mr_wkv7_workspace_bytes(device.get(), &wkv7, &bytes), MR_ERROR_INVALID, "args.heads");
}

}  // namespace
}  // namespace millrace::api_test
