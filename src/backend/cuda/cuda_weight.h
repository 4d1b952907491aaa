// A weight on the device, and the way there.
#pragma once

#include <array>
#include <map>

#include "backend/backend.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/quant/packed_tiles.h"
#include "kernels/quant/fp8_patches.h"

namespace millrace::cuda {

struct CudaWeight final : Weight {
  DeviceBuffer
      values;  // matrices: tiles (quant/packed_tiles.h) or the file's encoding, rows packed; vectors: float32
  DeviceBuffer scale_grid;   // scales that lie beside the values
  DeviceBuffer floats;       // 16-bit matrices of few rows, as float32 too: the router's kernels read those
  DeviceBuffer dequantized;  // 8-bit matrices that prompts multiply, where there is memory: bf16
                             // (quant/packed_tiles.h)
  DeviceBuffer fp8_codes, fp8_scales;  // of a kFp8 (kernels/quant/fp8_patches.h)
  DeviceMatrix matrix;  // matrices: the shape and type; in the file's encoding points into the two above
  PackedMatrix packed;  // matrices in tiles; format kNone else

  const float* vector() const { return values.as<const float>(); }
  // A matrix's rows as float32, or null.
  const float* float_rows() const {
    return packed.format == PackedFormat::kNone && matrix.type == DType::kF32 ? values.as<const float>()
                                                                              : floats.as<const float>();
  }
};

inline const CudaWeight& own(const Weight& weight) { return static_cast<const CudaWeight&>(weight); }

// Bytes `view` will take on the device, without those of a dequantized copy.
size_t device_weight_bytes(const TensorView& view, WeightUse use);
// Bytes of a dequantized copy of a matrix; 0: this GPU or this matrix has no use for one.
size_t device_dequantized_bytes(const TensorView& view, const Device& device);

// Copies weights to the device through a pinned buffer of two halves: one is filled from the file's mapping
// while the other travels. One caller at a time.
class WeightUploader {
 public:
  explicit WeightUploader(const Device& device);  // which must outlive it
  // Returns when the weight is on the device. Throws Error{kUnsupported} for a type that is no weight's,
  // Error {kBadInput} for a row that is not whole blocks, Error{kNoMemory}; each names the tensor.
  // fp8: of a kFp8, its codes.
  WeightPtr upload(const TensorView& view, WeightUse use, const quant::Fp8Patches* fp8 = nullptr);

 private:
  // `rows` rows of row_bytes, `stride` bytes apart at `source`, packed to `target` on the device.
  void copy_rows(const std::byte* source, int64_t rows, size_t row_bytes, int64_t stride, void* target);
  void upload_matrix(const TensorView& view, CudaWeight& weight);
  void upload_packed(const TensorView& view, CudaWeight& weight);
  void dequantize(const TensorView& view, CudaWeight& weight);  // what upload_packed has put there
  // Rows [first, first + count) of the view, all of one expert or whole tiles of several, to tiles.
  // grid: with the scales beside the values, where those have several rows each.
  void repack_rows(const TensorView& view, const DeviceMatrix& grid, int64_t first, int64_t count,
                   uint8_t* tiles);
  void upload_scales(const TensorView& view, CudaWeight& weight);
  // That of an IQ type on the device, uploaded at its first weight; null for a type without.
  const int8_t* codebook(DType type);
  DeviceBuffer upload_floats(const TensorView& view);
  DeviceBuffer upload_bytes(std::span<const std::byte> bytes, const std::string& name);

  const Device& device_;
  Stream stream_;
  PinnedBuffer staging_;
  DeviceBuffer raw_, raw_scales_;  // rows in the file's encoding on their way to tiles
  std::map<DType, DeviceBuffer> codebooks_;
  std::array<Event, 2> sent_;  // the copy out of each half is done
  int half_ = 0;
};

}  // namespace millrace::cuda
