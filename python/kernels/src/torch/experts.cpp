// Routing, mixture of experts, and sampling.
#include <algorithm>
#include <cstdint>
#include <tuple>

#include "weights.h"

namespace millrace::torch_ops {
namespace {

using bindings::check;

// scores float32 [rows, experts] -> weights float32 [rows, k], chosen int32 [rows, k].
std::tuple<Tensor, Tensor> route(const Tensor& scores, int64_t k, bool softmax_all) {
  const char* op = "route";
  if (scores.dim() != 2) refuse(op, "scores has shape " + shape_text(scores) + ", expected [rows, experts]");
  const int64_t rows = scores.size(0), experts = scores.size(1);
  if (k < 1 || k > experts) {
    refuse(op, "k is " + std::to_string(k) + ", expected 1 to " + std::to_string(experts) + " experts");
  }
  MaybeTensor keep;
  const float* from = float32_of(scores, rows * experts, scores, keep, op, "scores");
  Tensor chosen = empty({rows, k}, ScalarType::Int, scores),
         weights = empty({rows, k}, ScalarType::Float, scores);
  if (rows == 0) return {weights, chosen};
  bindings::DeviceLease device = lease(scores);
  check(mr_moe_route(device.get(), from, rows, static_cast<int32_t>(experts), static_cast<int32_t>(k),
                     softmax_all ? MR_SOFTMAX_ALL : MR_SOFTMAX_CHOSEN,
                     static_cast<int32_t*>(chosen.data_ptr()), static_cast<float*>(weights.data_ptr()),
                     device.stream()));
  return {weights, chosen};
}

// x float32 [rows, hidden]; gate, up [experts, ffn, hidden], down [experts, hidden, ffn] of one type.
Tensor experts(const Tensor& x, const Tensor& chosen, const Tensor& weights, const Tensor& gate,
               const Tensor& up, const Tensor& down, MaybeTensor gate_bias, MaybeTensor up_bias,
               MaybeTensor down_bias, Text type, Text activation, double alpha, double limit) {
  const char* op = "experts";
  if (x.dim() != 2) refuse(op, "x has shape " + shape_text(x) + ", expected [rows, hidden]");
  if (chosen.dim() != 2) refuse(op, "chosen has shape " + shape_text(chosen) + ", expected [rows, k]");
  if (!x.is_cpu())
    refuse(op, "x lies on a GPU, where weights are packed once: expected a CPU's, or experts_packed");
  const int64_t rows = x.size(0), hidden = x.size(1), k = chosen.size(1);
  const WeightTensor w_gate(gate, type, {}, 0, 0, op, "gate"), w_up(up, type, {}, 0, 0, op, "up"),
      w_down(down, type, {}, 0, 0, op, "down");
  const int64_t count = w_gate.matrix.experts, ffn = w_gate.matrix.rows;
  const auto same = [](const mr_matrix& m, int64_t e, int64_t r, int64_t c) {
    return m.experts == e && m.rows == r && m.cols == c;
  };
  if (gate.dim() != 3 || !same(w_gate.matrix, count, ffn, hidden) || !same(w_up.matrix, count, ffn, hidden) ||
      !same(w_down.matrix, count, hidden, ffn)) {
    refuse(op, "gate, up and down have shapes " + shape_text(gate) + ", " + shape_text(up) + ", " +
                   shape_text(down) + " for x " + shape_text(x) +
                   ", expected [experts, ffn, hidden] twice and [experts, hidden, ffn]");
  }
  ExpertsCall call(x, chosen, weights, {gate_bias, up_bias, down_bias}, {count, ffn}, op);
  call.args.activation = experts_activation(activation, op);
  call.args.alpha = static_cast<float>(alpha);
  call.args.limit = static_cast<float>(limit);
  if (rows == 0 || k == 0) return call.y;
  bindings::DeviceLease device = lease(x);
  const PreparedWeight p_gate(device.get(), w_gate, x), p_up(device.get(), w_up, x),
      p_down(device.get(), w_down, x);
  call.run(device, {p_gate.get(), p_up.get(), p_down.get()}, x);
  return call.y;
}

// A value for every row, or one for all of them (no dimensions); host memory.
template <class T>
struct PerRow {
  PerRow(const Tensor& x, int64_t rows, ScalarType type, const char* op, const char* name,
         const char* type_name)
      : step(x.dim() == 0 ? 0 : 1) {
    require_type(x, type, op, name, type_name);
    if (step != 0) require_shape(x, {rows}, op, name);
    if (!x.is_cpu()) refuse(op, std::string(name) + " lies on another device, expected the CPU");
    keep = x.is_contiguous() ? x : torch::stable::contiguous(x);
    data = static_cast<const T*>(keep->data_ptr());
  }
  T operator[](size_t row) const { return data[row * step]; }
  size_t step;
  MaybeTensor keep;
  const T* data;
};

// Rows of logits, as many as there are params for.
Tensor draw(const Tensor& logits, const std::vector<mr_sample_params>& params, const char* op) {
  const auto rows = static_cast<int64_t>(params.size()), vocab = logits.size(1);
  MaybeTensor keep;
  const float* from = float32_of(logits, rows * vocab, logits, keep, op, "logits");
  Tensor tokens = empty({rows}, ScalarType::Int, logits);
  if (rows == 0) return tokens;
  bindings::DeviceLease device = lease(logits);
  size_t bytes = 0;
  check(mr_sample_workspace_bytes(device.get(), rows, vocab, &bytes));
  const Workspace workspace(bytes, logits, device);
  check(mr_sample(device.get(), from, rows, vocab, params.data(), static_cast<int32_t*>(tokens.data_ptr()),
                  workspace.data(), bytes, device.stream()));
  return tokens;
}

int64_t rows_of_logits(const Tensor& logits, const char* op) {
  if (logits.dim() != 2) refuse(op, "logits has shape " + shape_text(logits) + ", expected [rows, vocab]");
  return logits.size(0);
}

// logits float32 [rows, vocab] -> int32 [rows]; -1: a logit is NaN, -2: none is above -infinity.
Tensor sample(const Tensor& logits, const Tensor& uniform, const Tensor& temperature, const Tensor& top_k,
              const Tensor& top_p, const Tensor& min_p) {
  const char* op = "sample";
  const int64_t rows = rows_of_logits(logits, op);
  const PerRow<double> draws(uniform, rows, ScalarType::Double, op, "uniform", "float64");
  const PerRow<float> heat(temperature, rows, ScalarType::Float, op, "temperature", "float32");
  const PerRow<int32_t> most(top_k, rows, ScalarType::Int, op, "top_k", "int32");
  const PerRow<float> nucleus(top_p, rows, ScalarType::Float, op, "top_p", "float32");
  const PerRow<float> least(min_p, rows, ScalarType::Float, op, "min_p", "float32");
  std::vector<mr_sample_params> params(static_cast<size_t>(rows));
  for (size_t r = 0; r < params.size(); ++r) params[r] = {heat[r], most[r], nucleus[r], least[r], draws[r]};
  return draw(logits, params, op);
}

// The same options for every row, as numbers: four tensors less for a call to look at.
Tensor sample_alike(const Tensor& logits, const Tensor& uniform, double temperature, int64_t top_k,
                    double top_p, double min_p) {
  const char* op = "sample_alike";
  const int64_t rows = rows_of_logits(logits, op);
  const PerRow<double> draws(uniform, rows, ScalarType::Double, op, "uniform", "float64");
  if (top_k < INT32_MIN || top_k > INT32_MAX) refuse(op, "top_k is " + std::to_string(top_k));
  std::vector<mr_sample_params> params(static_cast<size_t>(rows));
  for (size_t r = 0; r < params.size(); ++r) {
    params[r] = {static_cast<float>(temperature), static_cast<int32_t>(top_k), static_cast<float>(top_p),
                 static_cast<float>(min_p), draws[r]};
  }
  return draw(logits, params, op);
}

}  // namespace

mr_activation experts_activation(const std::string& name, const char* op) {
  if (name == "swiglu") return MR_SWIGLU;
  if (name == "clamped_swiglu") return MR_CLAMPED_SWIGLU;
  refuse(op, "activation is \"" + name + "\", expected swiglu or clamped_swiglu");
}

namespace {

const float* optional_floats(const MaybeTensor& x, int64_t count, const Tensor& like, MaybeTensor& keep,
                             const char* op, const char* name) {
  return x.has_value() ? float32_of(*x, count, like, keep, op, name) : nullptr;
}

}  // namespace

ExpertsCall::ExpertsCall(const Tensor& x, const Tensor& chosen, const Tensor& weights, const Biases& biases,
                         Shape shape, const char* op)
    : y(empty(sizes_of(x), x)) {
  const int64_t rows = x.size(0), hidden = x.size(1), k = chosen.size(1);
  args.x = float32_of(x, rows * hidden, x, keep_[0], op, "x");
  args.chosen = int32_of(chosen, rows * k, x, keep_[1], op, "chosen");
  args.weights = float32_of(weights, rows * k, x, keep_[2], op, "weights");
  args.gate_bias = optional_floats(biases.gate, shape.count * shape.ffn, x, keep_[3], op, "gate_bias");
  args.up_bias = optional_floats(biases.up, shape.count * shape.ffn, x, keep_[4], op, "up_bias");
  args.down_bias = optional_floats(biases.down, shape.count * hidden, x, keep_[5], op, "down_bias");
  args.k = static_cast<int32_t>(k);
  args.rows = rows;
  args.y = static_cast<float*>(y.data_ptr());
  if (y.is_cpu()) {
    std::fill_n(args.y, rows * hidden, 0.0F);
  } else {
    torch::stable::zero_(y);
  }
}

void ExpertsCall::run(bindings::DeviceLease& device, const Weights& weights, const Tensor& like) {
  args.gate = weights.gate;
  args.up = weights.up;
  args.down = weights.down;
  size_t bytes = 0;
  check(mr_moe_workspace_bytes(device.get(), &args, &bytes));
  const Workspace workspace(bytes, like, device);
  check(mr_moe(device.get(), &args, workspace.data(), bytes, device.stream()));
}

void define_experts(torch::stable::detail::StableLibrary& m) {
  m.def("route(Tensor scores, int k, bool softmax_all=False) -> (Tensor, Tensor)");
  m.def(
      "experts(Tensor x, Tensor chosen, Tensor weights, Tensor gate, Tensor up, Tensor down, "
      "Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, str type=\"\", "
      "str activation=\"swiglu\", float alpha=1.702, float limit=7.) -> Tensor");
  m.def(
      "sample(Tensor logits, Tensor uniform, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) "
      "-> "
      "Tensor");
  m.def(
      "sample_alike(Tensor logits, Tensor uniform, float temperature, int top_k, float top_p, float min_p) "
      "-> Tensor");
}

void implement_experts(torch::stable::detail::StableLibrary& m) {
  implement(m, "route", TORCH_BOX(&route));
  implement(m, "experts", TORCH_BOX(&experts));
  implement(m, "sample", TORCH_BOX(&sample));
  implement(m, "sample_alike", TORCH_BOX(&sample_alike));
}

}  // namespace millrace::torch_ops
