// Latent attention, operation by operation, against `reference`: with compressed queries and without, with an
// indexer, odd shapes, weights of many types, every cache type; and the same bits on every instruction set of
// the CPU, however a prompt is cut. Further devices (MILLRACE_TEST_DEVICES) have bits of their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "backend/reference/reference_backend.h"
#include "backend/test_support.h"
#include "base/error.h"

namespace millrace::latent {
namespace {

using namespace testing_support;

struct Shape {
  int32_t hidden, heads;
  LatentShape latent;
};
constexpr Shape kEven = {64, 5, {.rank = 64, .rope = 16, .nope = 32, .value = 32, .q_rank = 32}};
constexpr Shape kOdd = {50, 3, {.rank = 37, .rope = 6, .nope = 19, .value = 11, .q_rank = 0}};
// More heads than rows of a tile, wider than tiles of the AMX unit.
constexpr Shape kWide = {64, 24, {.rank = 288, .rope = 32, .nope = 32, .value = 32, .q_rank = 96}};
// Of models: what a GPU has tensor core kernels for.
constexpr Shape kReal = {128, 16, {.rank = 512, .rope = 64, .nope = 128, .value = 128, .q_rank = 96}};
constexpr Shape kSmallRank = {128, 66, {.rank = 256, .rope = 64, .nope = 64, .value = 64, .q_rank = 0}};
// With an indexer: of 70 tokens a third is read, not in whole pages; more index heads than are taken at once.
constexpr Shape kIndexed = {64,
                            5,
                            {.rank = 48,
                             .rope = 16,
                             .nope = 32,
                             .value = 32,
                             .q_rank = 32,
                             .index_heads = 6,
                             .index_dim = 27,
                             .index_top = 23}};
// The same of a model's sizes.
constexpr Shape kRealIndexed = {128,
                                16,
                                {.rank = 512,
                                 .rope = 64,
                                 .nope = 128,
                                 .value = 128,
                                 .q_rank = 96,
                                 .index_heads = 64,
                                 .index_dim = 128,
                                 .index_top = 75}};
constexpr int32_t kTokens = 70;

struct Tensors {
  std::map<std::string, OwnedTensor> of;
  Tensors(DType type, const Shape& s) {
    std::mt19937 random{5};
    const LatentShape& l = s.latent;
    const int64_t q_in = l.q_rank > 0 ? l.q_rank : s.hidden;
    // A unit input stays a unit output.
    const auto matrix = [&](int64_t rows, int64_t cols, int64_t heads = 0) {
      return random_tensor(random, type, rows, cols, heads, 1.0f / std::sqrt(static_cast<float>(cols)));
    };
    of["q"] = matrix(int64_t{s.heads} * (l.nope + l.rope), q_in);
    if (l.q_rank > 0) of["q_a"] = matrix(l.q_rank, s.hidden);
    of["kv_a"] = matrix(l.rank + l.rope, s.hidden);
    of["k_b"] = matrix(l.rank, l.nope, s.heads);
    of["v_b"] = matrix(l.value, l.rank, s.heads);
    of["o"] = matrix(s.hidden, int64_t{s.heads} * l.value);
    if (l.index_top > 0) {
      of["index_q"] = matrix(int64_t{l.index_heads} * l.index_dim, l.q_rank);
      of["index_k"] = matrix(l.index_dim, s.hidden);
      of["index_weights"] = matrix(l.index_heads, s.hidden);
      of["index_norm"] = random_vector(random, l.index_dim, 1.0f, 0.2f);
      of["index_bias"] = random_vector(random, l.index_dim, 0.0f, 0.2f);
    }
    of["norm"] = random_vector(random, s.hidden, 1.0f, 0.2f);
    of["q_norm"] = random_vector(random, std::max(1, l.q_rank), 1.0f, 0.2f);
    of["kv_norm"] = random_vector(random, l.rank, 1.0f, 0.2f);
  }
};

ExecutorSpec spec_of(const Shape& s, DType kv_type, int32_t tokens = kTokens) {
  ExecutorSpec spec;
  spec.max_tokens = tokens;
  spec.max_logit_rows = 1;
  spec.max_context = 2048;
  spec.hidden = s.hidden;
  spec.heads = s.heads;
  spec.kv_heads = 1;
  spec.head_dim = s.latent.rope + s.latent.rank;
  spec.vocab = 32;
  spec.latent = s.latent;
  spec.kv_type = kv_type;
  spec.kv_groups = {{.window = 0, .num_layers = 2, .num_blocks = blocks_for(tokens) + 8}};
  spec.layers = {{0, 0}, {0, 1}};
  return spec;
}

// The residual stream behind two layers of latent attention, [tokens][hidden], a prompt in pieces of `chunk`.
std::vector<float> run(Backend& backend, const Tensors& tensors, const Shape& s, DType kv_type, int32_t chunk,
                       int32_t total = kTokens) {
  std::map<std::string, WeightPtr> weights;
  for (const auto& [name, tensor] : tensors.of) {
    const bool vector = name.ends_with("norm") || name.ends_with("bias");
    weights[name] = backend.load_weight(tensor.view, vector ? WeightUse::kVector : WeightUse::kMatrix);
  }
  const auto get = [&](const char* name) -> const Weight* {
    const auto found = weights.find(name);
    return found == weights.end() ? nullptr : found->second.get();
  };
  const ExecutorSpec spec = spec_of(s, kv_type, total);
  const auto executor = backend.make_executor(spec);
  std::vector<float> inv_freq;
  for (int i = 0; i < s.latent.rope / 2; ++i)
    inv_freq.push_back(std::pow(100.0f, -0.1f * static_cast<float>(i)));
  std::mt19937 random(6);
  const std::vector<float> x = random_floats(random, static_cast<size_t>(total * s.hidden), 2.0f);
  TestSequence sequence;
  std::array<int32_t, kMaxKvGroups> next{};
  std::vector<float> out;
  for (int32_t done = 0; done < total;) {
    const int32_t count = std::min(chunk, total - done);
    sequence.reserve(spec, count, next);
    const SequenceSlice slice = sequence.slice(0, count);
    const std::vector<int32_t> tokens(static_cast<size_t>(count), 1);
    executor->begin({tokens, {&slice, 1}, {}});
    executor->write_slot(Slot::kResidual, std::span(x).subspan(static_cast<size_t>(done * s.hidden),
                                                               static_cast<size_t>(count * s.hidden)));
    for (int layer = 0; layer < 2; ++layer) {
      executor->norm_latent_qkv(
          {.norm = {get("norm"), 1e-5f},
           .q_a = {get("q_a")},
           .q_a_norm = {get("q_norm"), 1e-6f},
           .q = {get("q")},
           .kv_a = {get("kv_a")},
           .kv_a_norm = {get("kv_norm"), 1e-6f},
           .k_b = {get("k_b")},
           .index_q = {get("index_q")},
           .index_k = {get("index_k")},
           .index_k_norm = {get("index_norm"), 1e-6f, get("index_bias"), Norm::Kind::kLayer},
           .index_weights = {get("index_weights")}});
      executor->rope_append_kv(
          {.layer = layer, .inv_freq = inv_freq, .magnitude = 1.1f, .interleaved = true});
      executor->attend({.layer = layer, .scale = 0.15f});
      executor->project_add({.linear = {get("o")}, .head_values = {get("v_b")}});
    }
    const std::vector<float> rows = executor->read_slot(Slot::kResidual);
    out.insert(out.end(), rows.begin(), rows.end());
    sequence.length += count;
    done += count;
  }
  return out;
}

double error_of(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(error / size);
}

// 8-bit activations cost half a percent a product, fp8 caches 2%; the cache itself is the reference's.
double allowed(DType type, DType kv_type) {
  return (is_float(type) ? 2e-6 : 0.03) + (kv_type == DType::kF32      ? 0
                                           : kv_type == DType::kF8E4M3 ? 0.03
                                                                       : 5e-3);
}

// A GPU multiplies bf16 by bf16: activations are rounded, and so are weights that no bf16 holds; beside it an
// F32 matrix is multiplied as it is. Its attention rounds queries and probabilities too, of shapes that it
// has products for.
double allowed_on_gpu(DType type, DType kv_type) {
  const double rounded = type == DType::kF32 ? 5e-6 : is_float(type) ? 0.012 : 0.03;
  return rounded + (kv_type == DType::kF32 ? 0 : kv_type == DType::kF8E4M3 ? 0.03 : 8e-3);
}

// The part of the rows that are near: where a cache rounds what an indexer scores, two scores of a row may
// change places, and it reads another token, of index_top. On an H200 all of 210 rows are near in float32,
// 77% in bf16, 99% in fp8, whose steps are too coarse for a last bit to matter.
double near_rows(const std::vector<float>& got, const std::vector<float>& want, const Shape& s,
                 double allowed) {
  const auto hidden = static_cast<size_t>(s.hidden), rows = want.size() / hidden;
  size_t near = 0;
  for (size_t row = 0; row < rows; ++row) {
    const auto of = [&](const std::vector<float>& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(row * hidden);
      return std::vector<float>(begin, begin + s.hidden);
    };
    near += error_of(of(got), of(want)) < allowed ? 1 : 0;
  }
  return static_cast<double>(near) / static_cast<double>(rows);
}

// On a device that is not the CPU: near the reference, and the same bits in pieces.
void compare_further(const Shape& s, DType type, DType kv_type, const std::vector<float>& want,
                     int32_t total) {
  const Tensors tensors(type, s);
  const bool chooses_alike = s.latent.index_top == 0 || kv_type == DType::kF32;
  for (const std::string& name : further_devices()) {
    const auto backend = make_backend(name, {2});
    const std::vector<float> got = run(*backend, tensors, s, kv_type, total, total);
    const double error = error_of(got, want), allowed = allowed_on_gpu(type, kv_type);
    const double near = near_rows(got, want, s, allowed);
    if (chooses_alike) {
      EXPECT_LT(error, allowed) << name;
    } else {
      EXPECT_GT(near, 0.6) << name;
      EXPECT_LT(error, 0.05) << name;
    }
    std::printf("[  figure  ] %s latent rank %d heads %d %s, cache %s: error %.1e, %.0f%% of the rows near\n",
                name.c_str(), s.latent.rank, s.heads, std::string(info(type).name).c_str(),
                std::string(info(kv_type).name).c_str(), error, 100 * near);
    for (const int32_t chunk : {1, 7, 40}) {
      if (total > 8 * kTokens && chunk == 1) continue;  // thousands of launches
      const std::vector<float> cut = run(*backend, tensors, s, kv_type, chunk, total);
      const auto [first, other] = std::mismatch(got.begin(), got.end(), cut.begin(), cut.end());
      EXPECT_TRUE(first == got.end() && other == cut.end())
          << name << " by " << chunk << " at token " << (first - got.begin()) / s.hidden;
    }
  }
}

void compare(const Shape& s, DType type, DType kv_type) {
  SCOPED_TRACE(std::string(info(type).name) + ", cache " + std::string(info(kv_type).name));
  const Tensors tensors(type, s);
  const auto reference = make_reference_backend();
  const std::vector<float> want = run(*reference, tensors, s, kv_type, kTokens);
  std::vector<float> first;
  for (const Device& device : cpu_devices()) {
    const std::vector<float> got = run(*device.backend, tensors, s, kv_type, kTokens);
    EXPECT_LT(error_of(got, want), allowed(type, kv_type)) << device.label;
    for (const int32_t chunk : {1, 7, 40}) {
      EXPECT_EQ(run(*device.backend, tensors, s, kv_type, chunk), got) << device.label << " by " << chunk;
    }
    if (type == DType::kMXFP4) continue;  // AMX multiplies these with bits of its own
    if (first.empty()) first = got;
    EXPECT_EQ(got, first) << device.label;
  }
  compare_further(s, type, kv_type, want, kTokens);
}

TEST(LatentAttention, AgreesWithTheReferenceForWeightsOfEveryKind) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0, DType::kQ4_0, DType::kMXFP4})
    compare(kEven, type, DType::kF32);
}

TEST(LatentAttention, AgreesWithTheReferenceForEveryCache) {
  for (const DType kv_type : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3})
    compare(kOdd, DType::kF32, kv_type);
}

TEST(LatentAttention, AgreesWithTheReferenceForManyHeads) { compare(kWide, DType::kQ8_0, DType::kBF16); }

// Three splits of the context, by several threads and by one.
TEST(LatentAttention, ALongContextIsSplit) {
  constexpr int32_t kLong = 1060;  // 75 blocks in the pool: TestSequence scatters by sevens
  const Tensors tensors(DType::kF32, kEven);
  const auto reference = make_reference_backend();
  const std::vector<float> want = run(*reference, tensors, kEven, DType::kF32, kLong, kLong);
  for (const Device& device : cpu_devices()) {
    const std::vector<float> got = run(*device.backend, tensors, kEven, DType::kF32, kLong, kLong);
    EXPECT_LT(error_of(got, want), 2e-6) << device.label;
    // Where the first row differs, not all that do.
    const std::vector<float> cut = run(*device.backend, tensors, kEven, DType::kF32, 8, kLong);
    const auto [first, other] = std::mismatch(got.begin(), got.end(), cut.begin(), cut.end());
    EXPECT_TRUE(first == got.end() && other == cut.end())
        << device.label << " at token " << (first - got.begin()) / kEven.hidden;
  }
  compare_further(kEven, DType::kF32, DType::kF32, want, kLong);
}

// Every type of cache, every table, prompts in pieces: the tokens that the reference chooses, and the same
// bits. Where the cache rounds keys two scores may change places, so that a row reads another token.
TEST(IndexedAttention, AgreesWithTheReferenceForEveryCache) {
  const Tensors tensors(DType::kF32, kIndexed);
  const auto reference = make_reference_backend();
  for (const DType kv_type : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
    SCOPED_TRACE(std::string(info(kv_type).name));
    const std::vector<float> want = run(*reference, tensors, kIndexed, kv_type, kTokens);
    std::vector<float> first;
    for (const Device& device : cpu_devices()) {
      const std::vector<float> got = run(*device.backend, tensors, kIndexed, kv_type, kTokens);
      EXPECT_LT(error_of(got, want), allowed(DType::kF32, kv_type)) << device.label;
      for (const int32_t chunk : {1, 7, 40})
        EXPECT_EQ(run(*device.backend, tensors, kIndexed, kv_type, chunk), got)
            << device.label << " by " << chunk;
      if (first.empty()) first = got;
      EXPECT_EQ(got, first) << device.label;
    }
    compare_further(kIndexed, DType::kF32, kv_type, want, kTokens);
  }
}

// Rows within the budget have the bits they have without an indexer, the others read fewer tokens.
TEST(IndexedAttention, LeavesTokensOutBeyondItsBudget) {
  const Tensors tensors(DType::kF32, kIndexed);
  Shape all = kIndexed;
  all.latent.index_top = 4096;  // beyond every context
  const auto backend = make_cpu_backend({2});
  const std::vector<float> some = run(*backend, tensors, kIndexed, DType::kF32, kTokens),
                           full = run(*backend, tensors, all, DType::kF32, kTokens);
  const auto [at, other] = std::mismatch(some.begin(), some.end(), full.begin());
  EXPECT_EQ((at - some.begin()) / kIndexed.hidden, kIndexed.latent.index_top);
  EXPECT_GT(error_of(some, full), 0.05);
}

// Many pages a task, more chosen tokens than a split of the context has, several threads.
TEST(IndexedAttention, ALongContextIsSharedOutAmongThreads) {
  constexpr int32_t kLong = 1060;  // 75 blocks in the pool: TestSequence scatters by sevens
  Shape s = kIndexed;
  s.latent.index_top = 600;
  const Tensors tensors(DType::kF32, s);
  const std::vector<float> want = run(*make_reference_backend(), tensors, s, DType::kF32, kLong, kLong);
  std::vector<float> first;
  for (const int threads : {1, 3}) {
    const auto backend = make_cpu_backend({threads});
    const std::vector<float> got = run(*backend, tensors, s, DType::kF32, kLong, kLong);
    EXPECT_LT(error_of(got, want), 2e-5) << threads;
    if (first.empty()) first = got;
    EXPECT_TRUE(got == first) << threads;
    EXPECT_TRUE(run(*backend, tensors, s, DType::kF32, 101, kLong) == first) << threads;
  }
}

TEST(LatentAttention, FurtherDevicesAgreeWithTheReferenceForSizesOfModels) {
  if (further_devices().empty()) GTEST_SKIP() << "MILLRACE_TEST_DEVICES names no further device";
  const auto reference = make_reference_backend();
  for (const Shape& s : {kReal, kSmallRank}) {
    const Tensors tensors(DType::kBF16, s);
    for (const DType kv_type : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
      const bool is_long = s.heads == kReal.heads && kv_type != DType::kF32 && kv_type != DType::kF16;
      const int32_t total = is_long ? 600 : kTokens;
      const std::vector<float> want = run(*reference, tensors, s, kv_type, total, total);
      compare_further(s, DType::kBF16, kv_type, want, total);
    }
  }
}

// F32 weights: rounded queries and keys of an indexer would choose other tokens.
TEST(IndexedAttention, FurtherDevicesAgreeWithTheReferenceForSizesOfModels) {
  if (further_devices().empty()) GTEST_SKIP() << "MILLRACE_TEST_DEVICES names no further device";
  constexpr int32_t kLong = 210;  // 22 blocks in the pool: TestSequence scatters by sevens
  const auto reference = make_reference_backend();
  const Tensors tensors(DType::kF32, kRealIndexed);
  for (const DType kv_type : {DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    const std::vector<float> want = run(*reference, tensors, kRealIndexed, kv_type, kLong, kLong);
    compare_further(kRealIndexed, DType::kF32, kv_type, want, kLong);
  }
  Shape s = kIndexed;
  s.latent.index_top = 600;
  const std::vector<float> want = run(*reference, Tensors(DType::kF32, s), s, DType::kF32, 1060, 1060);
  compare_further(s, DType::kF32, DType::kF32, want, 1060);
}

TEST(LatentAttention, ACacheHasOneVectorAToken) {
  const ExecutorSpec spec = spec_of(kEven, DType::kBF16);
  EXPECT_EQ(spec.kv_block_bytes(0), size_t{2} * kBlockTokens * (64 + 16) * 2);
  const ExecutorSpec indexed = spec_of(kIndexed, DType::kBF16);
  EXPECT_EQ(indexed.kv_block_bytes(0), size_t{2} * kBlockTokens * (48 + 16 + 27) * 2);
}

TEST(LatentAttention, AnInt8CacheIsRefused) {
  const auto backend = make_cpu_backend({1});
  Shape s = kEven;
  try {
    backend->make_executor(spec_of(s, DType::kQ8_0));
    FAIL() << "was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("latent"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace millrace::latent
