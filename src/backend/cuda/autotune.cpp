// Random weights of the shape asked for, more of them than L2 holds, as a model's layers are; each variant is
// launched on them in turn, a few rounds, and its median counts. Its result is compared with the built-in
// choice's first.
#include "backend/cuda/autotune.h"

#include <algorithm>
#include <random>

#include "kernels/cuda/compare.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemv/gemv.h"

namespace millrace::cuda {
namespace {

constexpr size_t kColdBytes = size_t{160} << 20;  // of weights: three times L2
constexpr int64_t kChunkRows = 1024;              // repacked at a time, the same numbers again and again
constexpr int kRounds = 7;
constexpr double kWorthIt = 0.98;
constexpr int64_t kManyOutputs = 32768;  // the logits', which no model keeps dequantized

// The file's type that a format is made from here.
DType type_of(PackedFormat format) {
  switch (format) {
    case PackedFormat::kBf16:
      return DType::kBF16;
    case PackedFormat::kQ4:
      return DType::kQ4_0;
    case PackedFormat::kQ5:
      return DType::kQ5_0;
    case PackedFormat::kQ6:
      return DType::kQ6_K;
    default:
      return DType::kQ8_0;
  }
}

// Rows in the file's encoding: bf16 below one; codes with scales near 2^-7.
std::vector<uint8_t> random_rows(DType type, int64_t rows, int64_t cols, std::mt19937& random) {
  std::vector<uint8_t> bytes(static_cast<size_t>(rows) * bytes_of(type, cols));
  const auto put = [&](size_t at, uint32_t value) {
    bytes[at] = static_cast<uint8_t>(value & 255u);
    bytes[at + 1] = static_cast<uint8_t>(value >> 8 & 255u);
  };
  if (type == DType::kBF16) {
    for (size_t i = 0; i < bytes.size(); i += 2) {
      const auto bits = static_cast<uint32_t>(random());
      put(i, (bits & 0x8000u) | (0x3c00u + (bits & 0x037fu)));  // sign; 2^-7 to 1
    }
    return bytes;
  }
  const auto block_bytes = static_cast<size_t>(info(type).block_bytes);
  const size_t scale_at = type == DType::kQ6_K ? block_bytes - 2 : 0;  // an f16
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(random() & 255u);
  for (size_t i = scale_at; i < bytes.size(); i += block_bytes)
    put(i, 0x2000u + static_cast<uint32_t>(random() & 0x3ffu));
  return bytes;
}

// One launch's matrices, several times over.
class Weights {
 public:
  Weights(PackedFormat format, std::span<const int64_t> outputs, int64_t cols, const Launch& at) {
    std::mt19937 random(7);
    const DType type = type_of(format);
    const std::vector<uint8_t> host = random_rows(type, kChunkRows, cols, random);
    const DeviceBuffer raw(host.size(), "weights to time with");
    MILLRACE_CUDA_TRY(cudaMemcpy(raw.as<void>(), host.data(), host.size(), cudaMemcpyHostToDevice));
    size_t bytes = 0;
    for (const int64_t rows : outputs) bytes += tile_bytes(packed_shape(type, rows, cols));
    copies_ = static_cast<int>(std::clamp<size_t>(kColdBytes / std::max<size_t>(bytes, 1), 1, 8));
    for (int c = 0; c < copies_; ++c) {
      for (const int64_t rows : outputs) add(type, rows, cols, raw, at);
    }
    MILLRACE_CUDA_TRY(cudaStreamSynchronize(at.stream));
    parts_ = static_cast<int>(outputs.size());
  }
  int copies() const { return copies_; }
  const PackedMatrix& part(int copy, int part) const {
    return matrices_[static_cast<size_t>(copy % copies_ * parts_ + part)];
  }

 private:
  static size_t tile_bytes(const PackedMatrix& w) {
    return static_cast<size_t>(w.tiles_per_expert) * w.tile_bytes;
  }
  void add(DType type, int64_t rows, int64_t cols, const DeviceBuffer& raw, const Launch& at) {
    PackedMatrix w = packed_shape(type, rows, cols);
    buffers_.emplace_back(tile_bytes(w), "weights to time with");
    auto* tiles = buffers_.back().as<uint8_t>();
    w.tiles = tiles;
    for (int64_t first = 0; first < rows; first += kChunkRows) {
      DeviceMatrix from;
      from.data = raw.as<const uint8_t>();
      from.rows = std::min(kChunkRows, rows - first);
      from.cols = cols;
      from.row_bytes = static_cast<int64_t>(bytes_of(type, cols));
      from.type = type;
      launch_repack(from, 0, packed_shape(type, from.rows, cols), tiles + first / kTileRows * w.tile_bytes,
                    at);
    }
    // As a model's are, where they fit.
    if (at.device.has_wgmma() && dequantized_bytes(w) > 0 && rows < kManyOutputs) {
      buffers_.emplace_back(dequantized_bytes(w), "weights to time with");
      launch_dequantize(w, buffers_.back().as<uint8_t>(), at);
      w.dequantized = buffers_.back().as<const uint8_t>();
    }
    matrices_.push_back(w);
  }
  std::vector<DeviceBuffer> buffers_;
  std::vector<PackedMatrix> matrices_;
  int copies_ = 1, parts_ = 1;
};

struct Timer {
  cudaEvent_t begin = nullptr, end = nullptr;
  Timer() {
    MILLRACE_CUDA_TRY(cudaEventCreate(&begin));
    MILLRACE_CUDA_TRY(cudaEventCreate(&end));
  }
  ~Timer() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
};

// One shape of one format: launches of it, their outputs, and how long they take.
class Bench {
 public:
  Bench(const Device& device, PackedFormat format, std::vector<int64_t> outputs, const TuningShape& shape)
      : at_{device, stream_.get()},
        format_(format),
        outputs_(std::move(outputs)),
        shape_(shape),
        rows_(std::max<int64_t>(shape.most_rows, kMaxGemvRows)),
        weights_(format, outputs_, shape.cols, at_),
        x_(static_cast<size_t>(rows_ * shape.cols) * sizeof(float), "rows to time with"),
        operand_(bf16_rows_bytes(rows_, shape.cols, device), "rows to time with"),
        first_(out_bytes(rows_), "outputs"),
        other_(out_bytes(rows_), "outputs"),
        count_(sizeof(uint64_t), "a count"),
        split_(split_workspace_bytes(device), "tiles that are split") {
    if (split_.bytes() > 0)
      MILLRACE_CUDA_TRY(cudaMemsetAsync(split_.as<void>(), 0, split_.bytes(), stream_.get()));
    std::mt19937 random(8);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(rows_ * shape.cols));
    const size_t drawn = std::min<size_t>(x.size(), size_t{1} << 18);  // the rest repeats them
    for (size_t i = 0; i < x.size(); ++i) x[i] = i < drawn ? normal(random) : x[i - drawn];
    MILLRACE_CUDA_TRY(cudaMemcpy(x_.as<void>(), x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice));
  }

  int64_t total_outputs() const {
    int64_t all = 0;
    for (const int64_t n : outputs_) all += n;
    return all;
  }
  Gemm gemm(int64_t rows, int copy, GemmTile tile, const DeviceBuffer& out) const {
    Gemm op;
    auto* to = out.as<float>();
    for (size_t i = 0; i < outputs_.size(); ++i) {
      op.parts[op.num_parts++] = {weights_.part(copy, static_cast<int>(i)), nullptr, to};
      to += rows * outputs_[i];
    }
    op.x = {operand_.as<uint8_t>()};
    op.rows = rows;
    op.add = shape_.add;
    op.tile = tile;
    if (whole_grid_.held()) op.split = split_workspace(split_.as<void>(), at_.device);
    return op;
  }
  Gemv gemv(int64_t rows, int copy, uint32_t ring_bytes, const DeviceBuffer& out) const {
    Gemv op;
    auto* to = out.as<float>();
    for (size_t i = 0; i < outputs_.size(); ++i) {
      op.parts[op.num_parts++] = {weights_.part(copy, static_cast<int>(i)), nullptr, to};
      to += rows * outputs_[i];
    }
    op.x = x_.as<const float>();
    op.tokens = static_cast<int32_t>(rows);
    op.add = shape_.add;
    op.ring_bytes = ring_bytes;
    return op;
  }

  // The entry for so many rows.
  TuningEntry time_gemm(int64_t rows) {
    RoundRows round;
    round.x = x_.as<const float>();
    round.rows = rows;
    round.cols = shape_.cols;
    round.weights = format_;
    round.to = {operand_.as<uint8_t>()};
    launch_round_rows(round, at_);
    TuningEntry entry = entry_for(TunedKernel::kGemm, rows);
    for (const GemmCandidate& candidate : gemm_candidates()) {
      if (!supports_tile(candidate.tile, gemm(rows, 0, candidate.tile, first_))) continue;
      consider(entry, candidate.name, rows, [&](int copy, const DeviceBuffer& out) {
        launch_gemm(gemm(rows, copy, candidate.tile, out), at_);
      });
    }
    return entry;
  }
  TuningEntry time_gemv(int64_t rows) {
    TuningEntry entry = entry_for(TunedKernel::kGemv, rows);
    for (const RingCandidate& candidate : ring_candidates()) {
      if (candidate.bytes > at_.device.max_shared_memory()) continue;
      consider(entry, candidate.name, rows, [&](int copy, const DeviceBuffer& out) {
        launch_gemv(gemv(rows, copy, candidate.bytes, out), at_);
      });
    }
    return entry;
  }
  bool many() const { return gemv_has_many_tiles(gemv(1, 0, 0, first_), at_.device); }

 private:
  size_t out_bytes(int64_t rows) const { return static_cast<size_t>(rows * total_outputs()) * sizeof(float); }
  TuningEntry entry_for(TunedKernel kernel, int64_t rows) const {
    TuningEntry entry;
    entry.what = shape_.what;
    entry.key = {std::string(kernel_name(kernel)), std::string(format_name(format_)), total_outputs(),
                 shape_.cols, rows};
    return entry;
  }

  // Checks and times a candidate; the first one is what the others are held against.
  template <class Launcher>
  void consider(TuningEntry& entry, std::string_view name, int64_t rows, const Launcher& launch) {
    const bool built_in = entry.times.empty();
    const DeviceBuffer& out = built_in ? first_ : other_;
    MILLRACE_CUDA_TRY(cudaMemsetAsync(out.as<void>(), 0x3c, out_bytes(rows), stream_.get()));
    launch(0, out);
    if (!built_in && differs(rows)) {
      entry.times.push_back({std::string(name) + kOtherBits, 0.0});
      return;
    }
    const double us = time([&](int copy) { launch(copy, other_); });
    const auto best = std::find_if(entry.times.begin(), entry.times.end(),
                                   [&](const TuningTime& t) { return t.candidate == entry.choice; });
    const double to_beat =
        best == entry.times.end() ? 0.0 : best->us * (best == entry.times.begin() ? kWorthIt : 1.0);
    if (built_in || us < to_beat) entry.choice = name;
    entry.times.push_back({std::string(name), us});
  }
  bool differs(int64_t rows) {
    uint64_t count = 0;
    MILLRACE_CUDA_TRY(cudaMemsetAsync(count_.as<void>(), 0, sizeof(count), stream_.get()));
    launch_count_differences(first_.as<void>(), other_.as<void>(), rows * total_outputs(),
                             count_.as<uint64_t>(), at_);
    MILLRACE_CUDA_TRY(
        cudaMemcpyAsync(&count, count_.as<void>(), sizeof(count), cudaMemcpyDeviceToHost, stream_.get()));
    stream_.synchronize();
    return count != 0;
  }
  // Of one launch, in microseconds: the median of rounds over all copies of the weights.
  template <class Launcher>
  double time(const Launcher& launch) {
    const int per_round = std::max(weights_.copies(), 4);
    std::vector<double> all;
    for (int round = 0; round <= kRounds; ++round) {  // the first does not count
      MILLRACE_CUDA_TRY(cudaEventRecord(timer_.begin, stream_.get()));
      for (int i = 0; i < per_round; ++i) launch(i);
      MILLRACE_CUDA_TRY(cudaEventRecord(timer_.end, stream_.get()));
      stream_.synchronize();
      float ms = 0;
      MILLRACE_CUDA_TRY(cudaEventElapsedTime(&ms, timer_.begin, timer_.end));
      if (round > 0) all.push_back(ms * 1e3 / per_round);
    }
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  }

  Stream stream_;
  Launch at_;
  GridClaim whole_grid_ = at_.device.claim_grid();
  PackedFormat format_;
  std::vector<int64_t> outputs_;
  const TuningShape& shape_;
  int64_t rows_;
  Timer timer_;
  Weights weights_;
  DeviceBuffer x_, operand_, first_, other_, count_, split_;
};

}  // namespace

TuningTable autotune(const Device& device, const TuningTarget& target, std::span<const TuningShape> shapes,
                     const AutotuneProgress& progress) {
  device.use();
  TuningTable table{target, {}};
  const auto keep = [&](TuningEntry entry) {
    if (progress) progress(entry);
    table.entries.push_back(std::move(entry));
  };
  for (const TuningShape& shape : shapes) {
    // The parts of one format are one launch.
    for (const PackedFormat format :
         {PackedFormat::kQ8, PackedFormat::kBf16, PackedFormat::kQ4, PackedFormat::kQ5, PackedFormat::kQ6}) {
      std::vector<int64_t> outputs;
      for (const TuningShape::Part& part : shape.parts) {
        if (packed_format(part.type, shape.cols) == format) outputs.push_back(part.outputs);
      }
      if (outputs.empty()) continue;
      Bench bench(device, format, outputs, shape);
      if (bench.many()) {
        for (int64_t rows = 1; rows <= kMaxGemvRows; rows += 3) keep(bench.time_gemv(rows));
      }
      if (!device.has_wgmma()) continue;
      for (const int64_t rows : timed_rows()) {
        if (rows <= shape.most_rows) keep(bench.time_gemm(rows));
      }
    }
  }
  return table;
}

}  // namespace millrace::cuda
