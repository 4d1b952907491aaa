// Attention in parts by the C API, of every kernel table: any split of the keys into nodes, merged in any
// order, has the bits of mr_flash_forward; gradients those of mr_flash_backward; merging against double; what
// bad input gets.
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/api/api_test_support.h"
#include "kernels/reference/naive_flash_attention.h"

namespace millrace::api_test {
namespace {

constexpr int32_t kChunk = MR_FLASH_CHUNK;

struct PartShape {
  int32_t heads = 4, kv_heads = 2, head_dim = 16, value_dim = 24, q_len = 0, k_len = 0, left = -1, right = 0;
  bool sinks = false;
  float softcap = 0;
};

struct PartCase {
  explicit PartCase(const PartShape& of) : shape(of) {
    std::mt19937 random(5);
    q = random_floats(random, of.q_len * of.heads * of.head_dim);
    k = random_floats(random, of.k_len * of.kv_heads * of.head_dim);
    v = random_floats(random, of.k_len * of.kv_heads * of.value_dim);
    d_out = random_floats(random, of.q_len * of.heads * of.value_dim);
    sinks = random_floats(random, of.heads);
  }
  mr_flash_problem problem(int32_t queries, int32_t keys, bool with_sinks) const {
    mr_flash_problem p{};
    p.type = MR_F32;
    p.batch = 1;
    p.heads = shape.heads;
    p.kv_heads = shape.kv_heads;
    p.head_dim = shape.head_dim;
    p.value_dim = shape.value_dim;
    p.max_q = queries;
    p.max_k = keys;
    p.softcap = shape.softcap;
    p.window_left = shape.left;
    p.window_right = shape.right;
    p.sinks = with_sinks && shape.sinks ? sinks.data() : nullptr;
    return p;
  }
  int32_t q_first() const { return shape.k_len - shape.q_len; }
  PartShape shape;
  std::vector<float> q, k, v, d_out, sinks;
};

mr_flash_tensor rows_at(const std::vector<float>& data, int32_t heads, int32_t dim, int64_t row = 0) {
  const int64_t each = int64_t{heads} * dim;
  return {const_cast<float*>(data.data()) + row * each, 0, each, dim};
}

struct PartResult {
  std::vector<float> out, lse, d_q, d_k, d_v;
};

std::vector<std::byte> scratch_for(mr_device* device, const mr_flash_problem& p, bool backward, void*& at,
                                   size_t& bytes) {
  const mr_status status = backward ? mr_flash_backward_workspace_bytes(device, &p, 1, &bytes)
                                    : mr_flash_forward_workspace_bytes(device, &p, &bytes);
  EXPECT_EQ(status, MR_OK) << mr_last_error();
  std::vector<std::byte> memory(bytes + 256);
  at = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  return memory;
}

PartResult whole(mr_device* device, const PartCase& c) {
  const PartShape& s = c.shape;
  const mr_flash_problem p = c.problem(s.q_len, s.k_len, true);
  PartResult r{c.d_out, std::vector<float>(static_cast<size_t>(s.q_len * s.heads)), c.q, c.k, c.v};
  void* at = nullptr;
  size_t bytes = 0;
  const auto memory = scratch_for(device, p, true, at, bytes);
  const mr_flash_tensor q = rows_at(c.q, s.heads, s.head_dim), k = rows_at(c.k, s.kv_heads, s.head_dim),
                        v = rows_at(c.v, s.kv_heads, s.value_dim), out = rows_at(r.out, s.heads, s.value_dim);
  EXPECT_EQ(mr_flash_forward(device, &p, q, k, v, out, r.lse.data(), at, bytes, nullptr), MR_OK)
      << mr_last_error();
  const mr_flash_gradients g{rows_at(c.d_out, s.heads, s.value_dim),
                             rows_at(r.d_q, s.heads, s.head_dim),
                             rows_at(r.d_k, s.kv_heads, s.head_dim),
                             rows_at(r.d_v, s.kv_heads, s.value_dim),
                             nullptr,
                             1};
  EXPECT_EQ(mr_flash_backward(device, &p, q, k, v, out, r.lse.data(), &g, at, bytes, nullptr), MR_OK)
      << mr_last_error();
  return r;
}

// A partial of all queries over chunks [first, last): as one call, or of its halves. f(first, last) computes
// a leaf.
struct Piece {
  std::vector<float> out, lse;
};
using Leaf = std::function<Piece(int32_t, int32_t)>;
Piece part_of(mr_device* device, const PartCase& c, int32_t first, int32_t last, std::mt19937& random,
              const Leaf& leaf) {
  const int32_t chunks = (c.shape.k_len + kChunk - 1) / kChunk;
  if (last - first == 1 || (last <= chunks && random() % 3 == 0)) return leaf(first, std::min(last, chunks));
  const int32_t middle = (first + last) / 2;
  if (middle >= chunks) return part_of(device, c, first, middle, random, leaf);
  Piece lower, upper;
  if (random() % 2 == 0) {  // whichever comes first
    lower = part_of(device, c, first, middle, random, leaf);
    upper = part_of(device, c, middle, last, random, leaf);
  } else {
    upper = part_of(device, c, middle, last, random, leaf);
    lower = part_of(device, c, first, middle, random, leaf);
  }
  const bool with_lse = !lower.lse.empty();
  const mr_flash_merge_args args{c.shape.q_len,
                                 c.shape.heads,
                                 with_lse ? c.shape.value_dim : c.shape.head_dim,
                                 lower.out.data(),
                                 with_lse ? lower.lse.data() : nullptr,
                                 upper.out.data(),
                                 with_lse ? upper.lse.data() : nullptr};
  EXPECT_EQ(mr_flash_merge(device, &args, nullptr), MR_OK) << mr_last_error();
  return lower;
}

int32_t tree_size(int32_t length) {
  int32_t size = 1;
  while (size * kChunk < length) size *= 2;
  return size;
}

PartResult in_parts(mr_device* device, const PartCase& c, unsigned seed) {
  const PartShape& s = c.shape;
  std::mt19937 random(seed);
  const int32_t q_first = c.q_first();
  const auto floats = [](int64_t a, int64_t b, int64_t d) {
    return std::vector<float>(static_cast<size_t>(a * b * d));
  };
  PartResult r{floats(s.q_len, s.heads, s.value_dim), floats(s.q_len, s.heads, 1),
               floats(s.q_len, s.heads, s.head_dim), floats(s.k_len, s.kv_heads, s.head_dim),
               floats(s.k_len, s.kv_heads, s.value_dim)};
  const Leaf forward = [&](int32_t first, int32_t last) {
    const int32_t from = first * kChunk, keys = std::min(last * kChunk, s.k_len) - from;
    Piece piece{floats(s.q_len, s.heads, s.value_dim), floats(s.q_len, s.heads, 1)};
    const mr_flash_problem p = c.problem(s.q_len, keys, false);
    const mr_flash_span span{&q_first, &from};
    void* at = nullptr;
    size_t bytes = 0;
    const auto memory = scratch_for(device, p, false, at, bytes);
    EXPECT_EQ(mr_flash_partial_forward(
                  device, &p, &span, rows_at(c.q, s.heads, s.head_dim),
                  rows_at(c.k, s.kv_heads, s.head_dim, from), rows_at(c.v, s.kv_heads, s.value_dim, from),
                  rows_at(piece.out, s.heads, s.value_dim), piece.lse.data(), at, bytes, nullptr),
              MR_OK)
        << mr_last_error();
    return piece;
  };
  const Piece root = part_of(device, c, 0, tree_size(s.k_len), random, forward);
  const mr_flash_finish_args finish{MR_F32,
                                    s.q_len,
                                    s.heads,
                                    s.value_dim,
                                    root.out.data(),
                                    root.lse.data(),
                                    s.sinks ? c.sinks.data() : nullptr,
                                    rows_at(r.out, s.heads, s.value_dim),
                                    r.lse.data()};
  EXPECT_EQ(mr_flash_finish(device, &finish, nullptr), MR_OK) << mr_last_error();
  if (s.q_len != s.k_len) return r;
  // Backward: dQ over parts of the keys; dK and dV of all queries at once.
  std::vector<float> delta(r.lse.size());
  const mr_flash_problem all = c.problem(s.q_len, s.k_len, false);
  void* at = nullptr;
  size_t bytes = 0;
  const auto memory = scratch_for(device, all, false, at, bytes);
  EXPECT_EQ(mr_flash_delta(device, &all, rows_at(r.out, s.heads, s.value_dim),
                           rows_at(c.d_out, s.heads, s.value_dim), delta.data(), at, bytes, nullptr),
            MR_OK)
      << mr_last_error();
  const Leaf backward = [&](int32_t first, int32_t last) {
    const int32_t from = first * kChunk, keys = std::min(last * kChunk, s.k_len) - from, zero = 0;
    Piece piece{floats(s.q_len, s.heads, s.head_dim), {}};
    const mr_flash_problem p = c.problem(s.q_len, keys, false);
    const mr_flash_span span{&zero, &from};
    const mr_flash_partial_gradients g{rows_at(c.d_out, s.heads, s.value_dim),
                                       r.lse.data(),
                                       delta.data(),
                                       rows_at(piece.out, s.heads, s.head_dim),
                                       rows_at(r.d_k, s.kv_heads, s.head_dim, from),
                                       rows_at(r.d_v, s.kv_heads, s.value_dim, from)};
    EXPECT_EQ(mr_flash_partial_backward(device, &p, &span, rows_at(c.q, s.heads, s.head_dim),
                                        rows_at(c.k, s.kv_heads, s.head_dim, from),
                                        rows_at(c.v, s.kv_heads, s.value_dim, from), &g, at, bytes, nullptr),
              MR_OK)
        << mr_last_error();
    return piece;
  };
  r.d_q = part_of(device, c, 0, tree_size(s.k_len), random, backward).out;
  return r;
}

void expect_equal(const std::vector<float>& a, const std::vector<float>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
}

TEST(FlashPartial, AnySplitHasTheBitsOfTheWholeOnEveryTable) {
  std::vector<PartShape> shapes(4);
  shapes[0].q_len = shapes[0].k_len = 1100, shapes[0].sinks = true, shapes[0].heads = shapes[0].kv_heads = 1;
  shapes[1].heads = 2, shapes[1].q_len = shapes[1].k_len = 600, shapes[1].left = 280, shapes[1].right = 3,
  shapes[1].softcap = 4;
  shapes[2].q_len = 3, shapes[2].k_len = 1800, shapes[2].sinks = true, shapes[2].heads = 6;
  shapes[3].q_len = shapes[3].k_len = 257, shapes[3].left = 0;
  for (const PartShape& shape : shapes) {
    const PartCase c(shape);
    for (const std::string& isa : isas()) {
      const DevicePtr device = open_cpu(isa.c_str(), 2);
      const PartResult want = whole(device.get(), c);
      for (unsigned seed = 0; seed < 2; ++seed) {
        const PartResult got = in_parts(device.get(), c, seed);
        expect_equal(got.out, want.out, "out");
        expect_equal(got.lse, want.lse, "lse");
        if (shape.q_len == shape.k_len) {
          expect_equal(got.d_q, want.d_q, "d_q");
          expect_equal(got.d_k, want.d_k, "d_k");
          expect_equal(got.d_v, want.d_v, "d_v");
        }
        ASSERT_FALSE(HasFailure()) << isa << ", " << shape.q_len << " x " << shape.k_len << ", split "
                                   << seed;
      }
    }
  }
}

TEST(FlashPartial, MergingIsTheReferenceInDouble) {
  constexpr int32_t kRows = 37, kHeads = 3, kDim = 24;
  const float never = -std::numeric_limits<float>::infinity();
  std::mt19937 random(9);
  const std::vector<float> a = random_floats(random, kRows * kHeads * kDim),
                           b = random_floats(random, kRows * kHeads * kDim);
  std::vector<float> lse_a = random_floats(random, kRows * kHeads, 20),
                     lse_b = random_floats(random, kRows * kHeads, 20);
  lse_a[1] = lse_b[2] = lse_a[3] = lse_b[3] = never;
  for (const std::string& isa : isas()) {
    std::vector<float> out = a, lse = lse_a;
    for (int32_t d = 0; d < kDim; ++d) out[1 * kHeads * kDim + d] = 0.0f;  // rows that have seen nothing
    std::vector<float> other = b;
    for (int32_t d = 0; d < kDim; ++d) other[2 * kHeads * kDim + d] = other[3 * kHeads * kDim + d] = 0.0f;
    for (int32_t d = 0; d < kDim; ++d) out[3 * kHeads * kDim + d] = 0.0f;
    const std::vector<float> before = out;
    const DevicePtr device = open_cpu(isa.c_str());
    const mr_flash_merge_args args{kRows, kHeads, kDim, out.data(), lse.data(), other.data(), lse_b.data()};
    ASSERT_EQ(mr_flash_merge(device.get(), &args, nullptr), MR_OK) << mr_last_error();
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t h = 0; h < kHeads; ++h) {
        const auto at = static_cast<size_t>((row * kHeads + h) * kDim);
        const auto of = static_cast<size_t>(h * kRows + row);
        std::vector<double> want(before.begin() + at, before.begin() + at + kDim);
        double want_lse = lse_a[of];
        reference::flash_merge(want, want_lse, {other.begin() + at, other.begin() + at + kDim}, lse_b[of]);
        if (lse[of] != want_lse) {
          EXPECT_NEAR(lse[of], want_lse, 4e-6) << row;
        }
        for (size_t d = 0; d < kDim; ++d) EXPECT_NEAR(out[at + d], want[d], 2e-6) << row;
      }
    }
    EXPECT_EQ(lse[3], never);
    EXPECT_EQ(std::memcmp(&out[2 * kHeads * kDim], &before[2 * kHeads * kDim], kDim * sizeof(float)), 0);
  }
}

TEST(FlashPartial, BadInputIsRefusedByName) {
  const DevicePtr device = open_cpu();
  PartShape shape;
  shape.q_len = shape.k_len = 300;
  const PartCase c(shape);
  mr_flash_problem p = c.problem(300, 300, false);
  void* at = nullptr;
  size_t bytes = 0;
  const auto memory = scratch_for(device.get(), p, false, at, bytes);
  std::vector<float> out(c.d_out.size()), lse(300 * 4);
  const auto forward = [&](const mr_flash_problem& problem, const mr_flash_span* span) {
    return mr_flash_partial_forward(device.get(), &problem, span, rows_at(c.q, 4, 16), rows_at(c.k, 2, 16),
                                    rows_at(c.v, 2, 24), rows_at(out, 4, 24), lse.data(), at, bytes, nullptr);
  };
  int32_t zero = 0, odd = 100, below = -1;
  const mr_flash_span good{&zero, &zero}, shifted{&zero, &odd}, negative{&below, &zero},
      absent{nullptr, &zero};
  EXPECT_EQ(forward(p, &good), MR_OK) << mr_last_error();
  EXPECT_REFUSED(forward(p, nullptr), MR_ERROR_INVALID, "span");
  EXPECT_REFUSED(forward(p, &shifted), MR_ERROR_INVALID, "span.k_first[0] is 100");
  EXPECT_REFUSED(forward(p, &negative), MR_ERROR_INVALID, "span.q_first[0] is -1");
  EXPECT_REFUSED(forward(p, &absent), MR_ERROR_INVALID, "span.q_first");
  p.sinks = c.sinks.data();
  EXPECT_REFUSED(forward(p, &good), MR_ERROR_INVALID, "problem.sinks");
  p.sinks = nullptr;
  const mr_flash_partial_gradients g{rows_at(c.d_out, 4, 24), lse.data(),          lse.data(),
                                     rows_at(out, 4, 16),     rows_at(out, 2, 16), rows_at(out, 2, 24)};
  const mr_flash_span odd_queries{&odd, &zero};
  EXPECT_REFUSED(mr_flash_partial_backward(device.get(), &p, &odd_queries, rows_at(c.q, 4, 16),
                                           rows_at(c.k, 2, 16), rows_at(c.v, 2, 24), &g, at, bytes, nullptr),
                 MR_ERROR_INVALID, "span.q_first[0] is 100");
  mr_flash_merge_args merge{300, 4, 24, out.data(), lse.data(), out.data(), nullptr};
  EXPECT_REFUSED(mr_flash_merge(device.get(), &merge, nullptr), MR_ERROR_INVALID, "args.other_lse is NULL");
  merge.other_lse = lse.data();
  EXPECT_REFUSED(mr_flash_merge(device.get(), &merge, nullptr), MR_ERROR_INVALID,
                 "args.other_out is args.out");
  merge.dim = 12;
  EXPECT_REFUSED(mr_flash_merge(device.get(), &merge, nullptr), MR_ERROR_UNSUPPORTED, "args.dim is 12");
  mr_flash_finish_args finish{MR_F32, 300, 4, 24, out.data(), nullptr, c.sinks.data(), rows_at(out, 4, 24),
                              nullptr};
  EXPECT_REFUSED(mr_flash_finish(device.get(), &finish, nullptr), MR_ERROR_INVALID, "args.sinks is set");
  finish.type = MR_F8_E4M3;
  EXPECT_REFUSED(mr_flash_finish(device.get(), &finish, nullptr), MR_ERROR_UNSUPPORTED, "args.type");
  double sum = 0;
  EXPECT_REFUSED(mr_flash_sink_gradient(0, lse.data(), lse.data(), 257, &sum), MR_ERROR_INVALID,
                 "rows is 257");
}

}  // namespace
}  // namespace millrace::api_test
