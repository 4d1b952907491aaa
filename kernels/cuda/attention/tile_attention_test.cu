// Attention for heads of 256, soft caps, chunks and both directions against float64 on the host, in both
// orders of the cache, and bit by bit however rows are batched and whether splits are computed in turn or
// side by side. What no row may see is NaN. Needs a GPU: says so and skips without.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/float_bits.h"
#include "base/paging.h"
#include "kernels/cuda/attention/split_plan.h"
#include "kernels/cuda/attention/tile_attention.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gpu_test.h"

namespace millrace::cuda {
namespace {

struct Case {
  int32_t heads, kv_heads, dim;
  CacheOrder order;
  int32_t window = 0, chunk = 0;
  float softcap = 0.0f;
  bool bidirectional = false, sinks = false;
};

template <class T>
DeviceBuffer on_device(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T), "a test");
  MILLRACE_CUDA_TRY(
      cudaMemcpy(buffer.as<void>(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return buffer;
}

// Sequences of `before` + `tokens` positions, all in the cache; the last `tokens` are rows.
struct Problem {
  struct TestSequence {
    int32_t before, tokens;
  };
  Case c;
  std::vector<TestSequence> sequences;
  std::vector<int32_t> positions, sequence_of, starts, tables, lengths;
  std::vector<uint16_t> pool;  // [blocks][key, value][kv_heads][16 x dim]
  std::vector<float> query, sinks;
  int64_t block_elements;

  Problem(const Case& of, std::vector<TestSequence> list) : c(of), sequences(std::move(list)) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    block_elements = int64_t{2} * c.kv_heads * kBlockTokens * c.dim;
    int32_t blocks = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int32_t length = sequences[s].before + sequences[s].tokens;
      starts.push_back(static_cast<int32_t>(tables.size()));
      lengths.push_back(length);
      for (int32_t b = 0; b < blocks_for(length); ++b) tables.push_back(blocks++);
      for (int32_t t = 0; t < sequences[s].tokens; ++t) {
        positions.push_back(sequences[s].before + t);
        sequence_of.push_back(static_cast<int32_t>(s));
      }
    }
    std::shuffle(tables.begin(), tables.end(), random);
    pool.assign(static_cast<size_t>(blocks * block_elements), 0x7fc0);  // NaN
    for (size_t s = 0; s < sequences.size(); ++s) {
      for (int32_t p = 0; p < lengths[s]; ++p) {
        for (int32_t i = 0; i < 2 * c.kv_heads * c.dim; ++i) {
          at(s, p, i / c.dim % c.kv_heads, i % c.dim, i >= c.kv_heads * c.dim) =
              to_bfloat16(normal(random)).bits;
        }
      }
    }
    for (size_t i = 0; i < positions.size() * static_cast<size_t>(c.heads * c.dim); ++i)
      query.push_back(normal(random));
    for (int32_t h = 0; h < c.heads; ++h) sinks.push_back(normal(random));
  }
  uint16_t& at(size_t s, int32_t p, int32_t head, int32_t d, bool value) {
    const int32_t in_block = p % kBlockTokens;
    const int32_t offset = c.order == CacheOrder::kRows ? in_block * c.dim + d
                                                        : d / 64 * (kBlockTokens * 64) + in_block * 64 +
                                                              ((d % 64) ^ (in_block % 8 * 8));
    return pool[static_cast<size_t>(tables[static_cast<size_t>(starts[s] + p / kBlockTokens)] *
                                        block_elements +
                                    ((value ? c.kv_heads : 0) + head) * kBlockTokens * c.dim + offset)];
  }
  float value_at(size_t s, int32_t p, int32_t head, int32_t d, bool value) {
    return to_float(BFloat16{at(s, p, head, d, value)});
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(c.dim)); }
};

// Rows [first, first + count) of the problem.
std::vector<float> run(const Device& gpu, const Problem& p, int32_t first, int32_t count, bool single,
                       bool split) {
  const DeviceBuffer pool = on_device(p.pool), query = on_device(p.query), sinks = on_device(p.sinks),
                     positions = on_device(p.positions), sequence_of = on_device(p.sequence_of),
                     starts = on_device(p.starts), tables = on_device(p.tables),
                     lengths = on_device(p.lengths);
  const size_t row = static_cast<size_t>(p.c.heads * p.c.dim);
  const DeviceBuffer out = on_device(
      std::vector<float>(static_cast<size_t>(count) * row, std::numeric_limits<float>::quiet_NaN()));
  TileAttention a;
  a.cache = {pool.as<void>(),
             DType::kBF16,
             p.block_elements,
             0,
             positions.as<const int32_t>() + first,
             sequence_of.as<const int32_t>() + first,
             starts.as<const int32_t>(),
             tables.as<const int32_t>(),
             p.c.heads,
             p.c.kv_heads,
             p.c.dim,
             p.c.order};
  a.op = {p.c.window, p.scale(), p.c.sinks ? sinks.as<const float>() : nullptr};
  a.limits = {p.c.softcap, p.c.chunk, p.c.bidirectional ? lengths.as<const int32_t>() : nullptr};
  a.rows = count;
  a.single_tokens = single;
  a.max_splits = max_splits_for(4000, 0);
  a.query = query.as<const float>() + static_cast<size_t>(first) * row;
  a.out = out.as<float>();
  const DeviceBuffer partial(tile_attention_partial_bytes(count, p.c.heads, a.max_splits, p.c.dim), "a test");
  if (split) a.partial = partial.as<float>();
  launch_tile_attention(a, {gpu, nullptr});
  MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
  std::vector<float> values(static_cast<size_t>(count) * row);
  MILLRACE_CUDA_TRY(
      cudaMemcpy(values.data(), out.as<void>(), values.size() * sizeof(float), cudaMemcpyDeviceToHost));
  return values;
}

// Some rows in float64, from the rounded query: weights are off by half a bf16 each, everything else by less.
void expect_right(Problem& p, const std::vector<float>& got) {
  const int32_t rows = static_cast<int32_t>(p.positions.size()), group = p.c.heads / p.c.kv_heads;
  for (int32_t row = 0; row < rows; row += 7) {
    const auto s = static_cast<size_t>(p.sequence_of[static_cast<size_t>(row)]);
    const int32_t position = p.positions[static_cast<size_t>(row)];
    const int32_t first = p.c.window > 0  ? std::max(0, position - p.c.window + 1)
                          : p.c.chunk > 0 ? position / p.c.chunk * p.c.chunk
                                          : 0;
    int32_t last = p.c.bidirectional ? p.lengths[s] - 1 : position;
    if (p.c.bidirectional && p.c.window > 0) last = std::min(last, position + p.c.window - 1);
    for (int32_t head = row % 2; head < p.c.heads; head += 3) {
      const size_t at = static_cast<size_t>((row * p.c.heads + head) * p.c.dim);
      std::vector<double> score;
      double top = p.c.sinks ? p.sinks[static_cast<size_t>(head)] : -INFINITY;
      for (int32_t i = first; i <= last; ++i) {
        double sum = 0;
        for (int32_t d = 0; d < p.c.dim; ++d) {
          sum += double{to_float(to_bfloat16(p.query[at + static_cast<size_t>(d)] * p.scale()))} *
                 p.value_at(s, i, head / group, d, false);
        }
        if (p.c.softcap > 0) sum = p.c.softcap * std::tanh(sum / p.c.softcap);
        score.push_back(sum);
        top = std::max(top, sum);
      }
      double weights = p.c.sinks ? std::exp(p.sinks[static_cast<size_t>(head)] - top) : 0;
      std::vector<double> out(static_cast<size_t>(p.c.dim)), size(out.size());
      for (int32_t i = first; i <= last; ++i) {
        const double w = std::exp(score[static_cast<size_t>(i - first)] - top);
        weights += w;
        for (int32_t d = 0; d < p.c.dim; ++d) {
          const double v = p.value_at(s, i, head / group, d, true);
          out[static_cast<size_t>(d)] += w * v;
          size[static_cast<size_t>(d)] += w * std::fabs(v);
        }
      }
      for (size_t d = 0; d < out.size(); ++d) {
        ASSERT_LE(std::fabs(got[at + d] - out[d] / weights), 0x1p-8 * size[d] / weights + 1e-6)
            << "row " << row << " at " << position << " head " << head << " dim " << d;
      }
    }
  }
}

const Case kCases[] = {
    {4, 2, 256, CacheOrder::kRows},
    {4, 1, 256, CacheOrder::kRows, 100},
    {8, 4, 256, CacheOrder::kRows, 0, 0, 4.0f},
    {8, 8, 256, CacheOrder::kRows, 0, 0, 0.0f, true},
    {8, 4, 128, CacheOrder::kSwizzled, 0, 0, 4.0f, false, true},
    {6, 2, 128, CacheOrder::kSwizzled, 0, 200},
    {16, 1, 64, CacheOrder::kRows, 0, 600, 0.0f, false, true},
    {12, 12, 64, CacheOrder::kSwizzled, 33, 0, 0.0f, true},
};

TEST(TileAttention, MatchesFloat64HoweverRowsAreBatched) {
  SKIP_WITHOUT_GPU("attention was not tested on one");
  const Device gpu = Device::open(0);
  for (const Case& c : kCases) {
    if (!supports_tile_attention(DType::kBF16, c.heads, c.kv_heads, c.dim, gpu)) {
      GTEST_SKIP() << "*** code for GPUs before sm_90 has other kernels ***";
    }
    SCOPED_TRACE(std::to_string(c.heads) + "/" + std::to_string(c.kv_heads) + " dim " +
                 std::to_string(c.dim) + " window " + std::to_string(c.window) + " chunk " +
                 std::to_string(c.chunk));
    Problem p(c, c.bidirectional
                     ? std::vector<Problem::TestSequence>{{0, 5}, {0, 130}, {0, 1}, {0, 601}}
                     : std::vector<Problem::TestSequence>{{0, 1}, {0, 23}, {505, 33}, {1000, 1}, {63, 70}});
    const auto rows = static_cast<int32_t>(p.positions.size());
    const std::vector<float> all = run(gpu, p, 0, rows, false, false);
    expect_right(p, all);
    if (HasFatalFailure()) return;
    EXPECT_EQ(run(gpu, p, 0, rows, true, false), all) << "each row for itself";
    EXPECT_EQ(run(gpu, p, 0, rows, true, true), all) << "splits side by side";
    const size_t half = static_cast<size_t>(rows / 2 * c.heads * c.dim);
    std::vector<float> parts = run(gpu, p, 0, rows / 2, false, false);
    const std::vector<float> rest = run(gpu, p, rows / 2, rows - rows / 2, false, false);
    EXPECT_EQ(parts.size(), half);
    parts.insert(parts.end(), rest.begin(), rest.end());
    EXPECT_EQ(parts, all) << "in two launches";
  }
}

}  // namespace
}  // namespace millrace::cuda
