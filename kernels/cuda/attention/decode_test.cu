// Attention on the tensor cores against float64 on the host, every combination of its features, and its
// kernels against one another bit by bit: prompts in chunks of different sizes, single rows with their splits
// in turn and side by side, with the new key and value appended on the way. A cache of fp8 is held to the
// same, and to the bits that a bf16 cache of the same numbers gives. What no row may see is NaN, in the cache
// and in the output before each run. Needs a GPU: says so and skips without; how fp8 codes lie and are
// decoded is tested on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/paging.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/decode_row.cuh"
#include "kernels/cuda/attention/kv_fp8.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gpu_test.h"

namespace millrace::cuda {
namespace {

struct TestSequence {
  int32_t before, tokens;  // in the cache, and new
};

struct Case {
  int32_t heads, kv_heads, dim, window;
  bool sinks;
  std::vector<TestSequence> sequences;
  bool fp8 = false;
};

// To bf16, ties to even.
uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

template <class T>
DeviceBuffer on_device(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T), "test");
  MILLRACE_CUDA_TRY(
      cudaMemcpy(buffer.as<void>(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return buffer;
}
template <class T>
std::vector<T> from_device(const DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  MILLRACE_CUDA_TRY(cudaMemcpy(values.data(), buffer.as<void>(), buffer.bytes(), cudaMemcpyDeviceToHost));
  return values;
}

// A batch, its cache (blocks in random places, NaN where nothing was stored) and what the kernels need.
struct Problem {
  Case c;
  std::mt19937 random{5};
  int32_t rows = 0, last_position = 0;
  std::vector<int32_t> positions, sequence_of, starts, tables;
  std::vector<uint16_t> pool;
  std::vector<uint8_t> codes;  // of an fp8 cache; `pool` has the same numbers
  std::vector<float> query, key, value, sinks;
  float scale;
  int64_t block_elements;

  explicit Problem(const Case& which) : c(which), scale(1.0f / std::sqrt(static_cast<float>(which.dim))) {
    int32_t blocks = 0;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const TestSequence& sequence = c.sequences[s];
      starts.push_back(blocks);
      blocks += blocks_for(sequence.before + sequence.tokens);
      for (int32_t t = 0; t < sequence.tokens; ++t) {
        positions.push_back(sequence.before + t);
        sequence_of.push_back(static_cast<int32_t>(s));
        last_position = std::max(last_position, positions.back());
      }
    }
    rows = static_cast<int32_t>(positions.size());
    for (int32_t i = 0; i < blocks; ++i) tables.push_back(i);
    std::shuffle(tables.begin(), tables.end(), random);
    block_elements = int64_t{2} * 2 * c.kv_heads * kBlockTokens * c.dim;  // two layers, the second is used
    pool.assign(static_cast<size_t>(blocks * block_elements), 0xffff);
    if (c.fp8) codes.assign(static_cast<size_t>(blocks * block_bytes()), 0xff);
    const auto per_row = static_cast<size_t>(c.dim);
    query = normals(static_cast<size_t>(rows * c.heads) * per_row, 2.0f);
    key = normals(static_cast<size_t>(rows * c.kv_heads) * per_row, 1.0f);
    value = normals(key.size(), 1.0f);
    if (c.sinks) sinks = normals(static_cast<size_t>(c.heads), 1.0f);
  }
  std::vector<float> normals(size_t count, float size) {
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<float> x(count);
    for (float& v : x) v = normal(random);
    return x;
  }
  uint16_t& cached(size_t s, int32_t position, int32_t head, int32_t d, bool is_value) {
    const int32_t block = tables[static_cast<size_t>(starts[s] + position / kBlockTokens)];
    const int32_t in_block = position % kBlockTokens;
    const int64_t per_head = int64_t{kBlockTokens} * c.dim;
    const int64_t at = block * block_elements + (2 + (is_value ? 1 : 0)) * c.kv_heads * per_head +
                       head * per_head + d / 64 * (kBlockTokens * 64) + in_block * 64 +
                       ((d % 64) ^ (in_block % 8 * 8));
    return pool[static_cast<size_t>(at)];
  }
  // The fp8 cache: bytes of a block, two layers, and where a head of the second begins.
  int64_t block_bytes() const { return int64_t{2} * 2 * c.kv_heads * kBlockTokens * (c.dim + 1); }
  uint8_t* scale_of(size_t s, int32_t position, int32_t head, bool is_value) {
    const int32_t block = tables[static_cast<size_t>(starts[s] + position / kBlockTokens)];
    return codes.data() + block * block_bytes() + block_bytes() / 2 + head * (32 + kBlockTokens * c.dim) +
           (is_value ? 16 : 0) + position % kBlockTokens;
  }
  uint8_t* code_of(size_t s, int32_t position, int32_t head, int32_t d, bool is_value) {
    const int32_t block = tables[static_cast<size_t>(starts[s] + position / kBlockTokens)];
    uint8_t* layer = codes.data() + block * block_bytes() + block_bytes() / 2;
    const int32_t in_block = position % kBlockTokens, key_bytes = 32 + kBlockTokens * c.dim;
    return is_value ? layer + c.kv_heads * key_bytes + head * kBlockTokens * c.dim + fp8_value_at(in_block, d)
                    : layer + head * key_bytes + 32 + fp8_key_at(in_block, d);
  }
  // Random keys and values: of all positions, or of those before the new tokens. Of an fp8 cache every head
  // has a size of its own.
  void fill_cache(bool new_ones_too) {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(c.dim));
    std::vector<uint8_t> code(x.size());
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const int32_t count = c.sequences[s].before + (new_ones_too ? c.sequences[s].tokens : 0);
      for (int32_t p = 0; p < count; ++p) {
        for (int32_t i = 0; i < 2 * c.kv_heads; ++i) {
          const float size = c.fp8 ? std::exp2(static_cast<float>(random() % 5) - 3.0f) : 1.0f;
          for (float& v : x) v = size * normal(random);
          if (c.fp8) {
            *scale_of(s, p, i / 2, i % 2 == 1) = to_fp8_codes(x.data(), c.dim, code.data(), 1);
            for (int32_t d = 0; d < c.dim; ++d)
              *code_of(s, p, i / 2, d, i % 2 == 1) = code[static_cast<size_t>(d)];
            round_to_kv_type(DType::kF8E4M3, x.data(), c.dim);
          }
          for (int32_t d = 0; d < c.dim; ++d) {
            cached(s, p, i / 2, d, i % 2 == 1) = to_bf16(x[static_cast<size_t>(d)]);
          }
        }
      }
    }
  }
  // What a device has appended to the codes, into the pool.
  void take_codes(const std::vector<uint8_t>& from) {
    codes = from;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      for (int32_t p = 0; p < c.sequences[s].before + c.sequences[s].tokens; ++p) {
        for (int32_t i = 0; i < 2 * c.kv_heads * c.dim; ++i) {
          const int32_t head = i / 2 / c.dim, d = i / 2 % c.dim;
          const bool is_value = i % 2 == 1;
          cached(s, p, head, d, is_value) =
              to_bf16(to_float(Fp8E4M3{*code_of(s, p, head, d, is_value)}) *
                      std::bit_cast<float>(fp8_scale(*scale_of(s, p, head, is_value))));
        }
      }
    }
  }
};

// How the splits of single rows are computed: by one CTA, by many, or by a warp each, however few they are.
enum class Splits { kInTurn, kSideBySide, kWarpEach };

// On the device, with an output that is NaN until somebody writes it.
struct OnDevice {
  const Device& gpu;
  const Problem& p;
  bool fp8 = p.c.fp8;
  DeviceBuffer pool = fp8 ? on_device(p.codes) : on_device(p.pool), ints, query = on_device(p.query),
               key = on_device(p.key), value = on_device(p.value), sinks = on_device(p.sinks), arrived,
               partial;
  size_t chunks_at = 0;
  int32_t num_chunks = 0, max_splits;

  // as_bf16: an fp8 cache's numbers in one of bf16.
  OnDevice(const Device& device, const Problem& problem, int32_t tokens_per_chunk = 0, bool as_bf16 = false)
      : gpu(device),
        p(problem),
        fp8(problem.c.fp8 && !as_bf16),
        max_splits(attention_splits(p.last_position, p.c.window)) {
    std::vector<int32_t> all = p.positions;
    all.insert(all.end(), p.sequence_of.begin(), p.sequence_of.end());
    all.insert(all.end(), p.starts.begin(), p.starts.end());
    all.insert(all.end(), p.tables.begin(), p.tables.end());
    while (all.size() % 4 != 0) all.push_back(0);
    chunks_at = all.size();
    int32_t row = 0, sequence = 0;
    for (const TestSequence& s : p.c.sequences) {
      for (int32_t at = 0; at < s.tokens && tokens_per_chunk > 0; at += tokens_per_chunk, ++num_chunks) {
        for (const int32_t v :
             {row + at, std::min(tokens_per_chunk, s.tokens - at), s.before + at, sequence}) {
          all.push_back(v);
        }
      }
      row += s.tokens, ++sequence;
    }
    ints = on_device(all);
    arrived = on_device(std::vector<int32_t>(static_cast<size_t>(p.rows * p.c.kv_heads), 0));
    partial = DeviceBuffer(
        paged_attention_partial_bytes(p.rows, std::max(2, max_splits), p.c.kv_heads, p.c.dim), "partial");
  }
  PagedAttention op() const {
    const auto* at = ints.as<const int32_t>();
    PagedAttention a;
    a.cache.pool = pool.as<void>();
    a.cache.type = fp8 ? DType::kF8E4M3 : DType::kBF16;
    a.cache.block_elements = fp8 ? p.block_bytes() : p.block_elements;
    a.cache.layer_offset = a.cache.block_elements / 2;
    a.cache.positions = at;
    a.cache.sequence_of = at + p.rows;
    a.cache.table_starts = at + 2 * p.rows;
    a.cache.tables = at + 2 * p.rows + p.starts.size();
    a.cache.heads = p.c.heads, a.cache.kv_heads = p.c.kv_heads, a.cache.head_dim = p.c.dim;
    a.cache.order = CacheOrder::kSwizzled;
    a.op = {p.c.window, p.scale, p.c.sinks ? sinks.as<const float>() : nullptr};
    a.rows = p.rows;
    a.max_splits = max_splits;
    a.query = query.as<const float>(), a.key = key.as<const float>(), a.value = value.as<const float>();
    a.arrived = arrived.as<int32_t>();
    a.chunks = at + chunks_at;
    a.num_chunks = num_chunks;
    return a;
  }
  std::vector<float> run(PagedAttention a, Splits splits) const {
    const DeviceBuffer out =
        on_device(std::vector<float>(p.query.size(), std::numeric_limits<float>::quiet_NaN()));
    a.out = out.as<float>();
    a.partial = splits == Splits::kInTurn ? nullptr : partial.as<float>();
    if (splits == Splits::kWarpEach) {
      launch_decode_split_kv(a, {gpu, nullptr});
    } else {
      launch_paged_attention(a, {gpu, nullptr});
    }
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
    return from_device<float>(out);
  }
};

// Some rows in float64, from the rounded query: weights are off by half a bf16 each, everything else by less.
void expect_right(Problem& p, const std::vector<float>& got, int step) {
  const int32_t group = p.c.heads / p.c.kv_heads;
  const float scale = p.scale * 1.4426950408889634f;
  for (int32_t row = 0; row < p.rows; row += step) {
    const auto s = static_cast<size_t>(p.sequence_of[static_cast<size_t>(row)]);
    const int32_t last = p.positions[static_cast<size_t>(row)];
    const int32_t first = p.c.window > 0 ? std::max(0, last - p.c.window + 1) : 0;
    for (int32_t head = 0; head < p.c.heads; head += row % 2 == 0 ? 1 : 3) {
      const size_t at = static_cast<size_t>((row * p.c.heads + head) * p.c.dim);
      std::vector<double> score;
      double top = p.c.sinks ? p.sinks[static_cast<size_t>(head)] * 1.4426950408889634 : -INFINITY;
      for (int32_t i = first; i <= last; ++i) {
        double sum = 0;
        for (int32_t d = 0; d < p.c.dim; ++d) {
          sum += double{from_bf16(to_bf16(p.query[at + static_cast<size_t>(d)] * scale))} *
                 from_bf16(p.cached(s, i, head / group, d, false));
        }
        score.push_back(sum);
        top = std::max(top, sum);
      }
      double weights =
          p.c.sinks ? std::exp2(p.sinks[static_cast<size_t>(head)] * 1.4426950408889634 - top) : 0;
      std::vector<double> out(static_cast<size_t>(p.c.dim)), size(out.size());
      for (int32_t i = first; i <= last; ++i) {
        const double w = std::exp2(score[static_cast<size_t>(i - first)] - top);
        weights += w;
        for (int32_t d = 0; d < p.c.dim; ++d) {
          const double v = from_bf16(p.cached(s, i, head / group, d, true));
          out[static_cast<size_t>(d)] += w * v;
          size[static_cast<size_t>(d)] += w * std::fabs(v);
        }
      }
      for (size_t d = 0; d < out.size(); ++d) {
        const double error = std::fabs(got[at + d] - out[d] / weights);
        ASSERT_LE(error, 0x1p-8 * size[d] / weights + 1e-6)
            << "row " << row << " at " << last << " head " << head << " dim " << d;
      }
    }
  }
}

void expect_same(const std::vector<float>& got, const std::vector<float>& want, const Problem& p,
                 const char* what) {
  ASSERT_EQ(got.size(), want.size());
  const auto width = static_cast<size_t>(p.c.heads * p.c.dim);
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i]))
        << what << ": row " << i / width << " at " << p.positions[i / width] << " head "
        << i % width / static_cast<size_t>(p.c.dim) << ": " << got[i] << " and " << want[i];
  }
}

// The new tokens' codes and scales, from the rotated keys as the device has them.
void expect_rounded_as_on_the_host(Problem& p, const std::vector<float>& keys) {
  std::vector<uint8_t> code(static_cast<size_t>(p.c.dim));
  for (int32_t row = 0; row < p.rows; ++row) {
    const auto s = static_cast<size_t>(p.sequence_of[static_cast<size_t>(row)]);
    const int32_t position = p.positions[static_cast<size_t>(row)];
    for (int32_t i = 0; i < 2 * p.c.kv_heads; ++i) {
      const bool is_value = i % 2 == 1;
      const std::vector<float>& x = is_value ? p.value : keys;
      const float* head = x.data() + (row * p.c.kv_heads + i / 2) * p.c.dim;
      ASSERT_EQ(*p.scale_of(s, position, i / 2, is_value), to_fp8_codes(head, p.c.dim, code.data(), 1));
      for (int32_t d = 0; d < p.c.dim; ++d) {
        ASSERT_EQ(*p.code_of(s, position, i / 2, d, is_value), code[static_cast<size_t>(d)])
            << "row " << row << " dim " << d << " of " << head[d];
      }
    }
  }
}

#define SKIP_WITHOUT_BULK_COPIES()                     \
  SKIP_WITHOUT_GPU("attention was not tested on one"); \
  const Device gpu = Device::open(0);                  \
  if (!gpu.has_bulk_copies()) GTEST_SKIP() << "*** code for GPUs before sm_90 has other kernels ***"

struct Shape {
  int32_t heads, kv_heads, dim;
};
class PagedAttentionTest : public ::testing::TestWithParam<Shape> {};

std::vector<TestSequence> ragged() {
  return {{0, 1}, {0, 17}, {505, 33}, {0, 700}, {1020, 9}, {129, 1}, {3, 127}, {1600, 2}};
}

void every_feature_and_cut(const Device& gpu, const Shape& shape, bool fp8) {
  for (const int32_t window : {0, 128, 37}) {
    for (const bool sinks : {false, true}) {
      SCOPED_TRACE("window " + std::to_string(window) + (sinks ? " sinks" : ""));
      Problem p({shape.heads, shape.kv_heads, shape.dim, window, sinks, ragged(), fp8});
      p.fill_cache(true);
      const OnDevice single(gpu, p);
      const std::vector<float> in_turn = single.run(single.op(), Splits::kInTurn);
      expect_right(p, in_turn, 7);
      if (::testing::Test::HasFatalFailure()) return;
      if (fp8) {
        const OnDevice wide(gpu, p, 0, true);
        expect_same(in_turn, wide.run(wide.op(), Splits::kInTurn), p, "the same numbers as bf16");
        if (::testing::Test::HasFatalFailure()) return;
      }
      expect_same(single.run(single.op(), Splits::kSideBySide), in_turn, p, "splits side by side");
      expect_same(single.run(single.op(), Splits::kWarpEach), in_turn, p, "a warp for each split");
      if (!gpu.has_wgmma()) continue;
      const int32_t most = prefill_chunk_tokens(shape.heads, shape.kv_heads, shape.dim);
      for (const int32_t tokens : {most, 5}) {
        const OnDevice chunks(gpu, p, std::min(tokens, most));
        expect_same(chunks.run(chunks.op(), Splits::kInTurn), in_turn, p, "prefill kernel");
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}
TEST_P(PagedAttentionTest, EveryFeatureAndEveryCut) {
  SKIP_WITHOUT_BULK_COPIES();
  every_feature_and_cut(gpu, GetParam(), false);
}
TEST_P(PagedAttentionTest, EveryFeatureAndEveryCutOfFp8) {
  SKIP_WITHOUT_BULK_COPIES();
  every_feature_and_cut(gpu, GetParam(), true);
}

void append_on_the_way(const Device& gpu, const Shape& shape, bool fp8) {
  for (const bool interleaved : {false, true}) {
    Problem p({shape.heads,
               shape.kv_heads,
               shape.dim,
               interleaved ? 128 : 0,
               true,
               {{0, 1}, {15, 1}, {16, 1}, {127, 1}, {128, 1}, {300, 1}, {511, 1}, {512, 1}, {1535, 1}},
               fp8});
    if (fp8) {  // heads of many sizes
      for (size_t i = 0; i < p.key.size(); ++i) p.key[i] *= std::exp2(static_cast<float>(i / 64 % 7) - 3.0f);
      for (size_t i = 0; i < p.value.size(); ++i)
        p.value[i] *= std::exp2(2.0f - static_cast<float>(i / 64 % 9));
    }
    p.fill_cache(false);
    std::vector<float2> turns;
    for (int32_t i = 0; i < p.rows * shape.dim / 2; ++i) {
      turns.push_back({std::cos(static_cast<float>(i)), std::sin(static_cast<float>(i))});
    }
    const DeviceBuffer angles = on_device(turns);
    const RopeParams rope{nullptr, shape.dim / 2, 1.0f, interleaved};
    const OnDevice apart(gpu, p);
    launch_rope_append_kv(apart.op().cache, rope, angles.as<const float2>(), p.rows, apart.query.as<float>(),
                          apart.key.as<float>(), apart.value.as<float>(), {gpu, nullptr});
    const std::vector<float> want = apart.run(apart.op(), Splits::kInTurn);
    const auto pool = from_device<uint8_t>(apart.pool);
    for (const Splits splits : {Splits::kInTurn, Splits::kSideBySide, Splits::kWarpEach}) {
      const OnDevice fused(gpu, p);
      PagedAttention op = fused.op();
      op.angles = angles.as<const float2>();
      op.interleaved = interleaved;
      expect_same(fused.run(op, splits), want, p, "appended on the way");
      EXPECT_TRUE(from_device<uint8_t>(fused.pool) == pool) << "the caches differ";
      if (::testing::Test::HasFatalFailure()) return;
    }
    if (fp8) {
      p.take_codes(pool);
      expect_rounded_as_on_the_host(p, from_device<float>(apart.key));
    } else {
      std::memcpy(p.pool.data(), pool.data(), pool.size());
    }
    p.query = from_device<float>(apart.query);
    expect_right(p, want, 1);
    if (::testing::Test::HasFatalFailure()) return;
  }
}
TEST_P(PagedAttentionTest, AppendingOnTheWay) {
  SKIP_WITHOUT_BULK_COPIES();
  append_on_the_way(gpu, GetParam(), false);
}
TEST_P(PagedAttentionTest, AppendingOnTheWayToFp8) {
  SKIP_WITHOUT_BULK_COPIES();
  append_on_the_way(gpu, GetParam(), true);
}

// More splits than are combined at once, and some of which other CTAs have several.
TEST(PagedAttention, OneLongRow) {
  SKIP_WITHOUT_BULK_COPIES();
  for (const bool fp8 : {false, true}) {
    Problem p({16, 2, 64, 0, true, {{20000, 1}, {9, 1}, {12345, 1}}, fp8});
    p.fill_cache(true);
    const OnDevice single(gpu, p);
    const std::vector<float> in_turn = single.run(single.op(), Splits::kInTurn);
    expect_right(p, in_turn, 1);
    expect_same(single.run(single.op(), Splits::kSideBySide), in_turn, p, "side by side");
    for (int i = 0; i < 3; ++i) {
      expect_same(single.run(single.op(), Splits::kWarpEach), in_turn, p, "a warp for each split");
    }
    if (::testing::Test::HasFatalFailure() || !gpu.has_wgmma()) return;
    const OnDevice chunks(gpu, p, 1);
    expect_same(chunks.run(chunks.op(), Splits::kInTurn), in_turn, p, "prefill kernel");
  }
}

// A head that is not finite stays visible, whichever kernel looks at it.
TEST(PagedAttentionFp8, ADamagedHeadMakesItsRowsNaN) {
  SKIP_WITHOUT_BULK_COPIES();
  for (const bool in_value : {false, true}) {
    Problem p({8, 1, 64, 0, false, {{40, 20}}, true});
    p.fill_cache(true);
    for (int32_t d = 0; d < 64; ++d) *p.code_of(0, 33, 0, d, in_value) = 0;
    *p.scale_of(0, 33, 0, in_value) = kFp8NotFinite;
    const OnDevice single(gpu, p);
    for (const float x : single.run(single.op(), Splits::kInTurn)) ASSERT_TRUE(std::isnan(x));
    if (!gpu.has_wgmma()) continue;
    const OnDevice chunks(gpu, p, 8);
    for (const float x : chunks.run(chunks.op(), Splits::kInTurn)) ASSERT_TRUE(std::isnan(x));
  }
}

// prmt, for the host.
uint32_t permuted(uint32_t word, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15u, byte = word >> (nibble % 4 * 8) & 255u;
    result |= (nibble < 8 ? byte : (byte & 0x80u) != 0 ? 255u : 0u) << (8 * i);
  }
  return result;
}

TEST(PagedAttentionFp8, EveryPairOfCodesIsItsBf16Numbers) {
  struct Selector {
    uint32_t pair;
    int low, high;
  };
  for (const Selector& s : {Selector{kCodes01, 0, 1}, {kCodes23, 2, 3}, {kCodes02, 0, 2}, {kCodes13, 1, 3}}) {
    for (uint32_t low = 0; low < 256; ++low) {
      for (uint32_t high = 0; high < 256; ++high) {
        if (low % 128 == 127 || high % 128 == 127) continue;  // NaN, which no cache holds
        const uint32_t others = 0x5aa5c33cu * (low + 1);
        const uint32_t mask = 255u << (8 * s.low) | 255u << (8 * s.high);
        const uint32_t word = (others & ~mask) | low << (8 * s.low) | high << (8 * s.high);
        const uint32_t pair = spread_codes(permuted(word, s.pair));
        for (const auto& [bits, code] : {std::pair{pair & 0xffffu, low}, {pair >> 16, high}}) {
          const float got = from_bf16(static_cast<uint16_t>(bits)) * from_bf16(kTwoTo120 & 0xffffu);
          const float want = to_float(Fp8E4M3{static_cast<uint8_t>(code)});
          ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << low << " " << high;
        }
      }
    }
  }
}

TEST(PagedAttentionFp8, FactorsAreTwoTo120TimesTheScale) {
  for (int k = kFp8MinExponent; k <= kFp8MaxExponent; ++k) {
    const auto bits = static_cast<uint8_t>(127 + k);
    EXPECT_EQ(from_bf16(static_cast<uint16_t>(fp8_factor(bits))), std::exp2(120.0f + static_cast<float>(k)));
    EXPECT_EQ(std::bit_cast<float>(fp8_scale(bits)), std::exp2(static_cast<float>(k)));
    EXPECT_EQ(std::bit_cast<float>(fp8_inverse_scale(bits)), std::exp2(-static_cast<float>(k)));
  }
  EXPECT_TRUE(std::isinf(from_bf16(static_cast<uint16_t>(fp8_factor(kFp8NotFinite)))));
}

// Every code of a head has a byte of its own, and a lane's 16 bytes are what the kernels take them for.
TEST(PagedAttentionFp8, HowCodesLie) {
  for (const int dim : {64, 128}) {
    std::vector<int> key(static_cast<size_t>(kBlockTokens * dim), -1), value = key;
    for (int p = 0; p < kBlockTokens; ++p) {
      for (int d = 0; d < dim; ++d) {
        key.at(static_cast<size_t>(fp8_key_at(p, d))) = p * dim + d;
        value.at(static_cast<size_t>(fp8_value_at(p, d))) = p * dim + d;
      }
    }
    EXPECT_EQ(std::count(key.begin(), key.end(), -1), 0);
    EXPECT_EQ(std::count(value.begin(), value.end(), -1), 0);
    for (int part = 0; part < dim / 64; ++part) {
      for (int i = 0; i < 1024; ++i) {
        const int row = i / 64, t = i % 64 / 16, s = i % 16 / 4;  // of lane t: word s is product s's
        EXPECT_EQ(key[static_cast<size_t>(part * 1024 + i)], row * dim + 64 * part + 16 * s + 4 * t + i % 4);
        const int pair = i / 128, chunk = i % 128 / 16 ^ pair;  // rows of 16-bit numbers, swizzled
        EXPECT_EQ(value[static_cast<size_t>(part * 1024 + i)],
                  (2 * pair + i % 2) * dim + 64 * part + 8 * chunk + i % 16 / 2);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PagedAttentionTest,
                         ::testing::Values(Shape{2, 2, 64}, Shape{8, 2, 64}, Shape{16, 2, 64},
                                           Shape{6, 2, 64}, Shape{3, 3, 128}, Shape{8, 2, 128},
                                           Shape{8, 1, 128}),
                         [](const ::testing::TestParamInfo<Shape>& i) {
                           return "heads" + std::to_string(i.param.heads) + "of" +
                                  std::to_string(i.param.kv_heads) + "dim" + std::to_string(i.param.dim);
                         });

}  // namespace
}  // namespace millrace::cuda
