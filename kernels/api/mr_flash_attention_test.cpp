// Attention over tensors by the C API, of every kernel table: against the reference in double, the same bits
// for every table, number of threads and neighbour, gradients of the reference by finite differences, and
// what bad input gets.
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>

#include "base/float_bits.h"
#include "base/normal_floats.h"
#include "kernels/api/api_test_support.h"
#include "kernels/reference/naive_flash_attention.h"

namespace millrace::api_test {
namespace {

using reference::FlashInputs;

struct FlashShape {
  mr_dtype type = MR_F32;
  int32_t batch = 1, heads = 2, kv_heads = 1, head_dim = 16, value_dim = 16;
  int32_t q_len = 0, k_len = 0;
  std::vector<int32_t> cu_q = {}, cu_k = {};  // ragged where there are any
  int32_t left = -1, right = -1;
  float softcap = 0.0f;
  bool sinks = false, heads_first = false;
  int32_t block = 0;  // of blocks of keys every third is absent
};

size_t flash_size_of(mr_dtype type) { return type == MR_F32 ? 4 : 2; }

// A tensor [batch][seq][heads][dim] that ends at a page nobody may touch.
struct FlashArray {
  FlashArray(mr_dtype of, int64_t batches, int64_t rows, int64_t num_heads, int64_t dims, bool heads_first)
      : type(of),
        batch(batches),
        seq(rows),
        heads(num_heads),
        dim(dims),
        memory(static_cast<size_t>(count()) * flash_size_of(of) + 16, 16) {
    tensor.data = memory.data();
    tensor.batch_stride = seq * heads * dim;
    tensor.seq_stride = heads_first ? dim : heads * dim;
    tensor.head_stride = heads_first ? seq * dim : dim;
    std::memset(memory.data(), 0xff,
                static_cast<size_t>(count()) * flash_size_of(type));  // NaN in every type
  }
  int64_t count() const { return batch * seq * heads * dim; }
  int64_t index(int64_t row, int64_t head, int64_t d) const {  // row of all
    return row / seq * tensor.batch_stride + row % seq * tensor.seq_stride + head * tensor.head_stride + d;
  }
  double get(int64_t at) const {
    if (type == MR_F32) return static_cast<const float*>(memory.data())[at];
    const uint16_t bits = static_cast<const uint16_t*>(memory.data())[at];
    return type == MR_F16 ? to_float(Half{bits}) : to_float(BFloat16{bits});
  }
  void put(int64_t at, float x) {
    if (type == MR_F32) {
      static_cast<float*>(memory.data())[at] = x;
    } else {
      static_cast<uint16_t*>(memory.data())[at] = type == MR_F16 ? to_half(x).bits : to_bfloat16(x).bits;
    }
  }
  void fill(std::mt19937& random) {
    NormalFloats normal;
    for (int64_t i = 0; i < count(); ++i) put(i, normal(random));
  }
  std::vector<uint8_t> bytes() const {
    const auto* first = static_cast<const uint8_t*>(memory.data());
    return {first, first + static_cast<size_t>(count()) * flash_size_of(type)};
  }

  mr_dtype type;
  int64_t batch, seq, heads, dim;
  Guarded memory;
  mr_flash_tensor tensor{};
};

// A problem with random inputs.
struct FlashCase {
  explicit FlashCase(const FlashShape& of, unsigned seed = 1)
      : shape(of),
        rows(ragged() ? of.cu_q.back() : of.q_len),
        keys(ragged() ? of.cu_k.back() : of.k_len),
        batches(ragged() ? 1 : of.batch),
        q(of.type, batches, rows, of.heads, of.head_dim, of.heads_first),
        k(of.type, batches, keys, of.kv_heads, of.head_dim, of.heads_first),
        v(of.type, batches, keys, of.kv_heads, of.value_dim, of.heads_first),
        d_out(of.type, batches, rows, of.heads, of.value_dim, of.heads_first) {
    std::mt19937 random(seed);
    for (FlashArray* x : {&q, &k, &v, &d_out}) x->fill(random);
    sinks = random_floats(random, of.heads);
    problem.type = of.type;
    problem.batch = of.batch;
    problem.heads = of.heads;
    problem.kv_heads = of.kv_heads;
    problem.head_dim = of.head_dim;
    problem.value_dim = of.value_dim;
    problem.max_q = ragged() ? longest(of.cu_q) : of.q_len;
    problem.max_k = ragged() ? longest(of.cu_k) : of.k_len;
    problem.cu_q = ragged() ? shape.cu_q.data() : nullptr;
    problem.cu_k = ragged() ? shape.cu_k.data() : nullptr;
    problem.softcap = of.softcap;
    problem.window_left = of.left;
    problem.window_right = of.right;
    problem.sinks = of.sinks ? sinks.data() : nullptr;
    if (of.block > 0) put_blocks();
  }
  bool ragged() const { return !shape.cu_q.empty(); }
  static int32_t longest(const std::vector<int32_t>& starts) {
    int32_t most = 0;
    for (size_t i = 1; i < starts.size(); ++i) most = std::max(most, starts[i] - starts[i - 1]);
    return most;
  }
  void put_blocks() {
    const int32_t side = shape.block, count = (problem.max_k + side - 1) / side;
    blocks = {side, side, (problem.max_q + side - 1) / side, nullptr, nullptr};
    row_starts = {0};
    for (int32_t n = 0; n < shape.batch * shape.heads * blocks.q_blocks; ++n) {
      for (int32_t c = 0; c < count; ++c) {
        if ((n + c) % 3 != 0) columns.push_back(c);
      }
      row_starts.push_back(static_cast<int32_t>(columns.size()));
    }
    columns.push_back(0);
    blocks.row_starts = row_starts.data();
    blocks.columns = columns.data();
    problem.blocks = &blocks;
  }
  int64_t lse_index(int32_t b, int64_t row, int64_t head) const {  // row of all
    if (ragged()) return head * rows + row;
    return (int64_t{b} * shape.heads + head) * rows + row - b * rows;
  }

  FlashShape shape;
  int64_t rows, keys, batches;
  FlashArray q, k, v, d_out;
  std::vector<float> sinks;
  std::vector<int32_t> row_starts, columns;
  mr_flash_blocks blocks{};
  mr_flash_problem problem{};
};

struct FlashResult {
  explicit FlashResult(const FlashCase& c)
      : out(c.shape.type, c.batches, c.rows, c.shape.heads, c.shape.value_dim, c.shape.heads_first),
        d_q(c.shape.type, c.batches, c.rows, c.shape.heads, c.shape.head_dim, c.shape.heads_first),
        d_k(c.shape.type, c.batches, c.keys, c.shape.kv_heads, c.shape.head_dim, c.shape.heads_first),
        d_v(c.shape.type, c.batches, c.keys, c.shape.kv_heads, c.shape.value_dim, c.shape.heads_first),
        lse(static_cast<size_t>(c.batches * c.rows * c.shape.heads), NAN),
        d_sinks(static_cast<size_t>(c.shape.heads), NAN) {}
  FlashArray out, d_q, d_k, d_v;
  std::vector<float> lse, d_sinks;
};

std::unique_ptr<Guarded> poisoned(size_t bytes) {
  auto memory = std::make_unique<Guarded>(std::max<size_t>(bytes, 1));
  std::memset(memory->data(), 0xff, bytes);
  return memory;
}

void run_case(mr_device* device, const FlashCase& c, FlashResult& r) {
  size_t bytes = 0;
  ASSERT_EQ(mr_flash_forward_workspace_bytes(device, &c.problem, &bytes), MR_OK) << mr_last_error();
  const auto forward = poisoned(bytes);
  ASSERT_EQ(mr_flash_forward(device, &c.problem, c.q.tensor, c.k.tensor, c.v.tensor, r.out.tensor,
                             r.lse.data(), forward->data(), bytes, nullptr),
            MR_OK)
      << mr_last_error();
  ASSERT_EQ(mr_flash_backward_workspace_bytes(device, &c.problem, 1, &bytes), MR_OK) << mr_last_error();
  const auto backward = poisoned(bytes);
  const mr_flash_gradients gradients{c.d_out.tensor,
                                     r.d_q.tensor,
                                     r.d_k.tensor,
                                     r.d_v.tensor,
                                     c.shape.sinks ? r.d_sinks.data() : nullptr,
                                     1};
  ASSERT_EQ(mr_flash_backward(device, &c.problem, c.q.tensor, c.k.tensor, c.v.tensor, r.out.tensor,
                              r.lse.data(), &gradients, backward->data(), bytes, nullptr),
            MR_OK)
      << mr_last_error();
}

double largest_of(std::initializer_list<const std::vector<double>*> all) {
  double largest = 1e-30;
  for (const std::vector<double>* of : all) {
    for (const double x : *of) largest = std::max(largest, std::fabs(x));
  }
  return largest;
}

// Rows of an array against [rows][heads][dim]: each within `rounding` of itself and an absolute error.
void expect_near(const FlashArray& got, const std::vector<double>& want, double rounding, double error,
                 const char* what) {
  ASSERT_EQ(static_cast<size_t>(got.count()), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const int64_t d = at % got.dim, head = at / got.dim % got.heads, row = at / got.dim / got.heads;
    const double x = got.get(got.index(row, head, d)), off = std::fabs(x - want[i]);
    ASSERT_LE(off, rounding * std::fabs(want[i]) + error)
        << what << " row " << row << " head " << head << " dimension " << d << ": " << x << ", expected "
        << want[i];
  }
}

// bf16_tiles: weights are rounded to bf16 before they meet the values, of which none is above 5.
void expect_reference(const FlashCase& c, const FlashResult& r, bool bf16_tiles) {
  const FlashInputs in{c.problem, c.q.tensor, c.k.tensor, c.v.tensor};
  const reference::FlashOutputs want = reference::flash_forward(in);
  const mr_dtype type = c.shape.type;
  const double rounding = type == MR_F32 ? 0x1p-23 : type == MR_F16 ? 0x1p-11 : 0x1p-8;
  // Float32 sums; backward reads `out` as it was rounded.
  const double error = type == MR_F32 ? 1e-5 : type == MR_F16 ? 1e-3 : 8e-3;
  const bool rounded = bf16_tiles && type == MR_BF16;
  expect_near(r.out, want.out, rounding, rounded ? 5 * 0x1p-8 : 2e-6 * largest_of({&want.out}), "out");
  for (int32_t b = 0; b < c.shape.batch; ++b) {
    const int64_t first = reference::flash_query_row(c.problem, b);
    for (int64_t row = first; row < first + reference::flash_query_length(c.problem, b); ++row) {
      for (int64_t h = 0; h < c.shape.heads; ++h) {
        const double lse = want.lse[row * c.shape.heads + h], got = r.lse[c.lse_index(b, row, h)];
        if (got == lse) continue;  // infinities
        ASSERT_NEAR(got, lse, 5e-6) << "lse, row " << row << " head " << h;
      }
    }
  }
  std::vector<double> d_out(static_cast<size_t>(c.d_out.count()));
  for (size_t i = 0; i < d_out.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    d_out[i] = c.d_out.get(
        c.d_out.index(at / c.d_out.dim / c.d_out.heads, at / c.d_out.dim % c.d_out.heads, at % c.d_out.dim));
  }
  const reference::FlashGradients grads = reference::flash_backward(in, d_out);
  // dS is a difference, which may be zero where its terms are not: they are as large as dV's.
  const double off = error * largest_of({&grads.d_q, &grads.d_k, &grads.d_v, &grads.d_sinks});
  expect_near(r.d_q, grads.d_q, rounding, off, "d_q");
  expect_near(r.d_k, grads.d_k, rounding, off, "d_k");
  expect_near(r.d_v, grads.d_v, rounding, off, "d_v");
  for (size_t h = 0; h < grads.d_sinks.size(); ++h) {
    ASSERT_NEAR(r.d_sinks[h], grads.d_sinks[h], off) << "d_sinks of head " << h;
  }
}

void expect_same_bits(const FlashResult& a, const FlashResult& b, bool with_sinks, const std::string& what) {
  EXPECT_EQ(a.out.bytes(), b.out.bytes()) << what << ": out";
  EXPECT_TRUE(a.lse.empty() || std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0)
      << what << ": lse";
  EXPECT_EQ(a.d_q.bytes(), b.d_q.bytes()) << what << ": d_q";
  EXPECT_EQ(a.d_k.bytes(), b.d_k.bytes()) << what << ": d_k";
  EXPECT_EQ(a.d_v.bytes(), b.d_v.bytes()) << what << ": d_v";
  if (!with_sinks) return;
  EXPECT_EQ(a.d_sinks, b.d_sinks) << what << ": d_sinks";
}

std::vector<FlashShape> grid() {
  std::vector<FlashShape> shapes;
  const auto add = [&](const std::function<void(FlashShape&)>& change) {
    FlashShape s;
    s.q_len = 37;
    s.k_len = 83;
    change(s);
    shapes.push_back(s);
  };
  for (const mr_dtype type : {MR_F32, MR_F16, MR_BF16}) {
    add([&](FlashShape& s) { s.type = type, s.right = 0, s.sinks = true, s.batch = 2; });
    add([&](FlashShape& s) { s.type = type, s.heads_first = true, s.softcap = 3, s.left = 9, s.right = 4; });
    add([&](FlashShape& s) {
      s.type = type, s.cu_q = {0, 0, 5, 70, 71}, s.cu_k = {0, 4, 4, 70, 200}, s.batch = 4, s.right = 0;
      s.heads = 6, s.kv_heads = 2, s.sinks = true, s.heads_first = type == MR_F16;
    });
  }
  const int32_t lengths[] = {0, 1, 65};
  for (const int32_t q_len : lengths) {
    for (const int32_t k_len : lengths) {
      add([&](FlashShape& s) { s.q_len = q_len, s.k_len = k_len, s.right = 0; });
      add([&](FlashShape& s) { s.q_len = q_len, s.k_len = k_len, s.left = 3, s.right = 2, s.sinks = true; });
    }
  }
  add([](FlashShape& s) { s.head_dim = 24, s.value_dim = 8, s.right = 0; });
  add([](FlashShape& s) { s.head_dim = 64, s.value_dim = 32, s.left = 30, s.right = 0, s.type = MR_BF16; });
  add([](FlashShape& s) { s.head_dim = 192, s.value_dim = 128, s.right = 0, s.type = MR_BF16; });
  add([](FlashShape& s) { s.heads = 70, s.q_len = 3, s.right = 0; });
  // Over several chunks of 256 keys, and of 256 queries.
  add([](FlashShape& s) { s.q_len = 270, s.k_len = 800, s.right = 0, s.sinks = true, s.type = MR_BF16; });
  add([](FlashShape& s) {
    s.q_len = 530, s.k_len = 530, s.left = 270, s.right = 0, s.head_dim = s.value_dim = 8;
  });
  add([](FlashShape& s) { s.q_len = 5, s.k_len = 1100, s.softcap = 4, s.heads = 8, s.kv_heads = 2; });
  add([](FlashShape& s) { s.block = 128, s.q_len = 130, s.k_len = 600, s.right = 0, s.head_dim = 8; });
  add([](FlashShape& s) { s.block = 64, s.q_len = 130, s.k_len = 200, s.right = 0, s.head_dim = 8; });
  add([](FlashShape& s) { s.block = 128, s.q_len = 130, s.k_len = 300, s.left = 150, s.value_dim = 8; });
  return shapes;
}

TEST(FlashAttention, IsTheReferenceAndTheSameBitsOnEveryTableAndNumberOfThreads) {
  for (const FlashShape& shape : grid()) {
    const FlashCase c(shape);
    FlashResult scalar(c);
    run_case(open_cpu("scalar", 1).get(), c, scalar);
    expect_reference(c, scalar, false);
    for (const std::string& isa : isas()) {
      FlashResult other(c);
      run_case(open_cpu(isa.c_str(), 3).get(), c, other);
      if (isa == "amx") {
        expect_reference(c, other, true);
      } else {
        expect_same_bits(scalar, other, shape.sinks, isa);
      }
    }
    if (HasFatalFailure() || HasNonfatalFailure()) {
      ADD_FAILURE() << "type " << shape.type << ", " << shape.q_len << " x " << shape.k_len << ", heads "
                    << shape.heads << ", dims " << shape.head_dim << " and " << shape.value_dim << ", window "
                    << shape.left << " " << shape.right << ", block " << shape.block;
      return;
    }
  }
}

// A sequence among others, and its queries one at a time, have the bits it has alone.
TEST(FlashAttention, BitsOfARowDoNotDependOnItsNeighbours) {
  FlashShape shape;
  shape.type = MR_BF16;
  shape.heads = 4;
  shape.kv_heads = 2;
  shape.right = 0;
  shape.left = 50;
  shape.batch = 3;
  shape.cu_q = {0, 30, 97, 100};
  shape.cu_k = {0, 90, 230, 233};
  const FlashCase all(shape);
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    FlashResult together(all);
    run_case(device.get(), all, together);
    size_t bytes = 0;
    mr_flash_problem one = all.problem;
    one.batch = 1;
    one.cu_q = one.cu_k = nullptr;
    one.max_q = 1;
    for (const int32_t query : {0, 1, 20, 66}) {  // of sequence 1: it sees the keys up to its own position
      one.max_k = 140 - 67 + query + 1;
      FlashArray out(shape.type, 1, 1, shape.heads, shape.value_dim, false);
      const auto at = [&](const FlashArray& x, int64_t row) {
        mr_flash_tensor t = x.tensor;
        t.data = static_cast<uint8_t*>(t.data) + row * t.seq_stride * 2;
        return t;
      };
      ASSERT_EQ(mr_flash_forward_workspace_bytes(device.get(), &one, &bytes), MR_OK);
      const auto workspace = poisoned(bytes);
      ASSERT_EQ(mr_flash_forward(device.get(), &one, at(all.q, 30 + query), at(all.k, 90), at(all.v, 90),
                                 out.tensor, nullptr, workspace->data(), bytes, nullptr),
                MR_OK)
          << mr_last_error();
      const auto* row = static_cast<const uint8_t*>(together.out.tensor.data) +
                        (30 + query) * together.out.tensor.seq_stride * 2;
      EXPECT_EQ(std::memcmp(row, out.tensor.data, out.bytes().size()), 0) << isa << ", query " << query;
    }
  }
}

// Keys and values in pages, in any order, with NaN in rows that nobody has.
TEST(FlashAttention, PagesAreReadAsTheDenseTensorIs) {
  FlashShape shape;
  shape.q_len = 5;
  shape.k_len = 100;
  shape.right = 0;
  const FlashCase c(shape);
  const int32_t tokens = 16, pages[] = {5, 0, 3, 6, 2, 4, 1}, k_length = 100;
  FlashArray k(shape.type, 7, tokens, 1, shape.head_dim, false), v(shape.type, 7, tokens, 1, 16, false);
  for (int64_t j = 0; j < k_length; ++j) {
    for (int64_t d = 0; d < 16; ++d) {
      const int64_t row = pages[j / tokens] * tokens + j % tokens;
      k.put(k.index(row, 0, d), static_cast<float>(c.k.get(c.k.index(j, 0, d))));
      v.put(v.index(row, 0, d), static_cast<float>(c.v.get(c.v.index(j, 0, d))));
    }
  }
  mr_flash_problem paged = c.problem;
  paged.pages = pages;
  paged.page_tokens = tokens;
  paged.k_lengths = &k_length;
  for (const std::string& isa : isas()) {
    const DevicePtr device = open_cpu(isa.c_str());
    FlashResult dense(c), other(c);
    run_case(device.get(), c, dense);
    size_t bytes = 0;
    ASSERT_EQ(mr_flash_forward_workspace_bytes(device.get(), &paged, &bytes), MR_OK);
    const auto workspace = poisoned(bytes);
    ASSERT_EQ(mr_flash_forward(device.get(), &paged, c.q.tensor, k.tensor, v.tensor, other.out.tensor,
                               nullptr, workspace->data(), bytes, nullptr),
              MR_OK)
        << mr_last_error();
    EXPECT_EQ(dense.out.bytes(), other.out.bytes()) << isa;
  }
}

// The reference's gradients: a step in every coordinate of the inputs, both ways.
TEST(FlashAttention, GradientsOfTheReferenceAreFiniteDifferences) {
  FlashShape shape;
  shape.heads = 2;
  shape.head_dim = shape.value_dim = 8;
  shape.batch = 2;
  shape.cu_q = {0, 3, 5};
  shape.cu_k = {0, 4, 5};
  shape.right = 0;
  shape.softcap = 2.0f;
  shape.sinks = true;
  FlashCase c(shape);
  const FlashInputs in{c.problem, c.q.tensor, c.k.tensor, c.v.tensor};
  std::vector<double> d_out(static_cast<size_t>(c.d_out.count()));
  for (size_t i = 0; i < d_out.size(); ++i) d_out[i] = c.d_out.get(static_cast<int64_t>(i));
  const reference::FlashGradients grads = reference::flash_backward(in, d_out);
  const auto loss = [&] {
    const std::vector<double> out = reference::flash_forward(in).out;
    double sum = 0;
    for (size_t i = 0; i < out.size(); ++i) sum += out[i] * d_out[i];
    return sum;
  };
  const auto expect_slope = [&](float& x, double want) {
    const float kept = x, step = 0x1p-8f;
    x = kept + step;
    const double up = loss(), high = x;
    x = kept - step;
    const double down = loss(), low = x;
    x = kept;
    EXPECT_NEAR((up - down) / (high - low), want, 1e-4 * (1.0 + std::fabs(want)));
  };
  struct Named {
    FlashArray& x;
    const std::vector<double>& grad;
  };
  for (const Named& of : {Named{c.q, grads.d_q}, Named{c.k, grads.d_k}, Named{c.v, grads.d_v}}) {
    for (int64_t i = 0; i < of.x.count(); ++i) {
      expect_slope(static_cast<float*>(of.x.tensor.data)[i], of.grad[static_cast<size_t>(i)]);
    }
  }
  for (size_t h = 0; h < c.sinks.size(); ++h) expect_slope(c.sinks[h], grads.d_sinks[h]);
}

TEST(FlashAttention, QuantizedRowsKeepTheirScoresWithTheRotation) {
  const DevicePtr device = open_cpu();
  std::mt19937 random(3);
  const int32_t seq = 130, dim = 96;
  FlashArray x(MR_BF16, 1, seq, 2, dim, false);
  x.fill(random);
  std::vector<uint8_t> codes(static_cast<size_t>(x.count()) + 16);
  mr_flash_tensor to = x.tensor;
  to.data = codes.data() + (16 - reinterpret_cast<uintptr_t>(codes.data()) % 16) % 16;
  const auto at = [&](int64_t row, int64_t d) { return row * 2 * dim + d; };
  for (const int32_t per_scale : {1, 128}) {
    std::vector<double> rows[2];
    for (const int32_t rotate : {0, 1}) {
      std::vector<float> scales(per_scale == 1 ? seq * 2 : 4, NAN);
      const mr_flash_quantize_args args{MR_BF16,  1,  seq,           2,         dim,
                                        x.tensor, to, scales.data(), per_scale, rotate};
      ASSERT_EQ(mr_flash_quantize(device.get(), &args, nullptr), MR_OK) << mr_last_error();
      for (int64_t r = 0; r < seq; ++r) {
        const float scale =
            per_scale == 1 ? scales[static_cast<size_t>(2 * r)] : scales[static_cast<size_t>(r / 128)];
        for (int64_t d = 0; d < dim; ++d) {
          const uint8_t code = static_cast<const uint8_t*>(to.data)[at(r, d)];
          rows[rotate].push_back(static_cast<double>(to_float(Fp8E4M3{code})) * scale);
        }
      }
    }
    for (int64_t r = 0; r + 1 < seq; ++r) {
      double exact = 0, plain = 0, rotated = 0, size = 0;
      for (int64_t d = 0; d < dim; ++d) {
        const auto a = static_cast<size_t>(r * dim + d), b = a + static_cast<size_t>(dim);
        exact += x.get(at(r, d)) * x.get(at(r + 1, d));
        size += std::fabs(x.get(at(r, d)) * x.get(at(r + 1, d)));
        plain += rows[0][a] * rows[0][b];
        rotated += rows[1][a] * rows[1][b];
      }
      ASSERT_NEAR(plain, exact, 0.06 * size) << per_scale << " row " << r;
      ASSERT_NEAR(rotated, exact, 0.06 * size) << per_scale << " row " << r;
    }
  }
}

// ---------------------------------------------------------------- bad input

struct Refusals : ::testing::Test {
  Refusals() : c(shape()), r(c) {
    EXPECT_EQ(mr_flash_backward_workspace_bytes(device.get(), &c.problem, 1, &bytes), MR_OK);
    workspace = poisoned(bytes);
    gradients = {c.d_out.tensor, r.d_q.tensor, r.d_k.tensor, r.d_v.tensor, nullptr, 1};
  }
  static FlashShape shape() {
    FlashShape s;
    s.q_len = 5;
    s.k_len = 7;
    s.batch = 2;
    s.type = MR_BF16;
    return s;
  }
  mr_status forward() {
    return mr_flash_forward(device.get(), &c.problem, c.q.tensor, c.k.tensor, c.v.tensor, r.out.tensor,
                            r.lse.data(), workspace->data(), bytes, nullptr);
  }
  mr_status backward() {
    return mr_flash_backward(device.get(), &c.problem, c.q.tensor, c.k.tensor, c.v.tensor, r.out.tensor,
                             r.lse.data(), &gradients, workspace->data(), bytes, nullptr);
  }
  // Nothing was written.
  void TearDown() override {
    for (const FlashArray* x : {&r.out, &r.d_q, &r.d_k, &r.d_v}) {
      for (const uint8_t byte : x->bytes()) ASSERT_EQ(byte, 0xff);
    }
    for (const float x : r.lse) ASSERT_TRUE(std::isnan(x));
  }
  DevicePtr device = open_cpu();
  FlashCase c;
  FlashResult r;
  size_t bytes = 0;
  std::unique_ptr<Guarded> workspace;
  mr_flash_gradients gradients{};
};

TEST_F(Refusals, OfSizesNameTheField) {
  const auto refused = [&](auto& field, auto value, mr_status status, const char* word) {
    const auto kept = field;
    field = value;
    EXPECT_REFUSED(forward(), status, word);
    EXPECT_REFUSED(backward(), status, word);
    field = kept;
  };
  mr_flash_problem& p = c.problem;
  refused(p.batch, -1, MR_ERROR_INVALID, "batch");
  refused(p.heads, 0, MR_ERROR_INVALID, "heads");
  refused(p.kv_heads, 3, MR_ERROR_INVALID, "kv_heads");
  refused(p.head_dim, 12, MR_ERROR_UNSUPPORTED, "head_dim");
  refused(p.value_dim, 264, MR_ERROR_UNSUPPORTED, "value_dim");
  refused(p.max_q, -1, MR_ERROR_INVALID, "max_q");
  refused(p.max_k, -1, MR_ERROR_INVALID, "max_k");
  refused(p.type, MR_Q8_0, MR_ERROR_UNSUPPORTED, "type");
  refused(p.scale, std::numeric_limits<float>::infinity(), MR_ERROR_INVALID, "scale");
  refused(p.softcap, -1.0f, MR_ERROR_INVALID, "softcap");
  const int32_t starts[] = {0, 5, 10}, backwards[] = {0, 5, 4}, late[] = {1, 5, 7};
  refused(p.cu_q, starts, MR_ERROR_INVALID, "cu_k");
  p.cu_k = starts;
  refused(p.cu_q, backwards, MR_ERROR_INVALID, "cu_q");
  refused(p.cu_q, late, MR_ERROR_INVALID, "cu_q[0]");
  p.cu_k = nullptr;
  const float scale = 1.0f;
  refused(p.k_scales, &scale, MR_ERROR_INVALID, "k_scales");
  refused(p.k_lengths, starts, MR_ERROR_INVALID, "k_lengths");
}

TEST_F(Refusals, OfTensorsNameTheTensor) {
  const auto refused = [&](mr_flash_tensor& t, const char* word, bool in_forward) {
    const mr_flash_tensor kept = t;
    t.data = nullptr;
    if (in_forward) {
      EXPECT_REFUSED(forward(), MR_ERROR_INVALID, word);
    }
    EXPECT_REFUSED(backward(), MR_ERROR_INVALID, word);
    t.data = static_cast<uint8_t*>(kept.data) + 8;
    EXPECT_REFUSED(backward(), MR_ERROR_INVALID, word);
    t = kept;
    t.seq_stride = -16;
    EXPECT_REFUSED(backward(), MR_ERROR_INVALID, word);
    t.seq_stride = kept.seq_stride + 4;  // 8 bytes
    EXPECT_REFUSED(backward(), MR_ERROR_INVALID, word);
    t = kept;
  };
  refused(c.q.tensor, "q.", true);
  refused(c.k.tensor, "k.", true);
  refused(c.v.tensor, "v.", true);
  refused(r.out.tensor, "out.", true);
  refused(gradients.d_out, "d_out.", false);
  refused(gradients.d_q, "d_q.", false);
  refused(gradients.d_k, "d_k.", false);
  refused(gradients.d_v, "d_v.", false);
  mr_flash_tensor kept = r.out.tensor;
  r.out.tensor.seq_stride = r.out.tensor.head_stride;  // rows and heads on top of one another
  EXPECT_REFUSED(forward(), MR_ERROR_INVALID, "out: rows overlap");
  r.out.tensor = kept;
}

TEST_F(Refusals, OfCombinationsSayWhatWouldWork) {
  mr_flash_problem& p = c.problem;
  p.type = MR_F8_E4M3;
  EXPECT_REFUSED(backward(), MR_ERROR_INVALID, "q_scales");
  p.q_scales = p.k_scales = p.v_scales = c.sinks.data();
  EXPECT_REFUSED(backward(), MR_ERROR_UNSUPPORTED, "expected bf16");
  p.type = MR_BF16;
  p.q_scales = p.k_scales = p.v_scales = nullptr;
  const int32_t pages[] = {0, -1}, lengths[] = {7, 7};
  p.pages = pages;
  p.pages_stride = 1;
  p.page_tokens = 8;
  EXPECT_REFUSED(forward(), MR_ERROR_INVALID, "k_lengths");
  p.k_lengths = lengths;
  EXPECT_REFUSED(forward(), MR_ERROR_INVALID, "page_tokens");
  p.page_tokens = 16;
  EXPECT_REFUSED(forward(), MR_ERROR_INVALID, "problem.pages");
  EXPECT_REFUSED(backward(), MR_ERROR_UNSUPPORTED, "cu_k");
  p.pages = nullptr;
  p.k_lengths = nullptr;
  const int32_t starts[] = {0, 1, 2, 3, 4}, columns[] = {0, 0, 1, 0};
  mr_flash_blocks blocks{32, 64, 1, starts, columns};
  p.blocks = &blocks;
  EXPECT_REFUSED(forward(), MR_ERROR_UNSUPPORTED, "block_q");
  blocks.block_q = 64;
  blocks.q_blocks = 2;
  EXPECT_REFUSED(forward(), MR_ERROR_INVALID, "q_blocks");
  blocks.q_blocks = 1;
  EXPECT_REFUSED(forward(), MR_ERROR_INVALID, "columns[2]");
  p.blocks = nullptr;
  gradients.d_sinks = r.d_sinks.data();
  EXPECT_REFUSED(backward(), MR_ERROR_INVALID, "d_sinks");
  gradients.d_sinks = nullptr;
  gradients.deterministic = 2;
  EXPECT_REFUSED(backward(), MR_ERROR_INVALID, "deterministic");
}

TEST_F(Refusals, OfAWorkspaceSayTheSizeNeeded) {
  size_t needed = bytes;
  bytes -= 1;
  EXPECT_REFUSED(backward(), MR_ERROR_NO_MEMORY, std::to_string(needed));
  ASSERT_EQ(mr_flash_forward_workspace_bytes(device.get(), &c.problem, &needed), MR_OK);
  bytes = needed - 1;
  EXPECT_REFUSED(forward(), MR_ERROR_NO_MEMORY, std::to_string(needed));
  EXPECT_REFUSED(mr_flash_forward_workspace_bytes(device.get(), nullptr, &needed), MR_ERROR_INVALID,
                 "problem");
  EXPECT_REFUSED(mr_flash_forward_workspace_bytes(nullptr, &c.problem, &needed), MR_ERROR_INVALID, "device");
  EXPECT_REFUSED(mr_flash_backward_workspace_bytes(device.get(), &c.problem, 1, nullptr), MR_ERROR_INVALID,
                 "bytes");
  EXPECT_REFUSED(mr_flash_quantize(device.get(), nullptr, nullptr), MR_ERROR_INVALID, "args");
}

}  // namespace
}  // namespace millrace::api_test
