// Norms, rotary embedding, activations, softmax and dropout over the last dimension of a tensor, and their
// gradients.
#include <array>
#include <tuple>

#include "tensors.h"

namespace millrace::torch_ops {
namespace {

using bindings::check;

float* floats(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }

std::vector<int64_t> leading_sizes(const Tensor& x) {
  std::vector<int64_t> sizes = sizes_of(x);
  if (!sizes.empty()) sizes.pop_back();
  return sizes;
}

void require_like(const Tensor& x, const Tensor& like, const char* op, const char* name) {
  require_same_device(x, like, op, name);
  if (sizes_of(x) != sizes_of(like)) {
    refuse(op, std::string(name) + " has shape " + shape_text(x) + ", expected " + shape_text(like));
  }
}

// ---------------------------------------------------------------- norms

struct Normed {
  Tensor y;
  MaybeTensor sum, mean, rstd;
};

struct NormOptions {
  mr_norm_kind kind;
  double eps, weight_offset;
  const char* op;
  bool for_gradient = true;  // the mean and the reciprocal deviation are wanted
};

Normed norm(const Tensor& x, const MaybeTensor& residual, const MaybeTensor& weight, const MaybeTensor& bias,
            const NormOptions& o) {
  const Rows from(x, o.op, "x");
  Rows add;
  Normed made{empty(sizes_of(x), x), {}, {}, {}};
  const Vector w(weight, from.cols, x, o.op, "weight"), b(bias, from.cols, x, o.op, "bias");
  mr_norm_args args{};
  args.kind = o.kind;
  args.rows = from.rows;
  args.cols = from.cols;
  args.x = from.view;
  if (residual.has_value()) {
    require_like(*residual, x, o.op, "residual");
    add = Rows(*residual, o.op, "residual");
    made.sum = empty(sizes_of(x), residual->scalar_type(), x);
    args.residual = add.view;
    args.sum = rows_of(*made.sum, o.op);
  }
  args.y = rows_of(made.y, o.op);
  args.weight = w.view;
  args.bias = b.view;
  args.weight_offset = static_cast<float>(o.weight_offset);
  args.eps = static_cast<float>(o.eps);
  if (o.for_gradient) {
    made.rstd = empty(leading_sizes(x), ScalarType::Float, x);
    args.rstd = floats(*made.rstd);
  }
  if (o.for_gradient && o.kind == MR_NORM_LAYER) {
    made.mean = empty(leading_sizes(x), ScalarType::Float, x);
    args.mean = floats(*made.mean);
  }
  if (from.rows > 0 && from.cols > 0) {
    bindings::DeviceLease device = lease(x);
    check(mr_norm(device.get(), &args, device.stream()));
  }
  return made;
}

// Without what a gradient needs; layer: LayerNorm, else RMSNorm.
Tensor norm_plain(const Tensor& x, MaybeTensor weight, MaybeTensor bias, double eps, double weight_offset,
                  bool layer) {
  return norm(x, {}, weight, bias,
              {layer ? MR_NORM_LAYER : MR_NORM_RMS, eps, weight_offset, "norm_plain", false})
      .y;
}

// norm_plain of a sum: -> y, sum.
std::tuple<Tensor, Tensor> add_norm_plain(const Tensor& x, const Tensor& residual, MaybeTensor weight,
                                          MaybeTensor bias, bool layer, double eps, double weight_offset) {
  Normed made = norm(x, residual, weight, bias,
                     {layer ? MR_NORM_LAYER : MR_NORM_RMS, eps, weight_offset, "add_norm_plain", false});
  return {made.y, *made.sum};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, MaybeTensor weight, double eps, double weight_offset) {
  Normed made = norm(x, {}, weight, {}, {MR_NORM_RMS, eps, weight_offset, "rms_norm"});
  return {made.y, *made.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, MaybeTensor weight, MaybeTensor bias,
                                              double eps) {
  Normed made = norm(x, {}, weight, bias, {MR_NORM_LAYER, eps, 0.0, "layer_norm"});
  return {made.y, *made.mean, *made.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, MaybeTensor weight,
                                                double eps, double weight_offset) {
  Normed made = norm(x, residual, weight, {}, {MR_NORM_RMS, eps, weight_offset, "add_rms_norm"});
  return {made.y, *made.sum, *made.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          MaybeTensor weight, MaybeTensor bias, double eps) {
  Normed made = norm(x, residual, weight, bias, {MR_NORM_LAYER, eps, 0.0, "add_layer_norm"});
  return {made.y, *made.sum, *made.mean, *made.rstd};
}

// mean: of a LayerNorm; None: RMSNorm. -> dx, dweight [cols] (float32; empty where there is no weight or it
// is not wanted), dbias the same.
std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& dy, const Tensor& x, MaybeTensor weight,
                                                 MaybeTensor mean, const Tensor& rstd, MaybeTensor dsum,
                                                 double weight_offset, bool want_weight, bool want_bias) {
  const char* op = "norm_backward";
  require_like(dy, x, op, "dy");
  const Rows from(x, op, "x"), from_dy(dy, op, "dy");
  Rows from_dsum;
  if (dsum.has_value()) {
    require_like(*dsum, x, op, "dsum");
    from_dsum = Rows(*dsum, op, "dsum");
  }
  const Vector w(weight, from.cols, x, op, "weight");
  MaybeTensor keep_mean, keep_rstd;
  Tensor dx = empty(sizes_of(x), x);
  Tensor dweight = empty({want_weight ? from.cols : 0}, ScalarType::Float, x);
  Tensor dbias = empty({want_bias ? from.cols : 0}, ScalarType::Float, x);
  mr_norm_backward_args args{};
  args.kind = mean.has_value() ? MR_NORM_LAYER : MR_NORM_RMS;
  args.rows = from.rows;
  args.cols = from.cols;
  args.x = from.view;
  args.dy = from_dy.view;
  args.dsum = from_dsum.view;
  args.dx = rows_of(dx, op);
  args.weight = w.view;
  args.weight_offset = static_cast<float>(weight_offset);
  args.rstd = float32_of(rstd, from.rows, x, keep_rstd, op, "rstd");
  if (mean.has_value()) args.mean = float32_of(*mean, from.rows, x, keep_mean, op, "mean");
  if (want_weight) args.dweight = {dweight.data_ptr(), MR_F32};
  if (want_bias) args.dbias = {dbias.data_ptr(), MR_F32};
  if (from.rows == 0 || from.cols == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {dx, dweight, dbias};
  }
  bindings::DeviceLease device = lease(x);
  size_t bytes = 0;
  check(mr_norm_backward_workspace_bytes(device.get(), &args, &bytes));
  const Workspace workspace(bytes, x, device);
  check(mr_norm_backward(device.get(), &args, workspace.data(), bytes, device.stream()));
  return {dx, dweight, dbias};
}

// ---------------------------------------------------------------- rotary

// x [..., heads, head_dim]; positions int32 of x's shape before those two; inv_freq float32 [num_freqs].
Tensor rotary(const Tensor& x, const Tensor& positions, const Tensor& inv_freq, double magnitude,
              bool interleaved, bool inverse) {
  const char* op = "rotary";
  if (x.dim() < 2) refuse(op, "x has shape " + shape_text(x) + ", expected [..., heads, head_dim]");
  const int64_t heads = x.size(x.dim() - 2), head_dim = x.size(x.dim() - 1), per_row = heads * head_dim;
  const int64_t rows = per_row == 0 ? 0 : x.numel() / per_row;
  Tensor y = empty(sizes_of(x), x);
  if (rows == 0) return y;
  Rows from(torch::stable::view(x.is_contiguous() ? x : torch::stable::contiguous(x), {rows, per_row}), op,
            "x");
  MaybeTensor keep_positions, keep_freqs;
  mr_rotary_args args{};
  args.rotary = {float32_of(inv_freq, inv_freq.numel(), x, keep_freqs, op, "inv_freq"),
                 static_cast<int32_t>(inv_freq.numel()), static_cast<float>(magnitude), interleaved ? 1 : 0};
  args.positions = int32_of(positions, rows, x, keep_positions, op, "positions");
  args.rows = rows;
  args.heads = static_cast<int32_t>(heads);
  args.head_dim = static_cast<int32_t>(head_dim);
  args.x = from.view;
  args.y = {y.data_ptr(), from.view.type, per_row};
  args.inverse = inverse ? 1 : 0;
  bindings::DeviceLease device = lease(x);
  check(mr_rotary_rows(device.get(), &args, device.stream()));
  return y;
}

// ---------------------------------------------------------------- activations

struct NamedKind {
  const char* name;
  mr_activation_kind kind;
};
constexpr std::array<NamedKind, 7> kKinds{{{"gelu", MR_ACTIVATION_GELU},
                                           {"gelu_tanh", MR_ACTIVATION_GELU_TANH},
                                           {"silu", MR_ACTIVATION_SILU},
                                           {"swiglu", MR_ACTIVATION_SWIGLU},
                                           {"clamped_swiglu", MR_ACTIVATION_CLAMPED_SWIGLU},
                                           {"geglu", MR_ACTIVATION_GEGLU},
                                           {"geglu_tanh", MR_ACTIVATION_GEGLU_TANH}}};

mr_activation_kind kind_of(const std::string& name, bool gated, const char* op) {
  std::string known;
  for (const NamedKind& k : kKinds) {
    if ((k.kind >= MR_ACTIVATION_SWIGLU) != gated) continue;
    if (name == k.name) return k.kind;
    known += (known.empty() ? "" : ", ") + std::string(k.name);
  }
  refuse(op, "kind is \"" + name + "\", expected one of " + known);
}

struct ActivationOptions {
  mr_activation_kind kind;
  double alpha, limit;
  const char* op;
};

Tensor activate(const Tensor& x, const MaybeTensor& up, const ActivationOptions& o) {
  const Rows from(x, o.op, "x");
  Rows from_up;
  if (up.has_value()) {
    require_like(*up, x, o.op, "up");
    from_up = Rows(*up, o.op, "up");
  }
  Tensor y = empty(sizes_of(x), x);
  if (x.numel() == 0) return y;
  const mr_activation_args args{o.kind,
                                from.rows,
                                from.cols,
                                from.view,
                                from_up.view,
                                rows_of(y, o.op),
                                static_cast<float>(o.alpha),
                                static_cast<float>(o.limit)};
  bindings::DeviceLease device = lease(x);
  check(mr_activation_rows(device.get(), &args, device.stream()));
  return y;
}

std::tuple<Tensor, MaybeTensor> activate_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& up,
                                                  const ActivationOptions& o) {
  require_like(dy, x, o.op, "dy");
  const Rows from(x, o.op, "x"), from_dy(dy, o.op, "dy");
  Rows from_up;
  Tensor dx = empty(sizes_of(x), x);
  MaybeTensor dup;
  if (up.has_value()) {
    require_like(*up, x, o.op, "up");
    from_up = Rows(*up, o.op, "up");
    dup = empty(sizes_of(x), up->scalar_type(), x);
  }
  if (x.numel() == 0) return {dx, dup};
  mr_activation_backward_args args{};
  args.kind = o.kind;
  args.rows = from.rows;
  args.cols = from.cols;
  args.x = from.view;
  args.up = from_up.view;
  args.dy = from_dy.view;
  args.dx = rows_of(dx, o.op);
  if (dup.has_value()) args.dup = rows_of(*dup, o.op);
  args.alpha = static_cast<float>(o.alpha);
  args.limit = static_cast<float>(o.limit);
  bindings::DeviceLease device = lease(x);
  check(mr_activation_rows_backward(device.get(), &args, device.stream()));
  return {dx, dup};
}

Tensor activation(const Tensor& x, Text kind) {
  return activate(x, {}, {kind_of(kind, false, "activation"), 0.0, 0.0, "activation"});
}

Tensor activation_backward(const Tensor& dy, const Tensor& x, Text kind) {
  const char* op = "activation_backward";
  return std::get<0>(activate_backward(dy, x, {}, {kind_of(kind, false, op), 0.0, 0.0, op}));
}

Tensor gated_activation(const Tensor& gate, const Tensor& up, Text kind, double alpha, double limit) {
  const char* op = "gated_activation";
  return activate(gate, up, {kind_of(kind, true, op), alpha, limit, op});
}

std::tuple<Tensor, Tensor> gated_activation_backward(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                                     Text kind, double alpha, double limit) {
  const char* op = "gated_activation_backward";
  auto [d_gate, d_up] = activate_backward(dy, gate, up, {kind_of(kind, true, op), alpha, limit, op});
  return {d_gate, *d_up};
}

// ---------------------------------------------------------------- softmax, dropout

Tensor softmax(const Tensor& x, double scale) {
  const Rows from(x, "softmax", "x");
  Tensor y = empty(sizes_of(x), x);
  if (x.numel() == 0) return y;
  const mr_softmax_args args{from.rows, from.cols, from.view, rows_of(y, "softmax"),
                             static_cast<float>(scale)};
  bindings::DeviceLease device = lease(x);
  check(mr_softmax(device.get(), &args, device.stream()));
  return y;
}

Tensor softmax_backward(const Tensor& dy, const Tensor& y, double scale) {
  const char* op = "softmax_backward";
  require_like(dy, y, op, "dy");
  const Rows from(y, op, "y"), from_dy(dy, op, "dy");
  Tensor dx = empty(sizes_of(y), y);
  if (y.numel() == 0) return dx;
  const mr_softmax_backward_args args{from.rows,    from.cols,       from.view,
                                      from_dy.view, rows_of(dx, op), static_cast<float>(scale)};
  bindings::DeviceLease device = lease(y);
  check(mr_softmax_backward(device.get(), &args, device.stream()));
  return dx;
}

// seed: int64 [2] on the CPU, seed and offset.
Tensor dropout(const Tensor& x, double p, const Tensor& seed) {
  const char* op = "dropout";
  require_type(seed, ScalarType::Long, op, "seed", "int64");
  require_shape(seed, {2}, op, "seed");
  if (!seed.is_cpu()) refuse(op, "seed lies on another device, expected the CPU");
  const Rows from(x, op, "x");
  Tensor y = empty(sizes_of(x), x);
  const auto* words = static_cast<const int64_t*>(seed.data_ptr());
  const mr_dropout_args args{from.rows,
                             from.cols,
                             from.view,
                             rows_of(y, op),
                             static_cast<float>(p),
                             static_cast<uint64_t>(words[0]),
                             static_cast<uint64_t>(words[seed.stride(0)])};
  if (x.numel() == 0) return y;
  bindings::DeviceLease device = lease(x);
  check(mr_dropout(device.get(), &args, device.stream()));
  return y;
}

}  // namespace

void define_fused(torch::stable::detail::StableLibrary& m) {
  m.def(
      "norm_plain(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-6, float weight_offset=0., "
      "bool layer=False) -> Tensor");
  m.def(
      "add_norm_plain(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, bool layer=False, "
      "float eps=1e-6, float weight_offset=0.) -> (Tensor, Tensor)");
  m.def(
      "rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6, float weight_offset=0.) -> (Tensor, Tensor)");
  m.def(
      "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-6, float weight_offset=0.) "
      "-> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, Tensor? dsum=None, "
      "float weight_offset=0., bool want_weight=False, bool want_bias=False) -> (Tensor, Tensor, Tensor)");
  m.def(
      "rotary(Tensor x, Tensor positions, Tensor inv_freq, float magnitude=1., bool interleaved=False, "
      "bool inverse=False) -> Tensor");
  m.def("activation(Tensor x, str kind) -> Tensor");
  m.def("activation_backward(Tensor dy, Tensor x, str kind) -> Tensor");
  m.def("gated_activation(Tensor gate, Tensor up, str kind, float alpha=1.702, float limit=7.) -> Tensor");
  m.def(
      "gated_activation_backward(Tensor dy, Tensor gate, Tensor up, str kind, float alpha=1.702, "
      "float limit=7.) -> (Tensor, Tensor)");
  m.def("softmax(Tensor x, float scale=1.) -> Tensor");
  m.def("softmax_backward(Tensor dy, Tensor y, float scale=1.) -> Tensor");
  m.def("dropout(Tensor x, float p, Tensor seed) -> Tensor");
}

void implement_fused(torch::stable::detail::StableLibrary& m) {
  implement(m, "norm_plain", TORCH_BOX(&norm_plain));
  implement(m, "add_norm_plain", TORCH_BOX(&add_norm_plain));
  implement(m, "rms_norm", TORCH_BOX(&rms_norm));
  implement(m, "layer_norm", TORCH_BOX(&layer_norm));
  implement(m, "add_rms_norm", TORCH_BOX(&add_rms_norm));
  implement(m, "add_layer_norm", TORCH_BOX(&add_layer_norm));
  implement(m, "norm_backward", TORCH_BOX(&norm_backward));
  implement(m, "rotary", TORCH_BOX(&rotary));
  implement(m, "activation", TORCH_BOX(&activation));
  implement(m, "activation_backward", TORCH_BOX(&activation_backward));
  implement(m, "gated_activation", TORCH_BOX(&gated_activation));
  implement(m, "gated_activation_backward", TORCH_BOX(&gated_activation_backward));
  implement(m, "softmax", TORCH_BOX(&softmax));
  implement(m, "softmax_backward", TORCH_BOX(&softmax_backward));
  implement(m, "dropout", TORCH_BOX(&dropout));
}

}  // namespace millrace::torch_ops
