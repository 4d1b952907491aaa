#include "model/vision_tensors.h"

#include <fmt/format.h>

#include "base/error.h"
#include "kernels/quant/codec.h"

namespace millrace {

TensorView require_tensor(const io::Checkpoint& checkpoint, const std::string& name,
                          const std::vector<int64_t>& shape) {
  const TensorView* view = checkpoint.find_tensor(name);
  if (view == nullptr) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found nothing, expected it for images",
                checkpoint.path(), name);
  }
  TensorView out = *view;
  int64_t elements = 1, wanted = 1;
  for (int i = 0; i < view->rank; ++i) elements *= view->shape[static_cast<size_t>(i)];
  for (const int64_t n : shape) wanted *= n;
  const bool same = elements == wanted && view->shape[0] == shape[0];
  if (!same || (view->rank != static_cast<int>(shape.size()) && info(view->type).block_elements != 1)) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found {} elements, the slowest of {}, expected [{}]",
                checkpoint.path(), name, elements, view->shape[0], fmt::join(shape, ", "));
  }
  if (view->rank > static_cast<int>(shape.size())) {  // [out, 3, p, p]: rows of a matrix
    out.rank = 2;
    out.shape = {shape[0], shape[1], 1, 1};
    out.row_stride_bytes = static_cast<int64_t>(bytes_of(view->type, shape[1]));
  }
  return out;
}

TensorView part_of(const TensorView& view, int64_t first, int64_t count) {
  TensorView out = view;
  out.data +=
      view.rank == 1 ? static_cast<int64_t>(bytes_of(view.type, first)) : first * view.row_stride_bytes;
  out.shape[0] = count;
  if (view.rank == 1) out.row_stride_bytes = static_cast<int64_t>(bytes_of(view.type, count));
  return out;
}

std::vector<float> floats_of(const TensorView& view) {
  std::vector<float> out(static_cast<size_t>(view.rows() * view.cols()));
  for (int64_t row = 0; row < view.rows(); ++row)
    quant::dequantize_row(view, row, out.data() + row * view.cols());
  return out;
}

void add_scaled(float* y, float x, const float* row, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] += x * row[i];
}

}  // namespace millrace
