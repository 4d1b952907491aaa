// torch's tensors as the kernel library's arguments, through torch's stable ABI alone: one binary for every
// torch from 2.10 on (docs/python_kernels.md).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "direct_call.h"
#include "python/kernels/src/device_pool.h"

namespace millrace::torch_ops {

// A `str` of a schema. What torch's headers make of one is never freed, up to 2.13 at least.
struct Text : std::string {
  using std::string::string;
};

}  // namespace millrace::torch_ops

namespace torch::stable::detail {

template <>
struct ToImpl<millrace::torch_ops::Text> {
  static millrace::torch_ops::Text call(StableIValue value, uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    millrace::torch_ops::Text text(data, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

}  // namespace torch::stable::detail

namespace millrace::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Throws std::runtime_error: "millrace::OP: what".
[[noreturn]] void refuse(const char* op, const std::string& what);

// F32, F16, BF16, F8_E4M3, F8_E5M2; anything else is refused by the argument's name.
mr_dtype type_of(const Tensor& x, const char* op, const char* name);
void require_type(const Tensor& x, ScalarType type, const char* op, const char* name, const char* type_name);
void require_shape(const Tensor& x, std::initializer_list<int64_t> shape, const char* op, const char* name);
void require_same_device(const Tensor& x, const Tensor& as, const char* op, const char* name);
std::string shape_text(const Tensor& x);
std::vector<int64_t> sizes_of(const Tensor& x);

// Torch's own arrays of a tensor, as long as that lives: its ABI takes a call for every question otherwise.
struct Shape {
  explicit Shape(const Tensor& x);
  int64_t dims;
  int64_t *sizes = nullptr, *strides = nullptr;  // [dims]
};

// Uninitialized, contiguous, on the device of `like`, of its type unless told.
Tensor empty(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like);
Tensor empty(const std::vector<int64_t>& sizes, const Tensor& like);
bool same_type(const Tensor& x, const Tensor& y);

// The device that a tensor lies on, and torch's current stream of it.
bindings::DeviceLease lease(const Tensor& like);

// Bytes that a call needs while it runs, aligned to 256. One of a lease at a time.
class Workspace {
 public:
  Workspace(size_t bytes, const Tensor& like);                          // torch's memory
  Workspace(size_t bytes, const Tensor& like, bindings::DeviceLease&);  // on a CPU the lease's scratch
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Tensor part(size_t count) const;  // the first so many bytes, of torch's memory

 private:
  MaybeTensor memory_;
  void* data_ = nullptr;
  size_t bytes_;
};

// A tensor [..., cols] as [rows, cols]; a copy where its rows are not evenly spaced or columns are apart.
struct Rows {
  Rows() = default;
  Rows(const Tensor& x, const char* op, const char* name);
  mr_rows view{nullptr, MR_F32, 0};
  int64_t rows = 0, cols = 0;
  MaybeTensor keep;
};
// Of an output that empty() made.
mr_rows rows_of(const Tensor& out, const char* op);

// A vector, copied where its elements are apart. None: no data.
struct Vector {
  Vector() = default;
  Vector(const MaybeTensor& x, int64_t size, const Tensor& like, const char* op, const char* name);
  mr_vector view{nullptr, MR_F32};
  MaybeTensor keep;
};

// int32 [count] or float32 [count], contiguous; `keep` holds what had to be copied. On a CPU int64 is taken
// too: what int32 does not hold becomes its largest or least number, which is out of every range that is
// checked.
const int32_t* int32_of(const Tensor& x, int64_t count, const Tensor& like, MaybeTensor& keep, const char* op,
                        const char* name);
const float* float32_of(const Tensor& x, int64_t count, const Tensor& like, MaybeTensor& keep, const char* op,
                        const char* name);

// Each source file's operations.
void define_attention(torch::stable::detail::StableLibrary& m);
void define_fused(torch::stable::detail::StableLibrary& m);
void define_losses(torch::stable::detail::StableLibrary& m);
void define_products(torch::stable::detail::StableLibrary& m);
void define_experts(torch::stable::detail::StableLibrary& m);
void define_lowbit(torch::stable::detail::StableLibrary& m);
void define_packed(torch::stable::detail::StableLibrary& m);
// Makes a kernel known to torch, for a dispatch key, and to millrace_torch_kernel.
void implement(torch::stable::detail::StableLibrary& m, const char* name, BoxedKernel kernel);
// The kernels of each source file.
void implement_attention(torch::stable::detail::StableLibrary& m);
void implement_fused(torch::stable::detail::StableLibrary& m);
void implement_losses(torch::stable::detail::StableLibrary& m);
void implement_products(torch::stable::detail::StableLibrary& m);
void implement_experts(torch::stable::detail::StableLibrary& m);
void implement_lowbit(torch::stable::detail::StableLibrary& m);
void implement_packed(torch::stable::detail::StableLibrary& m);

}  // namespace millrace::torch_ops
