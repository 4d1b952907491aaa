#include "kernels/quant/fp8_patches.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/float_bits.h"
#include "kernels/quant/codec.h"

namespace millrace::quant {
namespace {

float largest_of(const float* x, int64_t count, float so_far) {
  for (int64_t i = 0; i < count; ++i) so_far = std::max(so_far, std::fabs(x[i]));
  return so_far;
}

// The scale of values up to `largest`; `by`: what makes codes of them.
float scale_of(float largest, float& by) {
  const bool none = largest < kFp8Least;
  by = none ? 0.0f : kFp8Largest / largest;
  return none ? 0.0f : largest / kFp8Largest;
}

// Has the view E4M3 codes with scales of which no patch sees two?
bool has_own_scales(const TensorView& view) {
  const ScaleGrid& grid = view.scales;
  if (view.type != DType::kF8E4M3 || grid.data == nullptr || view.matrix_rows != 0) return false;
  const auto whole = [](int64_t per_scale, int64_t size) {
    return per_scale % kFp8Patch == 0 || per_scale >= size;
  };
  return whole(grid.rows_per_scale, grid.first_row + view.rows()) &&
         whole(grid.cols_per_scale, view.cols()) && grid.first_row % kFp8Patch == 0;
}

float patch_scale(const ScaleGrid& grid, int64_t row, int64_t col) {
  const int64_t at =
      (grid.first_row + row) / grid.rows_per_scale * grid.scales_per_row + col / grid.cols_per_scale;
  float scale = 0.0f;
  if (grid.type == DType::kF32) {
    std::memcpy(&scale, grid.data + at * 4, sizeof(scale));
    return scale;
  }
  BFloat16 bits;
  std::memcpy(&bits, grid.data + at * 2, sizeof(bits));
  return to_float(bits);
}

}  // namespace

bool fits_fp8_patches(const TensorView& view) {
  return view.rank == 2 && view.type != DType::kF32 && view.rows() % 4 == 0 && view.cols() % 32 == 0;
}

size_t fp8_patches_bytes(const TensorView& view) {
  const Fp8Patches shape{view.rows(), view.cols(), {}, {}};
  return static_cast<size_t>(view.elements()) +
         static_cast<size_t>(shape.patch_rows() * shape.patch_cols()) * sizeof(float);
}

Fp8Patches shaped_fp8_patches(const TensorView& view) {
  Fp8Patches to{view.rows(), view.cols(), {}, {}};
  to.codes.resize(static_cast<size_t>(view.elements()));
  to.scales.resize(static_cast<size_t>(to.patch_rows() * to.patch_cols()));
  return to;
}

void fill_fp8_patches(const TensorView& view, int64_t patch_row, Fp8Patches& to) {
  const int64_t cols = view.cols(), first = patch_row * kFp8Patch,
                end = std::min(first + kFp8Patch, view.rows());
  float* const scales = to.scales.data() + patch_row * to.patch_cols();
  uint8_t* const codes = to.codes.data() + first * cols;
  if (has_own_scales(view)) {
    for (int64_t r = first; r < end; ++r)
      std::memcpy(codes + (r - first) * cols, view.row(r), static_cast<size_t>(cols));
    for (int64_t p = 0; p < to.patch_cols(); ++p) scales[p] = patch_scale(view.scales, first, p * kFp8Patch);
    return;
  }
  std::vector<float> values(static_cast<size_t>((end - first) * cols));
  for (int64_t r = first; r < end; ++r) dequantize_row(view, r, values.data() + (r - first) * cols);
  for (int64_t p = 0; p < to.patch_cols(); ++p) {
    const int64_t at = p * kFp8Patch, width = std::min(kFp8Patch, cols - at);
    float largest = 0.0f, by = 0.0f;
    for (int64_t r = 0; r < end - first; ++r) largest = largest_of(&values[r * cols + at], width, largest);
    scales[p] = scale_of(largest, by);
    for (int64_t r = 0; r < end - first; ++r) {
      for (int64_t c = r * cols + at; c < r * cols + at + width; ++c)
        codes[c] = to_fp8_e4m3(values[c] * by).bits;
    }
  }
}

void fp8_row(const float* x, int64_t cols, uint8_t* codes, float* scales) {
  for (int64_t at = 0; at < cols; at += kFp8Patch) {
    const int64_t width = std::min(kFp8Patch, cols - at);
    float by = 0.0f;
    scales[at / kFp8Patch] = scale_of(largest_of(x + at, width, 0.0f), by);
    for (int64_t i = at; i < at + width; ++i) codes[i] = to_fp8_e4m3(x[i] * by).bits;
  }
}

}  // namespace millrace::quant
