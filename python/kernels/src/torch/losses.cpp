// Cross-entropy of logits against classes, and of hidden states times a weight; rows of a table by token; and
// their gradients.
#include <algorithm>
#include <climits>
#include <numeric>
#include <tuple>

#include "tensors.h"

namespace millrace::torch_ops {
namespace {

using bindings::check;

int32_t ignore_of(int64_t index, const char* op) {
  if (index < INT32_MIN || index > INT32_MAX) refuse(op, "ignore_index is " + std::to_string(index));
  return static_cast<int32_t>(index);
}

// What becomes of the losses of rows. On a GPU they go out as they are, and torch reduces them.
enum class Reduction : int64_t { kNone, kMean, kSum };

Reduction reduction_of(int64_t number, const Tensor& like, const char* op) {
  if (number < 0 || number > 2)
    refuse(op, "reduction is " + std::to_string(number) + ", expected 0 (none), 1 (mean) or 2 (sum)");
  if (number != 0 && !like.is_cpu()) refuse(op, "reduction is a CPU's alone, expected 0 on a GPU");
  return static_cast<Reduction>(number);
}

int64_t count_targets(const int32_t* targets, int64_t rows, int32_t ignored) {
  return rows - std::count(targets, targets + rows, ignored);
}

// loss [rows] as one number, summed in float64; the mean of no targets is NaN, as torch's is.
Tensor reduced(const Tensor& loss, const int32_t* targets, int64_t rows, int32_t ignored, Reduction how) {
  if (how == Reduction::kNone) return loss;
  const auto* each = static_cast<const float*>(loss.data_ptr());
  double total = std::accumulate(each, each + rows, 0.0);
  if (how == Reduction::kMean) total /= static_cast<double>(count_targets(targets, rows, ignored));
  Tensor one = empty({}, ScalarType::Float, loss);
  *static_cast<float*>(one.data_ptr()) = static_cast<float>(total);
  return one;
}

// The gradients of the losses of rows: dloss itself, or its share of each in `keep`.
const float* spread(const Tensor& dloss, const int32_t* targets, int64_t rows, int32_t ignored, Reduction how,
                    const Tensor& like, MaybeTensor& keep, const char* op) {
  if (how == Reduction::kNone) return float32_of(dloss, rows, like, keep, op, "dloss");
  float share = *float32_of(dloss, 1, like, keep, op, "dloss");
  if (how == Reduction::kMean) share /= static_cast<float>(count_targets(targets, rows, ignored));
  keep = empty({rows}, ScalarType::Float, like);
  auto* const each = static_cast<float*>(keep->data_ptr());
  std::fill(each, each + rows, share);
  return each;
}

// logits [..., vocab], targets of the shape before it -> loss, of that shape or one number, and log-sum-exp
// of that shape; float32.
std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index,
                                         int64_t reduction) {
  const char* op = "cross_entropy";
  const Rows from(logits, op, "logits");
  std::vector<int64_t> sizes = sizes_of(logits);
  sizes.pop_back();
  Tensor loss = empty(sizes, ScalarType::Float, logits), lse = empty(sizes, ScalarType::Float, logits);
  MaybeTensor keep;
  const int32_t* classes = int32_of(targets, from.rows, logits, keep, op, "targets");
  const int32_t ignored = ignore_of(ignore_index, op);
  const Reduction how = reduction_of(reduction, logits, op);
  const mr_cross_entropy_args args{from.rows,
                                   from.cols,
                                   from.view,
                                   classes,
                                   ignored,
                                   static_cast<float*>(loss.data_ptr()),
                                   static_cast<float*>(lse.data_ptr())};
  if (from.rows > 0) {
    bindings::DeviceLease device = lease(logits);
    check(mr_cross_entropy(device.get(), &args, device.stream()));
  }
  return {reduced(loss, classes, from.rows, ignored, how), lse};
}

Tensor cross_entropy_backward(const Tensor& dloss, const Tensor& logits, const Tensor& targets,
                              const Tensor& lse, int64_t ignore_index, int64_t reduction) {
  const char* op = "cross_entropy_backward";
  const Rows from(logits, op, "logits");
  Tensor dlogits = empty(sizes_of(logits), logits);
  MaybeTensor keep_targets, keep_lse, keep_dloss;
  mr_cross_entropy_backward_args args{};
  args.rows = from.rows;
  args.vocab = from.cols;
  args.logits = from.view;
  args.targets = int32_of(targets, from.rows, logits, keep_targets, op, "targets");
  args.ignore_index = ignore_of(ignore_index, op);
  args.lse = float32_of(lse, from.rows, logits, keep_lse, op, "lse");
  args.dloss = spread(dloss, args.targets, from.rows, args.ignore_index, reduction_of(reduction, logits, op),
                      logits, keep_dloss, op);
  args.dlogits = rows_of(dlogits, op);
  if (from.rows == 0) return dlogits;
  bindings::DeviceLease device = lease(logits);
  check(mr_cross_entropy_backward(device.get(), &args, device.stream()));
  return dlogits;
}

constexpr int64_t kLogitsAtOnce = 16 << 20;  // elements: 64 MiB, and rows enough for a product

// hidden [..., in] and weight [vocab, in] of one type, checked.
struct Head {
  Head(const Tensor& hidden, const Tensor& weight, const char* op)
      : x(hidden, op, "hidden"), w(weight, op, "weight") {
    if (weight.dim() != 2) refuse(op, "weight has shape " + shape_text(weight) + ", expected [vocab, in]");
    require_same_device(weight, hidden, op, "weight");
    if (!same_type(hidden, weight)) refuse(op, "weight has another dtype than hidden");
    if (x.cols != w.cols)
      refuse(op, "hidden has " + std::to_string(x.cols) + " columns, weight has " + std::to_string(w.cols));
    if (w.rows == 0 || w.cols == 0) refuse(op, "weight has shape " + shape_text(weight) + ", which is empty");
  }
  Rows x, w;
};

// -> loss, float32 of hidden's shape before its last dimension or one number, and log-sum-exp of that shape.
// So many rows of logits at a time.
std::tuple<Tensor, Tensor> linear_cross_entropy(const Tensor& hidden, const Tensor& weight,
                                                const Tensor& targets, int64_t ignore_index,
                                                int64_t reduction) {
  const char* op = "linear_cross_entropy";
  const Head head(hidden, weight, op);
  std::vector<int64_t> sizes = sizes_of(hidden);
  sizes.pop_back();
  Tensor loss = empty(sizes, ScalarType::Float, hidden), lse = empty(sizes, ScalarType::Float, hidden);
  MaybeTensor keep;
  const int64_t rows = head.x.rows, vocab = head.w.rows;
  const int32_t* classes = int32_of(targets, rows, hidden, keep, op, "targets");
  const int32_t ignore = ignore_of(ignore_index, op);
  const Reduction how = reduction_of(reduction, hidden, op);
  if (rows == 0) return {reduced(loss, classes, rows, ignore, how), lse};
  const int64_t chunk = std::clamp<int64_t>(kLogitsAtOnce / vocab, 1, rows);
  const Tensor logits = empty({chunk, vocab}, ScalarType::Float, hidden);
  mr_gemm_args product{};
  product.type = head.x.view.type;
  product.m = chunk, product.n = vocab, product.k = head.x.cols;
  product.lda = head.x.view.stride;
  product.b = head.w.view.data, product.ldb = head.w.view.stride, product.transpose_b = 1;
  product.out_type = MR_F32;
  product.c = logits.data_ptr();
  product.a = head.x.view.data;
  bindings::DeviceLease device = lease(hidden);
  size_t bytes = 0;
  check(mr_gemm_workspace_bytes(device.get(), &product, &bytes));
  const Workspace workspace(bytes, hidden, device);
  const int64_t row_bytes = product.lda * (product.type == MR_F32 ? 4 : 2);
  for (int64_t r = 0; r < rows; r += chunk) {
    product.m = std::min(chunk, rows - r);
    product.a = static_cast<const char*>(head.x.view.data) + r * row_bytes;
    check(mr_gemm(device.get(), &product, workspace.data(), bytes, device.stream()));
    const mr_cross_entropy_args args{product.m,
                                     vocab,
                                     {logits.data_ptr(), MR_F32, 0},
                                     classes + r,
                                     ignore,
                                     static_cast<float*>(loss.data_ptr()) + r,
                                     static_cast<float*>(lse.data_ptr()) + r};
    check(mr_cross_entropy(device.get(), &args, device.stream()));
  }
  return {reduced(loss, classes, rows, ignore, how), lse};
}

// Gradients of hidden and weight in their type; one that is not wanted is empty.
std::tuple<Tensor, Tensor> linear_cross_entropy_backward(const Tensor& dloss, const Tensor& hidden,
                                                         const Tensor& weight, const Tensor& targets,
                                                         const Tensor& lse, int64_t ignore_index,
                                                         bool want_hidden, bool want_weight,
                                                         int64_t reduction) {
  const char* op = "linear_cross_entropy_backward";
  const Head head(hidden, weight, op);
  const std::vector<int64_t> none{0};
  Tensor dhidden = empty(want_hidden ? sizes_of(hidden) : none, hidden.scalar_type(), hidden);
  Tensor dweight = empty(want_weight ? sizes_of(weight) : none, weight.scalar_type(), weight);
  MaybeTensor keep_targets, keep_lse, keep_dloss;
  mr_linear_cross_entropy_backward_args args{};
  args.rows = head.x.rows;
  args.vocab = head.w.rows;
  args.in = head.x.cols;
  args.hidden = head.x.view;
  args.weight = head.w.view;
  args.targets = int32_of(targets, args.rows, hidden, keep_targets, op, "targets");
  args.ignore_index = ignore_of(ignore_index, op);
  args.lse = float32_of(lse, args.rows, hidden, keep_lse, op, "lse");
  args.dloss = spread(dloss, args.targets, args.rows, args.ignore_index, reduction_of(reduction, hidden, op),
                      hidden, keep_dloss, op);
  if (want_hidden && args.rows > 0) args.dhidden = rows_of(dhidden, op);
  if (want_weight) args.dweight = rows_of(dweight, op);
  if (args.dhidden.data == nullptr && args.dweight.data == nullptr) return {dhidden, dweight};
  bindings::DeviceLease device = lease(hidden);
  size_t bytes = 0;
  check(mr_linear_cross_entropy_backward_workspace_bytes(device.get(), &args, &bytes));
  const Workspace workspace(bytes, hidden, device);
  check(mr_linear_cross_entropy_backward(device.get(), &args, workspace.data(), bytes, device.stream()));
  return {dhidden, dweight};
}

// tokens int32 of any shape, table [vocab, cols] -> [..., cols].
Tensor embedding(const Tensor& tokens, const Tensor& table, double scale) {
  const char* op = "embedding";
  if (table.dim() != 2) refuse(op, "table has shape " + shape_text(table) + ", expected [vocab, cols]");
  const Rows from(table, op, "table");
  std::vector<int64_t> sizes = sizes_of(tokens);
  sizes.push_back(from.cols);
  Tensor y = empty(sizes, table);
  MaybeTensor keep;
  mr_embedding_args args{};
  args.rows = tokens.numel();
  args.cols = from.cols;
  args.vocab = from.rows;
  args.tokens = int32_of(tokens, tokens.numel(), table, keep, op, "tokens");
  args.table = from.view;
  args.y = rows_of(y, op);
  args.scale = static_cast<float>(scale);
  if (y.numel() == 0) return y;
  bindings::DeviceLease device = lease(table);
  check(mr_embedding(device.get(), &args, device.stream()));
  return y;
}

// The gradient of the table, in dy's type.
Tensor embedding_backward(const Tensor& dy, const Tensor& tokens, int64_t vocab, double scale) {
  const char* op = "embedding_backward";
  const Rows from(dy, op, "dy");
  Tensor dtable = empty({vocab, from.cols}, dy.scalar_type(), dy);
  MaybeTensor keep;
  mr_embedding_backward_args args{};
  args.rows = from.rows;
  args.cols = from.cols;
  args.vocab = vocab;
  args.tokens = int32_of(tokens, from.rows, dy, keep, op, "tokens");
  args.dy = from.view;
  args.dtable = rows_of(dtable, op);
  args.scale = static_cast<float>(scale);
  if (from.rows == 0 || dtable.numel() == 0) return torch::stable::zero_(dtable);
  bindings::DeviceLease device = lease(dy);
  size_t bytes = 0;
  check(mr_embedding_backward_workspace_bytes(device.get(), &args, &bytes));
  const Workspace workspace(bytes, dy, device);
  check(mr_embedding_backward(device.get(), &args, workspace.data(), bytes, device.stream()));
  return dtable;
}

}  // namespace

void define_losses(torch::stable::detail::StableLibrary& m) {
  m.def(
      "cross_entropy(Tensor logits, Tensor targets, int ignore_index=-100, int reduction=0) -> (Tensor, "
      "Tensor)");
  m.def(
      "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor targets, Tensor lse, int "
      "ignore_index=-100, int reduction=0) -> Tensor");
  m.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int ignore_index=-100, "
      "int reduction=0) -> (Tensor, Tensor)");
  m.def(
      "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor targets, Tensor lse, "
      "int ignore_index=-100, bool want_hidden=True, bool want_weight=True, int reduction=0) -> (Tensor, "
      "Tensor)");
  m.def("embedding(Tensor tokens, Tensor table, float scale=1.) -> Tensor");
  m.def("embedding_backward(Tensor dy, Tensor tokens, SymInt vocab, float scale=1.) -> Tensor");
}

void implement_losses(torch::stable::detail::StableLibrary& m) {
  implement(m, "cross_entropy", TORCH_BOX(&cross_entropy));
  implement(m, "cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  implement(m, "linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
  implement(m, "linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
  implement(m, "embedding", TORCH_BOX(&embedding));
  implement(m, "embedding_backward", TORCH_BOX(&embedding_backward));
}

}  // namespace millrace::torch_ops
