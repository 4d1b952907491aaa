// A weight of any type as a tensor: float32, float16, bfloat16 [.., rows, cols]; float8_e4m3fn with a grid of
// scales; block types as bytes, uint8 [.., rows, bytes of a row] (mxfp4_split: codes, and e8m0 scales uint8
// beside them).
#pragma once

#include "tensors.h"

namespace millrace::torch_ops {

constexpr int64_t kGrid = 128;  // rows and columns of E4M3 that share a scale, unless told

// A name of mr_dtype, or a refusal.
mr_dtype parse_type(const std::string& name, const char* op);

struct WeightTensor {
  // type: a name of mr_dtype, or "" for what the tensor's dtype says. scale_rows x scale_cols elements share
  // a scale.
  WeightTensor(const Tensor& weight, const std::string& type, const MaybeTensor& scales, int64_t scale_rows,
               int64_t scale_cols, const char* op, const char* name);
  mr_matrix matrix{};
  MaybeTensor keep, keep_scales;
};

// mr_weight for the time of a call. A CPU uses most types in place; what it repacks lies in `memory`.
class PreparedWeight {
 public:
  PreparedWeight(mr_device* device, const WeightTensor& of, const Tensor& like);
  ~PreparedWeight() { mr_weight_destroy(weight_); }
  PreparedWeight(const PreparedWeight&) = delete;
  PreparedWeight& operator=(const PreparedWeight&) = delete;
  const mr_weight* get() const { return weight_; }

 private:
  std::optional<Workspace> memory_;
  mr_weight* weight_ = nullptr;
};

mr_activation experts_activation(const std::string& name, const char* op);

// A layer of experts but for its weights: arguments checked and held, y made and zeroed.
class ExpertsCall {
 public:
  struct Biases {
    MaybeTensor gate, up, down;
  };
  struct Shape {
    int64_t count, ffn;
  };
  struct Weights {
    const mr_weight *gate, *up, *down;
  };
  ExpertsCall(const Tensor& x, const Tensor& chosen, const Tensor& weights, const Biases& biases, Shape shape,
              const char* op);
  void run(bindings::DeviceLease& device, const Weights& weights, const Tensor& like);
  mr_moe_args args{};
  Tensor y;  // float32 [rows, hidden]

 private:
  MaybeTensor keep_[6];
};

}  // namespace millrace::torch_ops
