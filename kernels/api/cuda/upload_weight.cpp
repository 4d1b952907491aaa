// Weights of the C API on a GPU: rows go from host memory through a staging area at the end of the caller's
// memory, and are repacked into tiles there, piece by piece, in order on the default stream.
#include <algorithm>

#include "kernels/api/cuda/cuda_device.h"

namespace millrace::api::gpu {
namespace {

constexpr int64_t kStagedBytes = int64_t{32} << 20;  // of rows in the file's encoding, at a time

struct ScaleShape {
  int64_t rows = 0, per_row = 0;
  size_t row_bytes = 0;  // on the device
  int64_t stride = 0;    // on the host
};
ScaleShape scale_shape(const TensorView& view) {
  const ScaleGrid& grid = view.scales;
  if (grid.data == nullptr) return {};
  const int64_t per_row = (view.cols() + grid.cols_per_scale - 1) / grid.cols_per_scale;
  return {(view.rows() + grid.rows_per_scale - 1) / grid.rows_per_scale, per_row,
          bytes_of(grid.type, per_row), static_cast<int64_t>(bytes_of(grid.type, grid.scales_per_row))};
}

int64_t experts_of(const TensorView& view) { return view.rank == 3 ? view.shape[0] : 1; }

// Rows that are repacked together: whole tiles.
int64_t staged_rows(const TensorView& view) {
  const auto row_bytes = static_cast<int64_t>(bytes_of(view.type, view.cols()));
  const int64_t fit = std::max<int64_t>(1, kStagedBytes / std::max<int64_t>(1, row_bytes) / cuda::kTileRows);
  const int64_t all = (view.rows() + cuda::kTileRows - 1) / cuda::kTileRows;
  return std::min(fit, all) * cuda::kTileRows;
}

// MXFP4's scales lie beside each row and are staged with it; other grids are there as a whole.
bool stages_scales(const TensorView& view) { return view.type == DType::kMXFP4Split; }

struct WeightMemory {
  WeightMemory(DeviceArena& arena, const TensorView& view)
      : shape(cuda::packed_shape(view.type, view.rows() / experts_of(view), view.cols())) {
    const size_t row_bytes = bytes_of(view.type, view.cols());
    const ScaleShape scale = scale_shape(view);
    const bool packed = shape.format != cuda::PackedFormat::kNone;
    const auto rows = static_cast<size_t>(packed ? staged_rows(view) : view.rows());
    if (packed) {
      tiles_bytes = static_cast<size_t>(experts_of(view)) * static_cast<size_t>(shape.tiles_per_expert) *
                    shape.tile_bytes;
      tiles = arena.take<uint8_t>(tiles_bytes);
    }
    raw = arena.take<uint8_t>(rows * row_bytes);
    scales = arena.take<uint8_t>((stages_scales(view) && packed ? rows : static_cast<size_t>(scale.rows)) *
                                 scale.row_bytes);
  }
  cuda::PackedMatrix shape;
  size_t tiles_bytes = 0;
  uint8_t* tiles = nullptr;
  uint8_t *raw, *scales;  // packed: the staging area; else where the weight stays
};

void copy_rows(uint8_t* to, size_t row_bytes, const std::byte* from, int64_t stride, int64_t rows) {
  if (rows == 0 || row_bytes == 0) return;
  MILLRACE_CUDA_TRY(cudaMemcpy2DAsync(to, row_bytes, from, static_cast<size_t>(stride), row_bytes,
                                      static_cast<size_t>(rows), cudaMemcpyHostToDevice, nullptr));
}

void describe_scales(const TensorView& view, uint8_t* at, cuda::DeviceMatrix& matrix) {
  matrix.scales = at;
  matrix.scale_type = view.scales.type;
  matrix.rows_per_scale = view.scales.rows_per_scale;
  matrix.cols_per_scale = view.scales.cols_per_scale;
  matrix.scales_per_row = scale_shape(view).per_row;
}

void copy_scales(const TensorView& view, int64_t first, int64_t rows, uint8_t* to,
                 cuda::DeviceMatrix& matrix) {
  const ScaleShape shape = scale_shape(view);
  copy_rows(to, shape.row_bytes, view.scales.data + first * shape.stride, shape.stride, rows);
  describe_scales(view, to, matrix);
}

// Rows of an expert in the file's encoding, where they are staged or stay.
cuda::DeviceMatrix raw_matrix(const TensorView& view, const WeightMemory& memory) {
  cuda::DeviceMatrix raw;
  raw.data = memory.raw;
  raw.rows = view.rows() / experts_of(view);
  raw.cols = view.cols();
  raw.row_bytes = static_cast<int64_t>(bytes_of(view.type, view.cols()));
  raw.type = view.type;
  return raw;
}

// Rows [first, first + rows) of the view, to the tiles they are.
void repack(const TensorView& view, const WeightMemory& memory, cuda::DeviceMatrix raw, int64_t first,
            int64_t rows, uint8_t* tiles, const cuda::Launch& at) {
  copy_rows(memory.raw, bytes_of(view.type, view.cols()), view.data + first * view.row_stride_bytes,
            view.row_stride_bytes, rows);
  raw.rows = rows;
  if (stages_scales(view)) copy_scales(view, first, rows, memory.scales, raw);
  cuda::launch_repack(raw, first, cuda::packed_shape(view.type, rows, view.cols()), tiles, at);
}

}  // namespace

size_t CudaDevice::weight_bytes(const TensorView& matrix) const {
  DeviceArena count(nullptr);
  const WeightMemory memory(count, matrix);
  return count.used();
}

size_t CudaDevice::weight_kept_bytes(const TensorView& matrix) const {
  DeviceArena count(nullptr);
  const WeightMemory memory(count, matrix);
  return memory.shape.format == cuda::PackedFormat::kNone ? count.used() : memory.tiles_bytes;
}

std::unique_ptr<mr_weight> CudaDevice::adopt_weight(const TensorView& view, void* memory_base) {
  DeviceArena arena(memory_base);
  const WeightMemory memory(arena, view);
  auto weight = std::make_unique<CudaDeviceWeight>(*this);
  weight->packed = memory.shape;
  weight->packed.tiles = memory.tiles;
  if (!weight->is_packed()) {
    cuda::DeviceMatrix& raw = weight->matrix;
    raw = raw_matrix(view, memory);
    if (view.scales.data != nullptr) describe_scales(view, memory.scales, raw);
  }
  return weight;
}

std::unique_ptr<mr_weight> CudaDevice::make_weight(const TensorView& view, void* memory_base) {
  const cuda::Launch launch = at(nullptr);
  DeviceArena arena(memory_base);
  const WeightMemory memory(arena, view);
  auto weight = std::make_unique<CudaDeviceWeight>(*this);
  const int64_t rows = view.rows() / experts_of(view);
  cuda::DeviceMatrix raw = raw_matrix(view, memory);
  const bool has_grid = view.scales.data != nullptr;
  weight->packed = memory.shape;
  if (!weight->is_packed()) {
    copy_rows(memory.raw, static_cast<size_t>(raw.row_bytes), view.data, view.row_stride_bytes, view.rows());
    if (has_grid) copy_scales(view, 0, scale_shape(view).rows, memory.scales, raw);
    weight->matrix = raw;
  } else {
    if (has_grid && !stages_scales(view)) copy_scales(view, 0, scale_shape(view).rows, memory.scales, raw);
    weight->packed.tiles = memory.tiles;
    // Whole tiles: the experts' rows are one long run. Else each expert's last tile is padded.
    const int64_t run = rows % cuda::kTileRows == 0 ? view.rows() : rows, piece = staged_rows(view);
    for (int64_t begin = 0; begin < view.rows(); begin += run) {
      for (int64_t done = 0; done < run; done += piece) {
        const int64_t tile = begin / run * memory.shape.tiles_per_expert + done / cuda::kTileRows;
        repack(view, memory, raw, begin + done, std::min(piece, run - done),
               memory.tiles + tile * memory.shape.tile_bytes, launch);
      }
    }
  }
  // The host memory may go, and other streams may read the weight.
  MILLRACE_CUDA_TRY(cudaStreamSynchronize(nullptr));
  return weight;
}

}  // namespace millrace::api::gpu
