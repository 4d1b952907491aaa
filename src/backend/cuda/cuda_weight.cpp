#include "backend/cuda/cuda_weight.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/quant/codec.h"
#include "kernels/quant/low_bits.h"

namespace millrace::cuda {
namespace {

// Large enough that a copy over PCIe (some 50 GB/s) hides its start, small enough to pin without a thought.
constexpr size_t kHalfBytes = size_t{8} << 20;

// Rows in the file's encoding that wait on the device to be repacked.
constexpr size_t kRawBytes = size_t{32} << 20;

struct ScaleShape {
  int64_t rows = 0, per_row = 0;
  size_t row_bytes = 0;
};

// A rank's rows of a matrix may begin within a row of the grid, and those of several matrices lie apart:
// their scales are held one row for each row.
bool spreads_scales(const TensorView& view) { return view.matrix_rows != 0 || view.scales.first_row != 0; }
int64_t rows_per_scale(const TensorView& view) {
  return spreads_scales(view) ? 1 : view.scales.rows_per_scale;
}

ScaleShape scale_shape(const TensorView& view) {
  const ScaleGrid& grid = view.scales;
  if (grid.data == nullptr) return {};
  const int64_t rows = (view.rows() + rows_per_scale(view) - 1) / rows_per_scale(view);
  const int64_t per_row = (view.cols() + grid.cols_per_scale - 1) / grid.cols_per_scale;
  return {rows, per_row, bytes_of(grid.type, per_row)};
}

bool has_scale_grid(DType type) { return type == DType::kF8E4M3 || type == DType::kMXFP4Split; }

// Types whose rows no decoder of dequantize.cuh reads.
void check_type(const TensorView& view) {
  if (view.type == DType::kI32 || view.type == DType::kU8) {
    throw_error(ErrorCode::kUnsupported, "tensor {}: type {} cannot be a weight on device cuda", view.name,
                info(view.type).name);
  }
  // Types without a packed format of their own are multiplied with a factor where they are decoded.
  const bool decoded = view.type > DType::kQ4_Z;
  if (view.scales.data == nullptr || has_scale_grid(view.type) || decoded) return;
  throw_error(
      ErrorCode::kUnsupported,
      "tensor {}: type {} with scales beside it has no kernels on device cuda; run with --device cpu, or "
      "convert the file: millrace quantize FILE --type q4_k",
      view.name, info(view.type).name);
}

void check_view(const TensorView& view) {
  const DTypeInfo& type = info(view.type);
  check_type(view);
  if (view.cols() % type.block_elements != 0) {
    throw_error(ErrorCode::kBadInput, "tensor {}: rows of {} elements, expected a multiple of {} for type {}",
                view.name, view.cols(), type.block_elements, type.name);
  }
  if (view.type == DType::kMXFP4Split && view.scales.data == nullptr) {
    throw_error(ErrorCode::kBadInput, "tensor {}: type {} has no scales, expected one per 32 elements",
                view.name, type.name);
  }
}

int64_t experts_of(const TensorView& view) { return view.rank == 3 ? view.shape[0] : 1; }
int64_t expert_rows_of(const TensorView& view) {
  return experts_of(view) == 0 ? 0 : view.rows() / experts_of(view);
}

// Routers are small, and their scores decide: they are kept exact. (A matrix as small that is none costs
// little.)
constexpr int64_t kMaxRouterRows = 256;
bool keeps_floats(const TensorView& view, WeightUse use) {
  return use == WeightUse::kMatrix && view.rank == 2 && view.rows() <= kMaxRouterRows &&
         (view.type == DType::kF16 || view.type == DType::kBF16);
}

size_t packed_bytes(const TensorView& view) {
  const PackedMatrix shape = packed_shape(view.type, expert_rows_of(view), view.cols());
  return static_cast<size_t>(experts_of(view)) * static_cast<size_t>(shape.tiles_per_expert) *
         shape.tile_bytes;
}

}  // namespace

size_t device_weight_bytes(const TensorView& view, WeightUse use) {
  check_type(view);  // before anything is loaded
  if (use == WeightUse::kVector) return static_cast<size_t>(view.elements()) * sizeof(float);
  const size_t besides =
      (keeps_floats(view, use) ? static_cast<size_t>(view.elements()) * sizeof(float) : size_t{0}) +
      (use == WeightUse::kFp8 ? quant::fp8_patches_bytes(view) : size_t{0});
  if (packed_format(view.type, view.cols()) != PackedFormat::kNone) return packed_bytes(view) + besides;
  const ScaleShape scales = has_scale_grid(view.type) ? scale_shape(view) : ScaleShape{};
  return view.bytes() + static_cast<size_t>(scales.rows) * scales.row_bytes + besides;
}

size_t device_dequantized_bytes(const TensorView& view, const Device& device) {
  if (view.rank != 2 || !device.has_wgmma()) return 0;
  return dequantized_bytes(packed_shape(view.type, view.rows(), view.cols()));
}

WeightUploader::WeightUploader(const Device& device)
    : device_(device), staging_(2 * kHalfBytes, "the upload buffer") {}

WeightPtr WeightUploader::upload(const TensorView& view, WeightUse use, const quant::Fp8Patches* fp8) {
  check_view(view);
  device_.use();
  auto weight = std::make_unique<CudaWeight>();
  weight->experts = experts_of(view);
  weight->cols = view.cols();
  weight->rows = expert_rows_of(view);
  if (use == WeightUse::kVector) {
    weight->values = upload_floats(view);
  } else if (packed_format(view.type, view.cols()) != PackedFormat::kNone) {
    upload_packed(view, *weight);
  } else {
    upload_matrix(view, *weight);
    if (has_scale_grid(view.type) && view.scales.data != nullptr) upload_scales(view, *weight);
  }
  if (keeps_floats(view, use)) weight->floats = upload_floats(view);
  if (use == WeightUse::kDequantized) dequantize(view, *weight);
  if (fp8 != nullptr) {
    weight->fp8_codes = upload_bytes(std::as_bytes(std::span(fp8->codes)), view.name);
    weight->fp8_scales = upload_bytes(std::as_bytes(std::span(fp8->scales)), view.name);
  }
  stream_.synchronize();
  weight->copied = true;
  return weight;
}

void WeightUploader::upload_matrix(const TensorView& view, CudaWeight& weight) {
  const size_t row_bytes = bytes_of(view.type, view.cols());
  weight.values = DeviceBuffer(view.bytes(), view.name.c_str());
  const int64_t run = view.matrix_rows == 0 ? view.rows() : weight.rows;
  for (int64_t begin = 0; begin < view.rows(); begin += run) {
    copy_rows(view.row(begin), run, row_bytes, view.row_stride_bytes,
              weight.values.as<std::byte>() + static_cast<size_t>(begin) * row_bytes);
  }
  weight.matrix.data = weight.values.as<const uint8_t>();
  weight.matrix.rows = weight.rows;
  weight.matrix.cols = weight.cols;
  weight.matrix.row_bytes = static_cast<int64_t>(row_bytes);
  weight.matrix.type = view.type;
}

void WeightUploader::upload_packed(const TensorView& view, CudaWeight& weight) {
  weight.packed = packed_shape(view.type, weight.rows, weight.cols);
  weight.matrix.type = view.type;
  weight.matrix.rows = weight.rows;
  weight.matrix.cols = weight.cols;
  weight.values = DeviceBuffer(packed_bytes(view), view.name.c_str());
  auto* const tiles = weight.values.as<uint8_t>();
  weight.packed.tiles = tiles;
  const size_t row_bytes = bytes_of(view.type, view.cols());
  if (row_bytes == 0) return;
  // A grid whose scales have several rows each is there as a whole; MXFP4's go piece by piece.
  if (view.type != DType::kMXFP4Split && view.scales.data != nullptr) upload_scales(view, weight);
  const int64_t piece =
      std::max<int64_t>(1, static_cast<int64_t>(kRawBytes / row_bytes) / kTileRows) * kTileRows;
  // Whole tiles: the experts' rows are one long run. Else each expert's last tile is padded.
  const int64_t run = weight.rows % kTileRows == 0 && view.matrix_rows == 0 ? view.rows() : weight.rows;
  for (int64_t begin = 0; begin < view.rows(); begin += run) {
    for (int64_t done = 0; done < run; done += piece) {
      const int64_t tile =
          begin / std::max<int64_t>(1, run) * weight.packed.tiles_per_expert + done / kTileRows;
      repack_rows(view, weight.matrix, begin + done, std::min(piece, run - done),
                  tiles + tile * weight.packed.tile_bytes);
    }
  }
  if (weight.scale_grid.bytes() == 0) return;
  stream_.synchronize();  // the last piece has been repacked
  weight.scale_grid = DeviceBuffer();
  weight.matrix.scales = nullptr;
}

void WeightUploader::dequantize(const TensorView& view, CudaWeight& weight) {
  const size_t bytes = device_dequantized_bytes(view, device_);
  MILLRACE_CHECK(bytes > 0);  // else it is a kMatrix
  weight.dequantized = DeviceBuffer(bytes, view.name.c_str());
  launch_dequantize(weight.packed, weight.dequantized.as<uint8_t>(), {device_, stream_.get()});
  weight.packed.dequantized = weight.dequantized.as<const uint8_t>();
}

void WeightUploader::repack_rows(const TensorView& view, const DeviceMatrix& grid, int64_t first,
                                 int64_t count, uint8_t* tiles) {
  const size_t row_bytes = bytes_of(view.type, view.cols());
  const auto grow = [&](DeviceBuffer& buffer, size_t bytes) {
    if (buffer.bytes() >= bytes) return;
    stream_.synchronize();  // the last piece may still be read
    buffer = DeviceBuffer(bytes, view.name.c_str());
  };
  DeviceMatrix raw = grid;
  raw.type = view.type;
  raw.rows = count;
  raw.cols = view.cols();
  raw.row_bytes = static_cast<int64_t>(row_bytes);
  grow(raw_, std::max(kRawBytes, static_cast<size_t>(count) * row_bytes));
  copy_rows(view.row(first), count, row_bytes, view.row_stride_bytes, raw_.as<void>());
  raw.data = raw_.as<const uint8_t>();
  raw.codebook = codebook(view.type);
  if (view.type == DType::kMXFP4Split) {  // its scales beside it: a byte per 32 columns
    const ScaleShape shape = scale_shape(view);
    const auto stride = static_cast<int64_t>(bytes_of(view.scales.type, view.scales.scales_per_row));
    grow(raw_scales_, static_cast<size_t>(count) * shape.row_bytes);
    copy_rows(view.scales.data + view.data_row(first) * stride, count, shape.row_bytes, stride,
              raw_scales_.as<void>());
    raw.scales = raw_scales_.as<const uint8_t>();
    raw.scales_per_row = shape.per_row;
  }
  launch_repack(raw, first, packed_shape(view.type, count, view.cols()), tiles, {device_, stream_.get()});
}

const int8_t* WeightUploader::codebook(DType type) {
  const std::span<const int8_t> book = quant::codebook_of(type);
  if (book.empty()) return nullptr;
  DeviceBuffer& buffer = codebooks_[type];
  if (buffer.bytes() == 0) {
    buffer = DeviceBuffer(book.size_bytes(), "a codebook");
    const auto* source = reinterpret_cast<const std::byte*>(book.data());
    copy_rows(source, 1, book.size_bytes(), static_cast<int64_t>(book.size_bytes()), buffer.as<void>());
  }
  return buffer.as<const int8_t>();
}

void WeightUploader::upload_scales(const TensorView& view, CudaWeight& weight) {
  const ScaleGrid& grid = view.scales;
  const ScaleShape shape = scale_shape(view);
  const auto stride = static_cast<int64_t>(bytes_of(grid.type, grid.scales_per_row));
  weight.scale_grid = DeviceBuffer(static_cast<size_t>(shape.rows) * shape.row_bytes, view.name.c_str());
  if (spreads_scales(view)) {
    std::vector<std::byte> rows(static_cast<size_t>(shape.rows) * shape.row_bytes);
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t at = (grid.first_row + view.data_row(r)) / grid.rows_per_scale;
      std::memcpy(rows.data() + static_cast<size_t>(r) * shape.row_bytes, grid.data + at * stride,
                  shape.row_bytes);
    }
    copy_rows(rows.data(), shape.rows, shape.row_bytes, static_cast<int64_t>(shape.row_bytes),
              weight.scale_grid.as<void>());
  } else {
    copy_rows(grid.data, shape.rows, shape.row_bytes, stride, weight.scale_grid.as<void>());
  }
  weight.matrix.scales = weight.scale_grid.as<const uint8_t>();
  weight.matrix.scale_type = grid.type;
  weight.matrix.rows_per_scale = rows_per_scale(view);
  weight.matrix.cols_per_scale = grid.cols_per_scale;
  weight.matrix.scales_per_row = shape.per_row;
}

DeviceBuffer WeightUploader::upload_floats(const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.elements()));
  for (int64_t r = 0; r < view.rows(); ++r) quant::dequantize_row(view, r, values.data() + r * view.cols());
  return upload_bytes(std::as_bytes(std::span(values)), view.name);
}

DeviceBuffer WeightUploader::upload_bytes(std::span<const std::byte> bytes, const std::string& name) {
  DeviceBuffer buffer(bytes.size(), name.c_str());
  copy_rows(bytes.data(), 1, bytes.size(), static_cast<int64_t>(bytes.size()), buffer.as<void>());
  return buffer;
}

void WeightUploader::copy_rows(const std::byte* source, int64_t rows, size_t row_bytes, int64_t stride,
                               void* target) {
  if (stride == static_cast<int64_t>(row_bytes)) {  // no gaps: one long row
    row_bytes *= static_cast<size_t>(rows);
    rows = 1;
  }
  const size_t total = static_cast<size_t>(rows) * row_bytes;
  for (size_t done = 0; done < total;) {
    auto* const staging = staging_.as<std::byte>() + static_cast<size_t>(half_) * kHalfBytes;
    sent_[half_].wait();
    const size_t chunk = std::min(kHalfBytes, total - done);
    for (size_t filled = 0; filled < chunk;) {
      const size_t row = (done + filled) / row_bytes, in_row = (done + filled) % row_bytes;
      const size_t run = std::min(row_bytes - in_row, chunk - filled);
      std::memcpy(staging + filled, source + static_cast<int64_t>(row) * stride + in_row, run);
      filled += run;
    }
    MILLRACE_CUDA_TRY(cudaMemcpyAsync(static_cast<std::byte*>(target) + done, staging, chunk,
                                      cudaMemcpyHostToDevice, stream_.get()));
    sent_[half_].record(stream_);
    half_ ^= 1;
    done += chunk;
  }
}

}  // namespace millrace::cuda
