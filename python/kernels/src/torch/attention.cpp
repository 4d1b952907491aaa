// torch.ops.millrace.attention and its kin: dense [batch, seq, heads, dim] by any strides, ragged [rows,
// heads, dim] with cu_q and cu_k, paged keys, block-sparse; forward with log-sum-exp, deterministic backward.
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

#include "tensors.h"

namespace millrace::torch_ops {
namespace {

using bindings::check;

constexpr int64_t kRowBytes = 16;  // the C API's alignment of data and rows
constexpr int64_t kPositionsPerScale = 128;

// What a problem is beside its tensors; `words` keeps what had to be copied.
struct Options {
  MaybeTensor sinks, cu_q, cu_k, block_starts, block_columns;
  int64_t max_q, max_k, block_q, block_k;
  double scale, softcap;
  int64_t window_left, window_right;
};

struct Problem {
  mr_flash_problem c{};
  mr_flash_blocks blocks{};
  MaybeTensor words[8];
};

bool evenly_aligned(const Tensor& x, int64_t element_bytes) {
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % kRowBytes != 0) return false;
  const Shape s(x);
  const int64_t cols = s.sizes[s.dims - 1];
  if (cols > 1 && s.strides[s.dims - 1] != 1) return false;
  for (int64_t d = 0; d + 1 < s.dims; ++d) {
    if (s.sizes[d] > 1 && (s.strides[d] < cols || s.strides[d] * element_bytes % kRowBytes != 0))
      return false;
  }
  return true;
}

// An aligned copy where rows do not lie as the library wants them.
Tensor aligned(const Tensor& x) {
  const auto bytes = static_cast<int64_t>(x.element_size());
  if (x.numel() == 0 || evenly_aligned(x, bytes)) return x;
  Tensor copy = empty(sizes_of(x), x);
  return torch::stable::copy_(copy, x);
}

mr_flash_tensor flash(const Tensor& x) {
  const Shape s(x);
  return {x.data_ptr(), s.dims == 4 ? s.strides[0] : 0, s.strides[s.dims - 3], s.strides[s.dims - 2]};
}

void require_dims(const Tensor& x, int64_t dims, const char* op, const char* name) {
  if (x.dim() != dims) {
    refuse(op, std::string(name) + " has shape " + shape_text(x) + ", expected " + std::to_string(dims) +
                   " dimensions: " + (dims == 4 ? "[batch, seq, heads, dim]" : "[rows, heads, dim]"));
  }
}

int32_t narrow_int(int64_t value, const char* op, const char* name) {
  if (value < INT32_MIN || value > INT32_MAX) refuse(op, std::string(name) + " is " + std::to_string(value));
  return static_cast<int32_t>(value);
}

int32_t window_side(int64_t side) {
  return side < 0 ? -1 : static_cast<int32_t>(std::min<int64_t>(side, INT32_MAX));
}

void set_blocks(Problem& p, const Options& o, const Tensor& q, const char* op) {
  if (!o.block_starts.has_value() && !o.block_columns.has_value()) return;
  if (!o.block_starts.has_value() || !o.block_columns.has_value()) {
    refuse(op, "block_starts and block_columns go together, one is None");
  }
  if (o.block_q <= 0) refuse(op, "block_q is " + std::to_string(o.block_q) + ", expected 64 or 128");
  const int64_t q_blocks = (int64_t{p.c.max_q} + o.block_q - 1) / o.block_q;
  p.blocks.block_q = narrow_int(o.block_q, op, "block_q");
  p.blocks.block_k = narrow_int(o.block_k, op, "block_k");
  p.blocks.q_blocks = narrow_int(q_blocks, op, "q_blocks");
  p.blocks.row_starts =
      int32_of(*o.block_starts, p.c.batch * p.c.heads * q_blocks + 1, q, p.words[0], op, "block_starts");
  p.blocks.columns = int32_of(*o.block_columns, o.block_columns->numel(), q, p.words[1], op, "block_columns");
  static const int32_t kNoColumns = 0;
  if (p.blocks.columns == nullptr) p.blocks.columns = &kNoColumns;  // an empty tensor has no address
  p.c.blocks = &p.blocks;
}

void set_common(Problem& p, const Options& o, const Tensor& q, const Tensor& v, const char* op) {
  p.c.type = type_of(q, op, "q");
  p.c.heads = narrow_int(q.size(q.dim() - 2), op, "heads");
  p.c.head_dim = narrow_int(q.size(q.dim() - 1), op, "head_dim");
  p.c.kv_heads = narrow_int(v.size(v.dim() - 2), op, "kv_heads");
  p.c.value_dim = narrow_int(v.size(v.dim() - 1), op, "value_dim");
  p.c.scale = static_cast<float>(o.scale);
  p.c.softcap = static_cast<float>(o.softcap);
  p.c.window_left = window_side(o.window_left);
  p.c.window_right = window_side(o.window_right);
  if (o.sinks.has_value()) p.c.sinks = float32_of(*o.sinks, p.c.heads, q, p.words[2], op, "sinks");
}

void require_same_type(const Tensor& x, const Tensor& q, const char* op, const char* name) {
  require_same_device(x, q, op, name);
  if (!same_type(x, q)) refuse(op, std::string(name) + " has another dtype than q");
}

// On a CPU the library reads the lists before it computes; that they do not lead outside the tensors is
// checked here.
void check_last(const int32_t* starts, int64_t count, int64_t rows, const Tensor& q, const char* op,
                const char* name) {
  if (q.is_cpu() && starts[count] > rows) {
    refuse(op, std::string(name) + " ends at " + std::to_string(starts[count]) + ", there are " +
                   std::to_string(rows) + " rows");
  }
}

// The most rows of a sequence, where that was not told and the list lies in this memory.
int64_t longest(int64_t told, const int32_t* starts, int64_t count, const Tensor& q) {
  if (told != 0 || !q.is_cpu()) return told;
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, int64_t{starts[i + 1]} - starts[i]);
  return most;
}

void set_ragged(Problem& p, const Options& o, const Tensor& q, const Tensor& k, const char* op) {
  const int64_t batch = o.cu_q->numel() - 1;
  if (batch < 0) refuse(op, "cu_q is empty, expected [batch + 1]");
  p.c.batch = narrow_int(batch, op, "batch");
  p.c.cu_q = int32_of(*o.cu_q, batch + 1, q, p.words[3], op, "cu_q");
  p.c.cu_k = int32_of(*o.cu_k, batch + 1, q, p.words[4], op, "cu_k");
  p.c.max_q = narrow_int(longest(o.max_q, p.c.cu_q, batch, q), op, "max_q");
  p.c.max_k = narrow_int(longest(o.max_k, p.c.cu_k, batch, q), op, "max_k");
  check_last(p.c.cu_q, batch, q.size(0), q, op, "cu_q");
  check_last(p.c.cu_k, batch, k.size(0), q, op, "cu_k");
}

// Of q, k, v as given; shapes are checked against one another.
void describe(Problem& p, const Options& o, const Tensor& q, const Tensor& k, const Tensor& v,
              const char* op) {
  if (o.cu_q.has_value() != o.cu_k.has_value()) refuse(op, "cu_q and cu_k go together, one is None");
  const bool ragged = o.cu_q.has_value();
  const int64_t dims = ragged ? 3 : 4;
  require_dims(q, dims, op, "q");
  require_dims(k, dims, op, "k");
  require_dims(v, dims, op, "v");
  require_same_type(k, q, op, "k");
  require_same_type(v, q, op, "v");
  if (ragged) {
    require_shape(k, {k.size(0), v.size(1), q.size(2)}, op, "k");
    require_shape(v, {k.size(0), v.size(1), v.size(2)}, op, "v");
  } else {
    require_shape(k, {q.size(0), k.size(1), v.size(2), q.size(3)}, op, "k");
    require_shape(v, {q.size(0), k.size(1), v.size(2), v.size(3)}, op, "v");
  }
  set_common(p, o, q, v, op);
  if (ragged) {
    set_ragged(p, o, q, k, op);
  } else {
    p.c.batch = narrow_int(q.size(0), op, "batch");
    p.c.max_q = narrow_int(q.size(1), op, "q's length");
    p.c.max_k = narrow_int(k.size(1), op, "k's length");
  }
  set_blocks(p, o, q, op);
}

std::vector<int64_t> out_sizes(const Tensor& q, int64_t value_dim) {
  std::vector<int64_t> sizes = sizes_of(q);
  sizes.back() = value_dim;
  return sizes;
}

std::vector<int64_t> lse_sizes(const Tensor& q) {
  if (q.dim() == 3) return {q.size(1), q.size(0)};
  return {q.size(0), q.size(2), q.size(1)};
}

// lse: left as it is where it is null, and then not computed.
Tensor run_forward(const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, Tensor* lse) {
  const Tensor from_q = aligned(q), from_k = aligned(k), from_v = aligned(v);
  const std::vector<int64_t> sizes = out_sizes(q, p.c.value_dim);
  Tensor out = p.c.type == MR_F8_E4M3 ? empty(sizes, ScalarType::BFloat16, q) : empty(sizes, q);
  if (lse != nullptr) *lse = empty(lse_sizes(q), ScalarType::Float, q);
  bindings::DeviceLease device = lease(q);
  size_t bytes = 0;
  check(mr_flash_forward_workspace_bytes(device.get(), &p.c, &bytes));
  const Workspace workspace(bytes, q, device);
  check(mr_flash_forward(device.get(), &p.c, flash(from_q), flash(from_k), flash(from_v), flash(out),
                         lse == nullptr ? nullptr : static_cast<float*>(lse->data_ptr()), workspace.data(),
                         bytes, device.stream()));
  return out;
}

Tensor attention_with(const Options& options, const Tensor& q, const Tensor& k, const Tensor& v, Tensor* lse,
                      const char* op) {
  Problem p;
  describe(p, options, q, k, v, op);
  if (p.c.type == MR_F8_E4M3) refuse(op, "q is float8_e4m3fn: attention_fp8 takes its scales");
  return run_forward(p, q, k, v, lse);
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, MaybeTensor sinks,
                                     MaybeTensor cu_q, MaybeTensor cu_k, int64_t max_q, int64_t max_k,
                                     MaybeTensor block_starts, MaybeTensor block_columns, int64_t block_q,
                                     int64_t block_k, double scale, double softcap, int64_t window_left,
                                     int64_t window_right) {
  Tensor lse;
  Tensor out = attention_with({sinks, cu_q, cu_k, block_starts, block_columns, max_q, max_k, block_q, block_k,
                               scale, softcap, window_left, window_right},
                              q, k, v, &lse, "attention");
  return {out, lse};
}

// Where no gradient is wanted: an output less.
Tensor attention_plain(const Tensor& q, const Tensor& k, const Tensor& v, MaybeTensor sinks, MaybeTensor cu_q,
                       MaybeTensor cu_k, int64_t max_q, int64_t max_k, MaybeTensor block_starts,
                       MaybeTensor block_columns, int64_t block_q, int64_t block_k, double scale,
                       double softcap, int64_t window_left, int64_t window_right) {
  return attention_with({sinks, cu_q, cu_k, block_starts, block_columns, max_q, max_k, block_q, block_k,
                         scale, softcap, window_left, window_right},
                        q, k, v, nullptr, "attention_plain");
}

struct DenseMask {
  bool causal;
  double scale, softcap;
  int64_t left, right;
};

// Dense rows alone: torch takes half as long over eight arguments and one result as over sixteen
// and two, and an argument that has its default and is not told takes next to nothing: the likeliest are
// first. heads_first: all are [batch, heads, seq, dim], torch's order, as its own attention has them.
Tensor dense_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& sinks,
                     const DenseMask& mask, bool heads_first, Tensor* lse, const char* op) {
  require_dims(q, 4, op, "q");
  require_dims(k, 4, op, "k");
  require_dims(v, 4, op, "v");
  require_same_type(k, q, op, "k");
  require_same_type(v, q, op, "v");
  const Shape sq(q), sk(k), sv(v);
  const int64_t seq = heads_first ? 2 : 1, head = heads_first ? 1 : 2;
  if (sk.sizes[0] != sq.sizes[0] || sk.sizes[3] != sq.sizes[3])
    refuse(op, "k has shape " + shape_text(k) + ", q " + shape_text(q) + ": batch and dim differ");
  if (!std::equal(sv.sizes, sv.sizes + 3, sk.sizes))
    refuse(op, "v has shape " + shape_text(v) + ", k " + shape_text(k) +
                   ": more than the last dimension differs");
  Problem p;
  p.c.type = type_of(q, op, "q");
  if (p.c.type == MR_F8_E4M3) refuse(op, "q is float8_e4m3fn: attention_fp8 takes its scales");
  p.c.batch = narrow_int(sq.sizes[0], op, "batch");
  p.c.max_q = narrow_int(sq.sizes[seq], op, "q's length");
  p.c.max_k = narrow_int(sk.sizes[seq], op, "k's length");
  p.c.heads = narrow_int(sq.sizes[head], op, "heads");
  p.c.kv_heads = narrow_int(sk.sizes[head], op, "kv_heads");
  p.c.head_dim = narrow_int(sq.sizes[3], op, "head_dim");
  p.c.value_dim = narrow_int(sv.sizes[3], op, "value_dim");
  p.c.scale = static_cast<float>(mask.scale);
  p.c.softcap = static_cast<float>(mask.softcap);
  p.c.window_left = window_side(mask.left);
  p.c.window_right = mask.causal ? 0 : window_side(mask.right);
  if (sinks.has_value()) p.c.sinks = float32_of(*sinks, p.c.heads, q, p.words[0], op, "sinks");
  const Tensor from_q = aligned(q), from_k = aligned(k), from_v = aligned(v);
  if (lse != nullptr) *lse = empty({sq.sizes[0], sq.sizes[head], sq.sizes[seq]}, ScalarType::Float, q);
  Tensor out = empty({sq.sizes[0], sq.sizes[1], sq.sizes[2], sv.sizes[3]}, q);
  const auto view = [heads_first](const Tensor& x) {
    mr_flash_tensor t = flash(x);
    if (heads_first) std::swap(t.seq_stride, t.head_stride);
    return t;
  };
  bindings::DeviceLease device = lease(q);
  size_t bytes = 0;
  check(mr_flash_forward_workspace_bytes(device.get(), &p.c, &bytes));
  const Workspace workspace(bytes, q, device);
  check(mr_flash_forward(device.get(), &p.c, view(from_q), view(from_k), view(from_v), view(out),
                         lse == nullptr ? nullptr : static_cast<float*>(lse->data_ptr()), workspace.data(),
                         bytes, device.stream()));
  return out;
}

Tensor attention_dense(const Tensor& q, const Tensor& k, const Tensor& v, MaybeTensor sinks, bool heads_first,
                       bool causal, double scale, double softcap, int64_t window_left, int64_t window_right) {
  return dense_forward(q, k, v, sinks, {causal, scale, softcap, window_left, window_right}, heads_first,
                       nullptr, "attention_dense");
}

// -> out, lse [batch, heads, seq]: what a gradient is recorded with.
std::tuple<Tensor, Tensor> attention_dense_lse(const Tensor& q, const Tensor& k, const Tensor& v,
                                               MaybeTensor sinks, bool heads_first, bool causal, double scale,
                                               double softcap, int64_t window_left, int64_t window_right) {
  Tensor lse;
  Tensor out = dense_forward(q, k, v, sinks, {causal, scale, softcap, window_left, window_right}, heads_first,
                             &lse, "attention_dense_lse");
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, MaybeTensor sinks, MaybeTensor cu_q, MaybeTensor cu_k, int64_t max_q, int64_t max_k,
    MaybeTensor block_starts, MaybeTensor block_columns, int64_t block_q, int64_t block_k, double scale,
    double softcap, int64_t window_left, int64_t window_right, bool deterministic) {
  const char* op = "attention_backward";
  Problem p;
  describe(p,
           {sinks, cu_q, cu_k, block_starts, block_columns, max_q, max_k, block_q, block_k, scale, softcap,
            window_left, window_right},
           q, k, v, op);
  for (const auto& [x, name] : {std::pair{&d_out, "d_out"}, std::pair{&out, "out"}}) {
    require_same_type(*x, q, op, name);
    if (sizes_of(*x) != out_sizes(q, p.c.value_dim))
      refuse(op, std::string(name) + " has shape " + shape_text(*x));
  }
  MaybeTensor keep_lse;
  const float* lse_data =
      float32_of(lse, q.numel() / std::max<int64_t>(q.size(q.dim() - 1), 1), q, keep_lse, op, "lse");
  const Tensor from_q = aligned(q), from_k = aligned(k), from_v = aligned(v), from_out = aligned(out),
               from_d_out = aligned(d_out);
  Tensor d_q = empty(sizes_of(q), q), d_k = empty(sizes_of(k), q), d_v = empty(sizes_of(v), q);
  Tensor d_sinks = empty({sinks.has_value() ? int64_t{p.c.heads} : 0}, ScalarType::Float, q);
  const mr_flash_gradients gradients{flash(from_d_out),
                                     flash(d_q),
                                     flash(d_k),
                                     flash(d_v),
                                     sinks.has_value() ? static_cast<float*>(d_sinks.data_ptr()) : nullptr,
                                     deterministic ? 1 : 0};
  bindings::DeviceLease device = lease(q);
  size_t bytes = 0;
  check(mr_flash_backward_workspace_bytes(device.get(), &p.c, gradients.deterministic, &bytes));
  const Workspace workspace(bytes, q, device);
  check(mr_flash_backward(device.get(), &p.c, flash(from_q), flash(from_k), flash(from_v), flash(from_out),
                          lse_data, &gradients, workspace.data(), bytes, device.stream()));
  return {d_q, d_k, d_v, d_sinks};
}

std::tuple<Tensor, Tensor> attention_fp8(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& q_scales, const Tensor& k_scales,
                                         const Tensor& v_scales, MaybeTensor sinks, double scale,
                                         double softcap, int64_t window_left, int64_t window_right) {
  const char* op = "attention_fp8";
  Problem p;
  describe(p, {sinks, {}, {}, {}, {}, 0, 0, 0, 0, scale, softcap, window_left, window_right}, q, k, v, op);
  require_type(q, ScalarType::Float8_e4m3fn, op, "q", "float8_e4m3fn");
  const int64_t blocks = (k.size(1) + kPositionsPerScale - 1) / kPositionsPerScale * k.size(2) * k.size(0);
  p.c.q_scales = float32_of(q_scales, q.size(0) * q.size(1) * q.size(2), q, p.words[5], op, "q_scales");
  p.c.k_scales = float32_of(k_scales, blocks, q, p.words[6], op, "k_scales");
  p.c.v_scales = float32_of(v_scales, blocks, q, p.words[7], op, "v_scales");
  Tensor lse;
  Tensor out = run_forward(p, q, k, v, &lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_quantize(const Tensor& x, int64_t rows_per_scale, bool rotate) {
  const char* op = "attention_quantize";
  require_dims(x, 4, op, "x");
  if (rows_per_scale != 1 && rows_per_scale != kPositionsPerScale) {
    refuse(op, "rows_per_scale is " + std::to_string(rows_per_scale) + ", expected 1 (q) or 128 (k and v)");
  }
  const Tensor from = aligned(x);
  const int64_t seq = x.size(1);
  Tensor codes = empty(sizes_of(x), ScalarType::Float8_e4m3fn, x);
  Tensor scales = rows_per_scale == 1
                      ? empty({x.size(0), seq, x.size(2)}, ScalarType::Float, x)
                      : empty({x.size(0), x.size(2), (seq + kPositionsPerScale - 1) / kPositionsPerScale},
                              ScalarType::Float, x);
  const mr_flash_quantize_args args{type_of(x, op, "x"),
                                    narrow_int(x.size(0), op, "batch"),
                                    narrow_int(seq, op, "seq"),
                                    narrow_int(x.size(2), op, "heads"),
                                    narrow_int(x.size(3), op, "dim"),
                                    flash(from),
                                    flash(codes),
                                    static_cast<float*>(scales.data_ptr()),
                                    static_cast<int32_t>(rows_per_scale),
                                    rotate ? 1 : 0};
  if (x.numel() > 0) {
    bindings::DeviceLease device = lease(x);
    check(mr_flash_quantize(device.get(), &args, device.stream()));
  }
  return {codes, scales};
}

// q [batch, seq, heads, dim], or ragged [rows, heads, dim] with cu_q and max_q; k and v [pages, tokens,
// kv_heads, dim].
struct Paged {
  const Tensor &q, &k_pages, &v_pages, &page_table, &k_lengths;
};

Tensor paged_forward(const Paged& of, const Options& o, Tensor* lse, const char* op) {
  const auto& [q, k_pages, v_pages, page_table, k_lengths] = of;
  const MaybeTensor& cu_q = o.cu_q;
  require_dims(q, cu_q.has_value() ? 3 : 4, op, "q");
  require_dims(k_pages, 4, op, "k_pages");
  require_dims(v_pages, 4, op, "v_pages");
  require_same_type(k_pages, q, op, "k_pages");
  require_same_type(v_pages, q, op, "v_pages");
  require_shape(k_pages, {v_pages.size(0), v_pages.size(1), v_pages.size(2), q.size(q.dim() - 1)}, op,
                "k_pages");
  Problem p;
  set_common(p, o, q, v_pages, op);
  const int64_t batch = cu_q.has_value() ? cu_q->numel() - 1 : q.size(0);
  if (batch < 0) refuse(op, "cu_q is empty, expected [batch + 1]");
  if (page_table.dim() != 2 || page_table.size(0) != batch) {
    refuse(op, "page_table has shape " + shape_text(page_table) + ", expected [" + std::to_string(batch) +
                   ", pages]");
  }
  p.c.batch = narrow_int(batch, op, "batch");
  p.c.page_tokens = narrow_int(k_pages.size(1), op, "page_tokens");
  p.c.pages_stride = page_table.size(1);
  p.c.max_k = narrow_int(page_table.size(1) * p.c.page_tokens, op, "keys of a sequence");
  p.c.pages = int32_of(page_table, page_table.numel(), q, p.words[3], op, "page_table");
  p.c.k_lengths = int32_of(k_lengths, batch, q, p.words[4], op, "k_lengths");
  if (cu_q.has_value()) {
    p.c.cu_q = int32_of(*cu_q, batch + 1, q, p.words[5], op, "cu_q");
    check_last(p.c.cu_q, batch, q.size(0), q, op, "cu_q");
  }
  p.c.max_q = narrow_int(cu_q.has_value() ? longest(o.max_q, p.c.cu_q, batch, q) : q.size(1), op, "max_q");
  if (q.is_cpu()) {  // the library does not know how many pages the pool has
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t pages = (int64_t{p.c.k_lengths[b]} + p.c.page_tokens - 1) / p.c.page_tokens;
      for (int64_t i = 0; i < std::min(pages, p.c.pages_stride); ++i) {
        const int32_t page = p.c.pages[b * p.c.pages_stride + i];
        if (page < 0 || page >= k_pages.size(0)) {
          refuse(op, "page_table has " + std::to_string(page) + ", there are " +
                         std::to_string(k_pages.size(0)) + " pages");
        }
      }
    }
  }
  return run_forward(p, q, k_pages, v_pages, lse);
}

std::tuple<Tensor, Tensor> attention_paged(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                                           const Tensor& page_table, const Tensor& k_lengths,
                                           MaybeTensor sinks, MaybeTensor cu_q, int64_t max_q, double scale,
                                           double softcap, int64_t window_left, int64_t window_right) {
  Tensor lse;
  Tensor out =
      paged_forward({q, k_pages, v_pages, page_table, k_lengths},
                    {sinks, cu_q, {}, {}, {}, max_q, 0, 0, 0, scale, softcap, window_left, window_right},
                    &lse, "attention_paged");
  return {out, lse};
}

Tensor attention_paged_plain(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                             const Tensor& page_table, const Tensor& k_lengths, MaybeTensor sinks,
                             MaybeTensor cu_q, int64_t max_q, double scale, double softcap,
                             int64_t window_left, int64_t window_right) {
  return paged_forward({q, k_pages, v_pages, page_table, k_lengths},
                       {sinks, cu_q, {}, {}, {}, max_q, 0, 0, 0, scale, softcap, window_left, window_right},
                       nullptr, "attention_paged_plain");
}

}  // namespace

void define_attention(torch::stable::detail::StableLibrary& m) {
  m.def(
      "attention_dense(Tensor q, Tensor k, Tensor v, Tensor? sinks=None, bool heads_first=False, "
      "bool causal=False, float scale=0., float softcap=0., int window_left=-1, int window_right=-1) -> "
      "Tensor");
  m.def(
      "attention_dense_lse(Tensor q, Tensor k, Tensor v, Tensor? sinks=None, bool heads_first=False, "
      "bool causal=False, float scale=0., float softcap=0., int window_left=-1, int window_right=-1) -> "
      "(Tensor, Tensor)");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks=None, Tensor? cu_q=None, Tensor? cu_k=None, "
      "int max_q=0, int max_k=0, Tensor? block_starts=None, Tensor? block_columns=None, int block_q=0, "
      "int block_k=0, float scale=0., float softcap=0., int window_left=-1, int window_right=-1) -> "
      "(Tensor, Tensor)");
  m.def(
      "attention_plain(Tensor q, Tensor k, Tensor v, Tensor? sinks=None, Tensor? cu_q=None, "
      "Tensor? cu_k=None, int max_q=0, int max_k=0, Tensor? block_starts=None, Tensor? block_columns=None, "
      "int block_q=0, int block_k=0, float scale=0., float softcap=0., int window_left=-1, "
      "int window_right=-1) -> Tensor");
  m.def(
      "attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? "
      "sinks=None, "
      "Tensor? cu_q=None, Tensor? cu_k=None, int max_q=0, int max_k=0, Tensor? block_starts=None, "
      "Tensor? block_columns=None, int block_q=0, int block_k=0, float scale=0., float softcap=0., "
      "int window_left=-1, int window_right=-1, bool deterministic=True) -> (Tensor, Tensor, Tensor, "
      "Tensor)");
  m.def(
      "attention_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scales, Tensor k_scales, Tensor v_scales, "
      "Tensor? sinks=None, float scale=0., float softcap=0., int window_left=-1, int window_right=-1) -> "
      "(Tensor, Tensor)");
  m.def("attention_quantize(Tensor x, int rows_per_scale, bool rotate=False) -> (Tensor, Tensor)");
  m.def(
      "attention_paged(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor k_lengths, "
      "Tensor? sinks=None, Tensor? cu_q=None, int max_q=0, float scale=0., float softcap=0., int "
      "window_left=-1, "
      "int window_right=-1) -> (Tensor, Tensor)");
  m.def(
      "attention_paged_plain(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor k_lengths, "
      "Tensor? sinks=None, Tensor? cu_q=None, int max_q=0, float scale=0., float softcap=0., "
      "int window_left=-1, int window_right=-1) -> Tensor");
}

void implement_attention(torch::stable::detail::StableLibrary& m) {
  implement(m, "attention", TORCH_BOX(&attention));
  implement(m, "attention_plain", TORCH_BOX(&attention_plain));
  implement(m, "attention_dense", TORCH_BOX(&attention_dense));
  implement(m, "attention_dense_lse", TORCH_BOX(&attention_dense_lse));
  implement(m, "attention_backward", TORCH_BOX(&attention_backward));
  implement(m, "attention_fp8", TORCH_BOX(&attention_fp8));
  implement(m, "attention_quantize", TORCH_BOX(&attention_quantize));
  implement(m, "attention_paged", TORCH_BOX(&attention_paged));
  implement(m, "attention_paged_plain", TORCH_BOX(&attention_paged_plain));
}

}  // namespace millrace::torch_ops
