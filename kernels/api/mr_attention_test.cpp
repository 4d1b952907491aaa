// Paged attention through the C API, against kernels/reference in double: ragged batches, odd shapes, every
// type of cache and instruction set; the same bits for any batch; bad arguments.
#include <numeric>
#include <thread>

#include "base/float_bits.h"
#include "kernels/api/api_test_support.h"
#include "kernels/reference/naive_attention.h"
#include "kernels/reference/naive_rotary.h"

namespace millrace::api_test {
namespace {

constexpr mr_dtype kKvTypes[] = {MR_F32, MR_F16, MR_BF16, MR_F8_E4M3, MR_Q8_0};

struct TestSequence {
  int32_t context, rows;
};

// A batch over one layer's cache, and the oracle's cache beside it. Blocks are handed out in an order that is
// not theirs; all of a sequence's tokens were appended by earlier steps or are by this one.
class Rig {
 public:
  Rig(mr_device* device, const mr_attention_config& config) : config_(config) {
    EXPECT_EQ(mr_kv_block_bytes(device, &config, &block_bytes_), MR_OK) << mr_last_error();
    size_t bytes = 0;
    EXPECT_EQ(mr_attention_workspace_bytes(device, &config, &bytes), MR_OK) << mr_last_error();
    workspace_ = std::make_unique<Guarded>(bytes);
    EXPECT_EQ(mr_attention_create(device, &config, workspace_->data(), bytes, &attention_), MR_OK)
        << mr_last_error();
    max_blocks_ = (config.max_context + 15) / 16;
    const int32_t blocks = max_blocks_ * config.max_sequences;
    pool_ = std::make_unique<Guarded>(block_bytes_ * static_cast<size_t>(blocks));
    std::memset(pool_->data(), 0xff, block_bytes_ * static_cast<size_t>(blocks));  // NaN where nobody wrote
    cache_ = {pool_->data(), blocks, 0};
    tables_.resize(static_cast<size_t>(blocks));
    std::iota(tables_.begin(), tables_.end(), 0);
    std::shuffle(tables_.begin(), tables_.end(), std::mt19937(1));
    kv_ = {static_cast<DType>(config.kv_type),
           nullptr,
           int64_t{2} * config.kv_heads * 16 * config.head_dim,
           0,
           config.kv_heads,
           config.head_dim};
    reference_pool_.resize(static_cast<size_t>(blocks * kv_.block_floats));
    kv_.pool = reference_pool_.data();
  }
  ~Rig() { mr_attention_destroy(attention_); }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  const int32_t* table(int32_t s) const { return tables_.data() + s * max_blocks_; }
  mr_attention* attention() { return attention_; }
  const mr_kv_cache& cache() const { return cache_; }
  reference::PagedKv& reference_kv() { return kv_; }

  void plan(const std::vector<TestSequence>& batch) {
    batch_ = batch;
    std::vector<int32_t> starts{0}, contexts;
    for (const TestSequence& s : batch) {
      starts.push_back(starts.back() + s.rows);
      contexts.push_back(s.context);
    }
    const mr_batch given{static_cast<int32_t>(batch.size()), starts.data(), contexts.data(), tables_.data(),
                         max_blocks_};
    ASSERT_EQ(mr_attention_plan(attention_, &given, nullptr), MR_OK) << mr_last_error();
  }

  // Appends random tokens [from, to) of every sequence to both caches.
  void fill(std::mt19937& random, const std::vector<TestSequence>& until) {
    std::vector<TestSequence> batch;
    for (const TestSequence& s : until) batch.push_back({0, s.context});
    int64_t rows = 0;
    for (const TestSequence& s : batch) rows += s.rows;
    if (rows == 0) return;
    plan(batch);
    const int64_t cols = int64_t{config_.kv_heads} * config_.head_dim;
    std::vector<float> key = rounded(random_floats(random, rows * cols)),
                       value = rounded(random_floats(random, rows * cols));
    append(nullptr, nullptr, key, value);
  }

  void append(const mr_rotary* rotary, float* query, std::vector<float>& key,
              const std::vector<float>& value) {
    const int64_t cols = int64_t{config_.kv_heads} * config_.head_dim;
    const std::vector<float> given = key;
    ASSERT_EQ(mr_attention_append(attention_, &cache_, rotary, query, key.data(), value.data(), nullptr),
              MR_OK)
        << mr_last_error();
    if (rotary == nullptr) {
      EXPECT_EQ(key, given);
    }
    int64_t row = 0;
    for (size_t s = 0; s < batch_.size(); ++s) {
      for (int32_t i = 0; i < batch_[s].rows; ++i, ++row) {
        reference::append_kv(kv_, table(static_cast<int32_t>(s)), batch_[s].context + i, &key[row * cols],
                             &value[row * cols]);
      }
    }
  }

  std::vector<float> run(const mr_attention_args& args, const std::vector<float>& query) {
    std::vector<float> out(query.size() + 4, NAN);
    EXPECT_EQ(mr_attention_run(attention_, &cache_, &args, query.data(), out.data(), nullptr), MR_OK)
        << mr_last_error();
    out.resize(query.size());
    return out;
  }

  std::vector<float> expected(const mr_attention_args& args, const std::vector<float>& query) {
    std::vector<float> out(query.size());
    const int64_t cols = int64_t{config_.heads} * config_.head_dim;
    const float scale =
        args.scale != 0.0f ? args.scale : 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
    int64_t row = 0;
    for (size_t s = 0; s < batch_.size(); ++s) {
      const reference::Attention op{
          kv_, table(static_cast<int32_t>(s)), config_.heads, args.window, scale, args.sinks};
      for (int32_t i = 0; i < batch_[s].rows; ++i, ++row) {
        reference::attend(op, batch_[s].context + i, &query[row * cols], &out[row * cols]);
      }
    }
    return out;
  }

  // What a 16-bit cache keeps: the oracle's is float32.
  std::vector<float> rounded(std::vector<float> x) const {
    for (float& v : x) {
      if (config_.kv_type == MR_BF16) v = to_float(to_bfloat16(v));
      if (config_.kv_type == MR_F16) v = to_float(to_half(v));
    }
    return x;
  }

 private:
  mr_attention_config config_;
  mr_attention* attention_ = nullptr;
  size_t block_bytes_ = 0;
  int32_t max_blocks_ = 0;
  std::unique_ptr<Guarded> workspace_, pool_;
  mr_kv_cache cache_{};
  std::vector<int32_t> tables_;
  reference::PagedKv kv_;
  std::vector<float> reference_pool_;
  std::vector<TestSequence> batch_;
};

// Queries and weights of an int8 cache are rounded to seven bits; tiles of AMX take queries as two bf16
// numbers, right to 2^-17 each; all else is float32.
double bound_of(mr_dtype type) { return type == MR_Q8_0 ? 0.04 : 1e-4; }

TEST(MrAttention, IsTheReferencesForRaggedBatches) {
  struct Shape {
    int32_t heads, kv_heads, head_dim;
  };
  const std::vector<TestSequence> batch = {{0, 5}, {600, 1}, {37, 17}, {0, 0}, {15, 1}, {16, 2}};
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    for (const Shape& shape : {Shape{8, 1, 64}, Shape{3, 3, 40}, Shape{4, 2, 32}, Shape{6, 2, 96}}) {
      for (const mr_dtype type : kKvTypes) {
        if (type == MR_Q8_0 && shape.head_dim % 32 != 0) continue;
        std::mt19937 random(7);
        Rig rig(device.get(), {shape.heads, shape.kv_heads, shape.head_dim, type, 700, 6, 1000});
        rig.fill(random, batch);
        rig.plan(batch);
        const int64_t rows = 26;
        std::vector<float> key = rig.rounded(random_floats(random, rows * shape.kv_heads * shape.head_dim));
        rig.append(nullptr, nullptr, key,
                   rig.rounded(random_floats(random, rows * shape.kv_heads * shape.head_dim)));
        const std::vector<float> query = random_floats(random, rows * shape.heads * shape.head_dim);
        const std::vector<float> sinks = random_floats(random, shape.heads);
        for (const mr_attention_args& args :
             {mr_attention_args{0, 0.0f, nullptr}, mr_attention_args{20, 0.2f, sinks.data()}}) {
          EXPECT_LT(relative_error(rig.run(args, query), rig.expected(args, query)), bound_of(type))
              << isa << ", " << mr_dtype_name(type) << ", heads of " << shape.head_dim << ", window "
              << args.window;
        }
      }
    }
  }
}

TEST(MrAttention, AppendRotatesAsTheReferenceDoes) {
  const DevicePtr device = open_cpu();
  const int32_t heads = 4, kv_heads = 2, dim = 48;
  const std::vector<float> inv_freq = {1.0f, 0.3f, 0.05f, 0.007f, 0.6f};  // of 10 of the 48 dimensions
  for (const int32_t interleaved : {0, 1}) {
    std::mt19937 random(3);
    Rig rig(device.get(), {heads, kv_heads, dim, MR_F32, 40, 2, 64});
    rig.plan({{0, 21}, {0, 3}});
    std::vector<float> query = random_floats(random, 24 * heads * dim),
                       key = random_floats(random, 24 * kv_heads * dim);
    std::vector<float> rotated_query = query, rotated_key = key;
    for (int32_t row = 0; row < 24; ++row) {
      const int32_t position = row < 21 ? row : row - 21;
      const reference::Rotary by{inv_freq, 1.5f, interleaved != 0};
      for (int h = 0; h < heads; ++h)
        reference::rotate(by, position, &rotated_query[(row * heads + h) * dim]);
      for (int h = 0; h < kv_heads; ++h)
        reference::rotate(by, position, &rotated_key[(row * kv_heads + h) * dim]);
    }
    std::vector<float> applied = query;
    std::vector<int32_t> positions;
    for (int32_t row = 0; row < 24; ++row) positions.push_back(row < 21 ? row : row - 21);
    const mr_rotary rotary{inv_freq.data(), 5, 1.5f, interleaved};
    ASSERT_EQ(
        mr_rotary_apply(device.get(), &rotary, positions.data(), 24, heads, dim, applied.data(), 0, nullptr),
        MR_OK);
    rig.append(&rotary, query.data(), key, random_floats(random, 24 * kv_heads * dim));
    EXPECT_LT(relative_error(query, rotated_query), 1e-6);
    EXPECT_LT(relative_error(key, rotated_key), 1e-6);
    EXPECT_EQ(query, applied) << "mr_rotary_apply has other bits";
    const mr_attention_args args{0, 0.0f, nullptr};
    EXPECT_LT(relative_error(rig.run(args, query), rig.expected(args, query)), 1e-5);
  }
}

// A row's bits depend neither on its neighbours nor on how its prompt was cut nor on the number of threads.
TEST(MrAttention, HasTheSameBitsInAnyBatch) {
  const int32_t heads = 8, kv_heads = 2, dim = 64, tokens = 90;
  const int64_t cols = heads * dim, kv_cols = kv_heads * dim;
  for (const mr_dtype type : kKvTypes) {
    std::mt19937 random(11);
    const std::vector<float> query = random_floats(random, tokens * cols),
                             key = random_floats(random, tokens * kv_cols),
                             value = random_floats(random, tokens * kv_cols);
    const mr_attention_args args{33, 0.0f, nullptr};
    std::vector<float> whole;
    for (const int32_t chunk : {tokens, 16, 1}) {
      const DevicePtr device = open_cpu(nullptr, chunk == 16 ? 1 : 3);
      Rig rig(device.get(), {heads, kv_heads, dim, type, tokens, 1, tokens});
      std::vector<float> out;
      for (int32_t first = 0; first < tokens; first += chunk) {
        const int32_t rows = std::min(chunk, tokens - first);
        rig.plan({{first, rows}});
        std::vector<float> k(key.begin() + first * kv_cols, key.begin() + (first + rows) * kv_cols);
        rig.append(nullptr, nullptr, k,
                   {value.begin() + first * kv_cols, value.begin() + (first + rows) * kv_cols});
        const std::vector<float> part =
            rig.run(args, {query.begin() + first * cols, query.begin() + (first + rows) * cols});
        out.insert(out.end(), part.begin(), part.end());
      }
      if (chunk == tokens) whole = out;
      EXPECT_EQ(out, whole) << mr_dtype_name(type) << " in chunks of " << chunk;
    }
  }
}

TEST(MrAttention, RunsOnTwoDevicesAtOnce) {
  std::vector<float> results[2];
  const auto work = [&](int i) {
    const DevicePtr device = open_cpu(nullptr, 2);
    std::mt19937 random(5);
    Rig rig(device.get(), {4, 2, 64, MR_BF16, 64, 2, 64});
    for (int round = 0; round < 20; ++round) {
      rig.plan({{0, 40}, {0, 9}});
      std::vector<float> key = random_floats(random, 49 * 128);
      rig.append(nullptr, nullptr, key, random_floats(random, 49 * 128));
      results[i] = rig.run({0, 0.0f, nullptr}, random_floats(random, 49 * 256));
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  EXPECT_EQ(results[0], results[1]);
}

TEST(MrAttention, RefusesBadShapes) {
  const DevicePtr device = open_cpu(nullptr, 1);
  const mr_attention_config good{4, 2, 64, MR_BF16, 8, 2, 64};
  size_t bytes = 0;
  mr_attention* made = nullptr;
  EXPECT_REFUSED(mr_kv_block_bytes(nullptr, &good, &bytes), MR_ERROR_INVALID, "device");
  EXPECT_REFUSED(mr_kv_block_bytes(device.get(), nullptr, &bytes), MR_ERROR_INVALID, "config");
  EXPECT_REFUSED(mr_kv_block_bytes(device.get(), &good, nullptr), MR_ERROR_INVALID, "bytes");
  const auto refused = [&](auto change, mr_status status, const char* word) {
    mr_attention_config bad = good;
    change(bad);
    EXPECT_REFUSED(mr_attention_workspace_bytes(device.get(), &bad, &bytes), status, word);
  };
  refused([](auto& c) { c.heads = 5; }, MR_ERROR_INVALID, "multiple of the 2 KV heads");
  refused([](auto& c) { c.kv_heads = 0; }, MR_ERROR_INVALID, "kv_heads");
  refused([](auto& c) { c.head_dim = -64; }, MR_ERROR_INVALID, "head_dim");
  refused([](auto& c) { c.max_rows = 0; }, MR_ERROR_INVALID, "max_rows");
  refused([](auto& c) { c.max_context = -1; }, MR_ERROR_INVALID, "max_context");
  refused([](auto& c) { c.kv_type = static_cast<mr_dtype>(15); }, MR_ERROR_INVALID, "kv_type");
  refused([](auto& c) { c.kv_type = MR_Q4_K; }, MR_ERROR_UNSUPPORTED, "q4_k");
  refused([](auto& c) { c.kv_type = MR_Q8_0, c.head_dim = 40; }, MR_ERROR_UNSUPPORTED, "40");

  ASSERT_EQ(mr_attention_workspace_bytes(device.get(), &good, &bytes), MR_OK);
  const Guarded workspace(bytes + 256);
  EXPECT_REFUSED(mr_attention_create(device.get(), &good, workspace.data(), bytes - 1, &made),
                 MR_ERROR_NO_MEMORY, "workspace");
  EXPECT_REFUSED(
      mr_attention_create(device.get(), &good, static_cast<uint8_t*>(workspace.data()) + 8, bytes, &made),
      MR_ERROR_INVALID, "256");
  EXPECT_REFUSED(mr_attention_create(device.get(), &good, nullptr, bytes, &made), MR_ERROR_INVALID,
                 "workspace");
  EXPECT_EQ(made, nullptr);
}

TEST(MrAttention, RefusesBadBatches) {
  const DevicePtr device = open_cpu(nullptr, 1);
  Rig rig(device.get(), {4, 2, 64, MR_BF16, 8, 2, 64});
  std::vector<float> query(8 * 256), key(8 * 128), value(8 * 128), out(8 * 256);
  const mr_attention_args args{0, 0.0f, nullptr};
  const auto run = [&](const mr_kv_cache& cache, const mr_attention_args& with) {
    return mr_attention_run(rig.attention(), &cache, &with, query.data(), out.data(), nullptr);
  };
  EXPECT_REFUSED(run(rig.cache(), args), MR_ERROR_INVALID, "mr_attention_plan");

  std::vector<int32_t> starts{0, 3, 8}, contexts{0, 10}, tables{0, 1, 2, 3, 4, 5, 6, 7};
  const mr_batch good{2, starts.data(), contexts.data(), tables.data(), 4};
  const auto plan = [&](const mr_batch& batch) {
    return mr_attention_plan(rig.attention(), &batch, nullptr);
  };
  mr_batch bad = good;
  bad.num_sequences = 3;
  EXPECT_REFUSED(plan(bad), MR_ERROR_INVALID, "num_sequences");
  bad = good;
  bad.row_starts = nullptr;
  EXPECT_REFUSED(plan(bad), MR_ERROR_INVALID, "row_starts");
  bad = good;
  bad.table_stride = 0;
  EXPECT_REFUSED(plan(bad), MR_ERROR_INVALID, "table_stride");
  starts = {0, 3, 9};
  EXPECT_REFUSED(plan(good), MR_ERROR_INVALID, "max_rows");
  starts = {0, 3, 2};
  EXPECT_REFUSED(plan(good), MR_ERROR_INVALID, "row_starts[2]");
  starts = {1, 3, 8};
  EXPECT_REFUSED(plan(good), MR_ERROR_INVALID, "row_starts[0]");
  starts = {0, 3, 8};
  contexts = {0, 60};
  EXPECT_REFUSED(plan(good), MR_ERROR_INVALID, "max_context");
  contexts = {-1, 10};
  EXPECT_REFUSED(plan(good), MR_ERROR_INVALID, "sequence 0");
  contexts = {0, 10};

  tables[4] = 99;
  ASSERT_EQ(plan(good), MR_OK);
  EXPECT_REFUSED(run(rig.cache(), args), MR_ERROR_INVALID, "entry 0 of sequence 1 is 99");
  EXPECT_REFUSED(
      mr_attention_append(rig.attention(), &rig.cache(), nullptr, nullptr, key.data(), value.data(), nullptr),
      MR_ERROR_INVALID, "entry 0 of sequence 1");
  tables[4] = 4;
  ASSERT_EQ(plan(good), MR_OK);
  ASSERT_EQ(
      mr_attention_append(rig.attention(), &rig.cache(), nullptr, nullptr, key.data(), value.data(), nullptr),
      MR_OK);
  mr_kv_cache cache = rig.cache();
  cache.block_stride_bytes = 8192 + 8;
  EXPECT_REFUSED(run(cache, args), MR_ERROR_INVALID, "multiple of 16");
  cache.block_stride_bytes = 16;
  EXPECT_REFUSED(run(cache, args), MR_ERROR_INVALID, "block_stride_bytes");
  cache = rig.cache();
  cache.blocks = nullptr;
  EXPECT_REFUSED(run(cache, args), MR_ERROR_INVALID, "cache.blocks");
  EXPECT_REFUSED(run(rig.cache(), {-1, 0.0f, nullptr}), MR_ERROR_INVALID, "window");
  EXPECT_REFUSED(
      mr_attention_run(rig.attention(), &rig.cache(), &args, query.data() + 1, out.data(), nullptr),
      MR_ERROR_INVALID, "query");
  EXPECT_REFUSED(mr_attention_run(rig.attention(), &rig.cache(), &args, query.data(), nullptr, nullptr),
                 MR_ERROR_INVALID, "out");
  const mr_rotary rotary{nullptr, 8, 1.0f, 0};
  EXPECT_REFUSED(mr_attention_append(rig.attention(), &rig.cache(), &rotary, query.data(), key.data(),
                                     value.data(), nullptr),
                 MR_ERROR_INVALID, "inv_freq");
}

}  // namespace
}  // namespace millrace::api_test
