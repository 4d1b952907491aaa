// The kernels of layers with a state on every table of this machine: decays as the C library rounds them, and
// a chunk's rows together, in parts and one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/tables/features.h"

namespace millrace::cpu {
namespace {

float library_softplus(double x) { return static_cast<float>(x > 20.0 ? x : std::log1p(std::exp(x))); }

TEST(StateKernels, SoftplusIsTheLibrarysToTheBit) {
  std::mt19937 random(5);
  std::vector<float> x = {0.0f,
                          -0.0f,
                          20.0f,
                          20.00001f,
                          19.99999f,
                          -80.0f,
                          -79.99f,
                          -90.0f,
                          -104.0f,
                          1e30f,
                          -1e30f,
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()};
  for (const float spread : {0.01f, 1.0f, 8.0f, 40.0f}) {
    std::normal_distribution<float> some(0.0f, spread);
    for (int i = 0; i < 30000; ++i) x.push_back(some(random));
  }
  std::vector<float> bias(x.size()), y(x.size());
  for (float& b : bias) b = std::normal_distribution<float>(0.0f, 2.0f)(random);
  for (const KernelTable* table : runnable_tables()) {
    for (const float* add : {static_cast<const float*>(nullptr), static_cast<const float*>(bias.data())}) {
      table->softplus(x.data(), add, static_cast<int64_t>(x.size()), y.data());
      for (size_t i = 0; i < x.size(); ++i) {
        const double sum = static_cast<double>(x[i]) + (add == nullptr ? 0.0f : add[i]);
        ASSERT_EQ(y[i], library_softplus(sum)) << table->name << " at " << sum;
      }
    }
    const float none = std::numeric_limits<float>::quiet_NaN();
    table->softplus(&none, nullptr, 1, y.data());
    EXPECT_TRUE(std::isnan(y[0])) << table->name;
  }
}

// A chunk of one head, and what its kernels write.
struct Chunk {
  Chunk(int32_t keys, int32_t values, bool by_logs, std::mt19937& random)
      : key_dim(keys), padded_dim(values) {
    const auto fill = [&](std::vector<float>& to, int64_t size) {
      to.resize(static_cast<size_t>(size));
      for (float& value : to) value = std::normal_distribution<float>(0.0f, 0.3f)(random);
    };
    fill(q, int64_t{16} * keys);
    fill(k, int64_t{16} * keys);
    fill(b, int64_t{16} * keys);
    fill(v, int64_t{16} * values);
    fill(state, int64_t{keys} * values);
    fill(decays, int64_t{16} * keys);
    float sum = 0.0f;
    for (int i = 0; i < 16; ++i) {
      sum -= std::abs(v[static_cast<size_t>(i)]);
      log[i] = sum;
      for (int32_t d = 0; d < keys; ++d) {
        float& l = decays[static_cast<size_t>(i * keys + d)];
        l = (i == 0 ? 0.0f : decays[static_cast<size_t>((i - 1) * keys + d)]) - std::abs(l);
      }
    }
    logs = by_logs;
  }

  int32_t key_dim, padded_dim;
  bool logs;
  float log[16];
  std::vector<float> q, k, b, v, state, decays;
};

// w, o and the state behind the chunk, computed in parts that end at the given rows.
std::vector<float> run_chunk(const KernelTable& table, const Chunk& in, bool delta, bool known,
                             const std::vector<int32_t>& ends) {
  const int32_t keys = in.key_dim, values = in.padded_dim;
  std::vector<float> out(static_cast<size_t>(32 * values + keys * values), 0.0f);
  std::vector<float> scratch(static_cast<size_t>(state_scratch_floats(keys, in.logs)));
  int32_t first = 0;
  for (const int32_t end : ends) {
    StateChunk c{};
    c.key_dim = keys;
    c.padded_dim = values;
    c.first = first;
    c.last = end;
    c.delta = delta;
    c.state = known ? in.state.data() : nullptr;
    c.state_out = end == 16 ? out.data() + 32 * values : nullptr;
    c.scratch = scratch.data();
    for (int32_t i = 0; i < 16; ++i) {
      const int32_t row = std::min(i, end - 1);
      c.q[i] = in.q.data() + i * keys;
      c.k[i] = in.k.data() + i * keys;
      c.v[i] = in.v.data() + i * values;
      c.w[i] = out.data() + i * values;
      c.o[i] = out.data() + (16 + i) * values;
      c.beta[i] = 0.25f + 0.04f * static_cast<float>(i);
      c.log[i] = in.log[row];
      c.logs[i] = in.logs ? in.decays.data() + row * keys : nullptr;
    }
    table.state_chunk(c);
    first = end;
  }
  return out;
}

std::vector<float> run_wkv7(const KernelTable& table, const Chunk& in, bool known,
                            const std::vector<int32_t>& ends) {
  const int32_t keys = in.key_dim, values = in.padded_dim;
  std::vector<float> out(static_cast<size_t>(32 * values + keys * values), 0.0f);
  std::vector<float> scratch(static_cast<size_t>(wkv7_scratch_floats(keys))), decay(in.decays.size());
  for (size_t i = 0; i < decay.size(); ++i) decay[i] = 1.0f / (1.0f - in.decays[i]);
  int32_t first = 0;
  for (const int32_t end : ends) {
    Wkv7Chunk c{};
    c.key_dim = keys;
    c.padded_dim = values;
    c.first = first;
    c.last = end;
    c.state = known ? in.state.data() : nullptr;
    c.state_out = end == 16 ? out.data() + 32 * values : nullptr;
    c.scratch = scratch.data();
    for (int32_t i = 0; i < 16; ++i) {
      c.r[i] = in.q.data() + i * keys;
      c.a[i] = in.b.data() + i * keys;
      c.k[i] = in.k.data() + i * keys;
      c.b[i] = in.q.data() + (15 - i) * keys;
      c.decay[i] = decay.data() + i * keys;
      c.v[i] = in.v.data() + i * values;
      c.u[i] = out.data() + i * values;
      c.o[i] = out.data() + (16 + i) * values;
    }
    table.wkv7_chunk(c);
    first = end;
  }
  return out;
}

// Strips and tiles of registers differ between tables, and between one row and many; sums do not.
TEST(StateKernels, RowsHaveTheSameBitsTogetherAndAloneOnEveryTable) {
  std::mt19937 random(7);
  std::vector<int32_t> one_by_one(16);
  for (int32_t i = 0; i < 16; ++i) one_by_one[static_cast<size_t>(i)] = i + 1;
  const std::vector<int32_t> cuts[] = {{16}, one_by_one, {1, 16}, {3, 9, 10, 16}, {8, 16}, {15, 16}};
  const int32_t sizes[][2] = {{128, 128}, {64, 64}, {20, 48}, {16, 16}, {33, 144}, {1, 32}, {40, 272}};
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  for (const auto& [keys, values] : sizes) {
    for (const bool known : {false, true}) {
      for (const int kind : {0, 1, 2, 3}) {  // Mamba-2, gated delta, one with a decay of each channel, RWKV 7
        const Chunk in(keys, values, kind == 2, random);
        const auto run = [&](const KernelTable& table, const std::vector<int32_t>& ends) {
          return kind == 3 ? run_wkv7(table, in, known, ends) : run_chunk(table, in, kind > 0, known, ends);
        };
        const std::vector<float> want = run(*runnable_tables().front(), cuts[0]);
        for (const KernelTable* table : runnable_tables()) {
          for (const std::vector<int32_t>& cut : cuts) {
            EXPECT_TRUE(same(run(*table, cut), want))
                << table->name << " kind " << kind << ", " << keys << " x " << values << " known " << known
                << " in " << cut.size() << " parts";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace millrace::cpu
