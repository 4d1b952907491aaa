// Weights packed once for the device that multiplies them: a GPU's tiles in a tensor of bytes, which every
// call adopts (mr_weight_adopt). On a CPU, which uses most weights in place, the bytes are the weight's own
// with its scales behind them.
#include <cstring>
#include <string>

#include "weights.h"

namespace millrace::torch_ops {
namespace {

using bindings::check;

constexpr int64_t kScalesAlignment = 256;

// Bytes of the codes of `of` on the host, and where the scales begin behind them.
struct HostLayout {
  int64_t codes, scales_at, scales;
};
HostLayout host_layout(const mr_matrix& of) {
  size_t row_bytes = 0;
  check(mr_row_bytes(of.type, of.cols, &row_bytes));
  const int64_t codes = of.experts * of.rows * static_cast<int64_t>(row_bytes);
  const int64_t behind = (codes + kScalesAlignment - 1) / kScalesAlignment * kScalesAlignment;
  if (of.type != MR_F8_E4M3) return {codes, codes, 0};
  const int64_t grid_rows = (of.rows + of.rows_per_scale - 1) / of.rows_per_scale;
  return {codes, behind, of.experts * grid_rows * of.scales_per_row * 4};
}

// weight on the host, like on the device that is to multiply it -> uint8 [bytes] there.
Tensor weight_pack(const Tensor& weight, const Tensor& like, Text type, MaybeTensor scales) {
  const char* op = "weight_pack";
  if (!weight.is_cpu()) refuse(op, "weight lies on a GPU, expected the CPU: it is packed from there");
  if (scales.has_value()) {
    require_type(*scales, ScalarType::Float, op, "scales", "float32");
    if (!scales->is_cpu()) refuse(op, "scales lies on a GPU, expected the CPU");
  }
  const WeightTensor w(weight, type, scales, kGrid, kGrid, op, "weight");
  if (w.matrix.type == MR_MXFP4_SPLIT) refuse(op, "type is mxfp4_split, expected one without scales beside");
  if (weight.numel() == 0) refuse(op, "weight has shape " + shape_text(weight) + ", which is empty");
  bindings::DeviceLease device = lease(like);
  if (like.is_cpu()) {
    const HostLayout layout = host_layout(w.matrix);
    Tensor out = empty({layout.scales_at + layout.scales}, ScalarType::Byte, like);
    auto* to = static_cast<std::byte*>(out.data_ptr());
    std::memset(to + layout.codes, 0, static_cast<size_t>(layout.scales_at - layout.codes));
    std::memcpy(to, w.matrix.data, static_cast<size_t>(layout.codes));
    if (layout.scales > 0)
      std::memcpy(to + layout.scales_at, w.matrix.scales, static_cast<size_t>(layout.scales));
    return out;
  }
  size_t bytes = 0, kept = 0;
  check(mr_weight_bytes(device.get(), &w.matrix, &bytes));
  check(mr_weight_kept_bytes(device.get(), &w.matrix, &kept));
  // It is made on the default stream, and torch's memory may still be in use on this one.
  const Workspace memory(bytes, like);
  check(mr_device_synchronize(device.get(), device.stream()));
  mr_weight* made = nullptr;
  check(mr_weight_create(device.get(), &w.matrix, memory.data(), bytes, &made));
  mr_weight_destroy(made);
  Tensor out = empty({static_cast<int64_t>(kept)}, ScalarType::Byte, like);
  return torch::stable::copy_(out, memory.part(kept));
}

// What a packed tensor is: [experts, rows, cols] of a type.
class Adopted {
 public:
  Adopted(mr_device* device, const Tensor& packed, mr_matrix of, const Tensor& like, const char* op,
          const char* name) {
    require_same_device(packed, like, op, name);
    require_type(packed, ScalarType::Byte, op, name, "uint8: what weight_pack made");
    const auto found = static_cast<size_t>(packed.numel());
    if (!packed.is_contiguous()) refuse(op, std::string(name) + " has gaps");
    if (of.type == MR_F8_E4M3) {
      of.rows_per_scale = of.cols_per_scale = kGrid;
      of.scale_type = MR_F32;
      of.scales_per_row = (of.cols + kGrid - 1) / kGrid;
    }
    of.data = packed.data_ptr();
    if (like.is_cpu()) {
      const HostLayout layout = host_layout(of);
      expect(found, static_cast<size_t>(layout.scales_at + layout.scales), op, name);
      if (layout.scales > 0) of.scales = static_cast<const std::byte*>(of.data) + layout.scales_at;
      size_t bytes = 0;
      check(mr_weight_bytes(device, &of, &bytes));
      memory_.emplace(bytes, like);
      check(mr_weight_create(device, &of, memory_->data(), bytes, &weight_));
      return;
    }
    if (of.type == MR_F8_E4M3) of.scales = of.data;  // not read
    size_t kept = 0;
    check(mr_weight_kept_bytes(device, &of, &kept));
    expect(found, kept, op, name);
    check(mr_weight_adopt(device, &of, packed.data_ptr(), found, &weight_));
  }
  ~Adopted() { mr_weight_destroy(weight_); }
  Adopted(const Adopted&) = delete;
  Adopted& operator=(const Adopted&) = delete;
  const mr_weight* get() const { return weight_; }

 private:
  static void expect(size_t found, size_t wanted, const char* op, const char* name) {
    if (found != wanted)
      refuse(op, std::string(name) + " has " + std::to_string(found) + " bytes, expected " +
                     std::to_string(wanted));
  }
  std::optional<Workspace> memory_;
  mr_weight* weight_ = nullptr;
};

mr_matrix matrix_of(const std::string& type, int64_t experts, int64_t rows, int64_t cols, const char* op) {
  if (experts <= 0 || rows <= 0 || cols <= 0) refuse(op, "a weight has a size below 1");
  mr_matrix m{};
  m.type = parse_type(type, op);
  m.experts = experts, m.rows = rows, m.cols = cols;
  return m;
}

// x float32 [..., cols] times a packed weight [rows, cols] -> float32 [..., rows].
Tensor linear_packed(const Tensor& x, const Tensor& packed, Text type, int64_t rows, int64_t cols,
                     MaybeTensor bias) {
  const char* op = "linear_packed";
  require_type(x, ScalarType::Float, op, "x", "float32");
  const mr_matrix of = matrix_of(type, 1, rows, cols, op);
  const Rows from(x, op, "x");
  if (from.cols != cols)
    refuse(op, "x has " + std::to_string(from.cols) + " columns, weight " + std::to_string(cols));
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = rows;
  Tensor y = empty(sizes, x);
  MaybeTensor keep;
  const float* add = bias.has_value() ? float32_of(*bias, rows, x, keep, op, "bias") : nullptr;
  if (y.numel() == 0) return y;
  bindings::DeviceLease device = lease(x);
  const Adopted weight(device.get(), packed, of, x, op, "packed");
  mr_matmul_args args{};
  args.weight = weight.get();
  args.bias = add;
  args.x = static_cast<const float*>(from.view.data);
  args.x_stride = from.view.stride;
  args.y = static_cast<float*>(y.data_ptr());
  args.rows = from.rows;
  size_t bytes = 0;
  check(mr_matmul_workspace_bytes(device.get(), args.weight, args.rows, &bytes));
  const Workspace workspace(bytes, x, device);
  check(mr_matmul(device.get(), &args, workspace.data(), bytes, device.stream()));
  return y;
}

// experts() over packed weights: gate, up [count, ffn, hidden], down [count, hidden, ffn].
Tensor experts_packed(const Tensor& x, const Tensor& chosen, const Tensor& weights, const Tensor& gate,
                      const Tensor& up, const Tensor& down, Text type, int64_t count, int64_t ffn,
                      MaybeTensor gate_bias, MaybeTensor up_bias, MaybeTensor down_bias, Text activation,
                      double alpha, double limit) {
  const char* op = "experts_packed";
  if (x.dim() != 2 || chosen.dim() != 2)
    refuse(op, "x and chosen have shapes " + shape_text(x) + " and " + shape_text(chosen) +
                   ", expected [rows, hidden] and [rows, k]");
  const int64_t rows = x.size(0), hidden = x.size(1), k = chosen.size(1);
  const mr_matrix wide = matrix_of(type, count, ffn, hidden, op),
                  narrow = matrix_of(type, count, hidden, ffn, op);
  ExpertsCall call(x, chosen, weights, {gate_bias, up_bias, down_bias}, {count, ffn}, op);
  call.args.activation = experts_activation(activation, op);
  call.args.alpha = static_cast<float>(alpha);
  call.args.limit = static_cast<float>(limit);
  if (rows == 0 || k == 0) return call.y;
  bindings::DeviceLease device = lease(x);
  const Adopted w_gate(device.get(), gate, wide, x, op, "gate"), w_up(device.get(), up, wide, x, op, "up"),
      w_down(device.get(), down, narrow, x, op, "down");
  call.run(device, {w_gate.get(), w_up.get(), w_down.get()}, x);
  return call.y;
}

}  // namespace

void define_packed(torch::stable::detail::StableLibrary& m) {
  m.def("weight_pack(Tensor weight, Tensor like, str type, Tensor? scales=None) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor packed, str type, int rows, int cols, Tensor? bias=None) -> Tensor");
  m.def(
      "experts_packed(Tensor x, Tensor chosen, Tensor weights, Tensor gate, Tensor up, Tensor down, "
      "str type, int count, int ffn, Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, "
      "str activation=\"swiglu\", float alpha=1.702, float limit=7.) -> Tensor");
}

void implement_packed(torch::stable::detail::StableLibrary& m) {
  implement(m, "weight_pack", TORCH_BOX(&weight_pack));
  implement(m, "linear_packed", TORCH_BOX(&linear_packed));
  implement(m, "experts_packed", TORCH_BOX(&experts_packed));
}

}  // namespace millrace::torch_ops
