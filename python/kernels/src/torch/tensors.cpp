#include "tensors.h"

#include <dlfcn.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace millrace::torch_ops {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;  // of the C API

// torch's numbers of the types that most tensors have. A ScalarType comes of a question per type there is.
struct TypeCodes {
  int32_t f32 = aoti_torch_dtype_float32(), f16 = aoti_torch_dtype_float16(),
          bf16 = aoti_torch_dtype_bfloat16(), i32 = aoti_torch_dtype_int32(), i64 = aoti_torch_dtype_int64();
};
const TypeCodes& type_codes() {
  static const TypeCodes codes;
  return codes;
}
int32_t type_code(const Tensor& x) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &code));
  return code;
}
int32_t code_of(ScalarType type) {
  if (type == ScalarType::Float) return type_codes().f32;
  if (type == ScalarType::Int) return type_codes().i32;
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

int32_t device_type_of(const Tensor& x) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  return type;
}

// libtorch_cuda is not linked: a torch without CUDA has none.
mr_stream current_cuda_stream(int32_t index) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Getter>(symbol);
  }();
  if (getter == nullptr)
    throw std::runtime_error("millrace: this torch has no aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(index, &stream));
  return static_cast<mr_stream>(stream);
}

// Elements from one row of [rows, cols] to the next, or -1: the dimensions before the last do not step
// evenly.
int64_t row_stride(const Shape& x) {
  int64_t stride = -1, below = 1;
  for (int64_t d = x.dims - 2; d >= 0; --d) {
    if (x.sizes[d] == 1) continue;
    if (stride < 0) {
      stride = x.strides[d];
    } else if (x.strides[d] != stride * below) {
      return -1;
    }
    below *= x.sizes[d];
  }
  return stride < 0 ? x.sizes[x.dims - 1] : stride;
}

template <class T>
const T* words_of(const Tensor& x, int64_t count, const Tensor& like, MaybeTensor& keep, const char* op,
                  const char* name) {
  if (x.numel() != count) {
    refuse(op, std::string(name) + " has shape " + shape_text(x) + ", expected " + std::to_string(count) +
                   " elements");
  }
  require_same_device(x, like, op, name);
  keep = x.is_contiguous() ? x : torch::stable::contiguous(x);
  return static_cast<const T*>(keep->data_ptr());
}

const int32_t* narrowed(const int64_t* wide, int64_t count, const Tensor& like, MaybeTensor& keep) {
  constexpr int64_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  keep = empty({count}, ScalarType::Int, like);
  auto* const narrow = static_cast<int32_t*>(keep->data_ptr());
  for (int64_t i = 0; i < count; ++i) narrow[i] = static_cast<int32_t>(std::clamp(wide[i], kLeast, kMost));
  return narrow;
}

}  // namespace

void refuse(const char* op, const std::string& what) {
  throw std::runtime_error(std::string("millrace::") + op + ": " + what);
}

mr_dtype type_of(const Tensor& x, const char* op, const char* name) {
  const int32_t code = type_code(x);
  if (code == type_codes().f32) return MR_F32;
  if (code == type_codes().f16) return MR_F16;
  if (code == type_codes().bf16) return MR_BF16;
  switch (x.scalar_type()) {
    case ScalarType::Float8_e4m3fn:
      return MR_F8_E4M3;
    case ScalarType::Float8_e5m2:
      return MR_F8_E5M2;
    default:
      refuse(op, std::string(name) + " has an unsupported dtype, expected float32, float16 or bfloat16");
  }
}

void require_type(const Tensor& x, ScalarType type, const char* op, const char* name, const char* type_name) {
  if (type_code(x) != code_of(type))
    refuse(op, std::string(name) + " has another dtype, expected " + type_name);
}

std::vector<int64_t> sizes_of(const Tensor& x) {
  const Shape shape(x);
  return {shape.sizes, shape.sizes + shape.dims};
}

Shape::Shape(const Tensor& x) : dims(x.dim()) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(x.get(), &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(x.get(), &strides));
}

std::string shape_text(const Tensor& x) {
  std::string text = "[";
  for (const int64_t size : sizes_of(x)) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

void require_shape(const Tensor& x, std::initializer_list<int64_t> shape, const char* op, const char* name) {
  const Shape found(x);
  if (std::equal(found.sizes, found.sizes + found.dims, shape.begin(), shape.end())) return;
  std::string expected;
  for (const int64_t size : shape) expected += (expected.empty() ? "" : ", ") + std::to_string(size);
  refuse(op, std::string(name) + " has shape " + shape_text(x) + ", expected [" + expected + "]");
}

void require_same_device(const Tensor& x, const Tensor& as, const char* op, const char* name) {
  if (device_type_of(x) != device_type_of(as) || x.get_device_index() != as.get_device_index()) {
    refuse(op, std::string(name) + " lies on another device than the first argument");
  }
}

namespace {

Tensor empty_of(const std::vector<int64_t>& sizes, int32_t dtype, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d > 0; --d) {
    strides[d - 1] = step;
    step *= sizes[d - 1] == 0 ? 1 : sizes[d - 1];
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, device_type_of(like),
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

}  // namespace

Tensor empty(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
  return empty_of(sizes, code_of(type), like);
}

Tensor empty(const std::vector<int64_t>& sizes, const Tensor& like) {
  return empty_of(sizes, type_code(like), like);
}

bool same_type(const Tensor& x, const Tensor& y) { return type_code(x) == type_code(y); }

bindings::DeviceLease lease(const Tensor& like) {
  if (like.is_cpu()) {
    uint32_t threads = 0;
    TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
    return bindings::DeviceLease::cpu(static_cast<int>(threads));
  }
  const int32_t index = like.get_device_index();
  return bindings::DeviceLease::cuda(index, current_cuda_stream(index));
}

Workspace::Workspace(size_t bytes, const Tensor& like) : bytes_(bytes) {
  if (bytes == 0) return;
  memory_ = empty({static_cast<int64_t>(bytes) + kWorkspaceAlignment}, ScalarType::Byte, like);
  const auto address = reinterpret_cast<uintptr_t>(memory_->data_ptr());
  const uintptr_t aligned = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  data_ = static_cast<char*>(memory_->data_ptr()) + (aligned - address);
}

Tensor Workspace::part(size_t count) const {
  Tensor whole = memory_.value();
  const auto begin = static_cast<std::byte*>(data_) - static_cast<std::byte*>(whole.data_ptr());
  return torch::stable::narrow(whole, 0, begin, static_cast<int64_t>(count));
}

Workspace::Workspace(size_t bytes, const Tensor& like, bindings::DeviceLease& device) : bytes_(bytes) {
  if (like.is_cpu()) {
    data_ = device.scratch(bytes);
  } else {
    *this = Workspace(bytes, like);
  }
}

Rows::Rows(const Tensor& x, const char* op, const char* name) {
  const mr_dtype type = type_of(x, op, name);
  const Shape shape(x);
  if (shape.dims == 0) refuse(op, std::string(name) + " is a scalar, expected a last dimension");
  cols = shape.sizes[shape.dims - 1];
  rows = 1;
  for (int64_t d = 0; d + 1 < shape.dims; ++d) rows *= shape.sizes[d];
  keep = x;
  int64_t stride = cols > 1 && shape.strides[shape.dims - 1] != 1 ? -1 : row_stride(shape);
  if (stride < 0 || (stride < cols && rows > 1)) {
    keep = torch::stable::contiguous(x);
    stride = cols;
  }
  view = {keep->data_ptr(), type, stride < cols ? cols : stride};
}

mr_rows rows_of(const Tensor& out, const char* op) { return {out.data_ptr(), type_of(out, op, "output"), 0}; }

Vector::Vector(const MaybeTensor& x, int64_t size, const Tensor& like, const char* op, const char* name) {
  if (!x.has_value()) return;
  require_shape(*x, {size}, op, name);
  require_same_device(*x, like, op, name);
  keep = x->is_contiguous() ? *x : torch::stable::contiguous(*x);
  view = {keep->data_ptr(), type_of(*x, op, name)};
}

const int32_t* int32_of(const Tensor& x, int64_t count, const Tensor& like, MaybeTensor& keep, const char* op,
                        const char* name) {
  if (x.is_cpu() && type_code(x) == type_codes().i64) {
    MaybeTensor wide;
    const int64_t* from = words_of<int64_t>(x, count, like, wide, op, name);
    return narrowed(from, count, like, keep);
  }
  require_type(x, ScalarType::Int, op, name, x.is_cpu() ? "int32 or int64" : "int32");
  return words_of<int32_t>(x, count, like, keep, op, name);
}

const float* float32_of(const Tensor& x, int64_t count, const Tensor& like, MaybeTensor& keep, const char* op,
                        const char* name) {
  require_type(x, ScalarType::Float, op, name, "float32");
  return words_of<float>(x, count, like, keep, op, name);
}

}  // namespace millrace::torch_ops
