// Times the GEMM of bf16 and of 8-bit weights (kernels/cuda/gemm), with every tile there is, beside cuBLAS's
// bf16 in one run, in turns. With bf16 weights both have the same numbers, and it prints how far apart the
// results are: both multiply exactly and sum in float32, in another order. Ours sums every segment of the
// columns for itself, which is what makes a row's bits independent of the batch; "one chain" does not, and
// says what that costs. Numbers are drawn from a normal distribution: a GPU is slower on them than on zeros,
// and their sums are not exact in any order. "of the tensor cores": of 4,096 FLOP a cycle and SM, at the
// clock that was read right after. 8-bit weights are there dequantized too (quant/packed_tiles.h), for the
// ways that read those; how long opening them took is said. "shapes": cluster tiles of every shape there is,
// in rounds and split along K, beside the built-in choice.
//   gemm_bench [q8] [shapes] [rows outputs columns]...  columns a multiple of 64; without: 4096^3,
//   gpt-oss-20b's shapes
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/compare.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/cluster_schedule.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/quant/packed_tiles.h"
#include "kernels/cuda/variants.h"
#ifdef MILLRACE_HAS_CUBLAS
#include <cublas_v2.h>
#endif

namespace millrace::cuda {
namespace {

__device__ inline uint32_t random_at(size_t i, uint32_t seed) {
  uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
  x ^= x >> 15, x *= 2246822519u, x ^= x >> 13, x *= 3266489917u, x ^= x >> 16;
  return x;
}
// Near enough to normal, of variance one: four bytes' sum. bf16 as they are.
__device__ inline float value_at(size_t i, uint32_t seed) {
  const uint32_t x = random_at(i, seed);
  const int sum = static_cast<int>((x & 255u) + (x >> 8 & 255u) + (x >> 16 & 255u) + (x >> 24));
  return __uint_as_float(__float_as_uint(static_cast<float>(sum - 510) / 147.8f) & 0xffff0000u);
}
// Q8_0: random codes, an f16 scale of 2^-7 to 2^-6.
__global__ void fill_q8(uint8_t* to, size_t bytes) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < bytes;
       i += size_t{gridDim.x} * blockDim.x)
    to[i] = i % 34 == 1 ? static_cast<uint8_t>(0x20u + (random_at(i, 3) & 3u))
                        : static_cast<uint8_t>(random_at(i, 3));
}
// How many cycles pass in how many nanoseconds.
__global__ void read_clock(uint64_t* to) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  const long long cycles = clock64();
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < 40000);
  to[0] = static_cast<uint64_t>(clock64() - cycles);
  to[1] = now - begin;
}
// Keeps the stream busy while what is timed is launched.
__global__ void hold(uint64_t nanoseconds) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
__global__ void fill(float* floats, uint16_t* bf16, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    const float v = value_at(i, seed);
    if (floats != nullptr) floats[i] = v;
    bf16[i] = static_cast<uint16_t>(__float_as_uint(v) >> 16);
  }
}

struct Way {
  GemmTile tile;
  std::string name;
  int shape = -1;                      // of cluster tiles
  bool rounds = false, split = false;  // else what should take less
};

struct Comparison {
  const Device& device;
  DType type;
  int64_t rows, outputs, cols;
  Stream stream;
  Launch at{device, stream.get()};
  DeviceBuffer weights{static_cast<size_t>(outputs * cols) * 2, "weights"}, codes,
      x{static_cast<size_t>(rows * cols) * 4, "x"}, x_bf16{static_cast<size_t>(rows * cols) * 2, "x"},
      operand{bf16_rows_bytes(rows, cols, device), "operand"}, tiles, dequantized,
      ours{static_cast<size_t>(rows * outputs) * 4, "y"}, first{static_cast<size_t>(rows * outputs) * 4, "y"},
      count{16, "a count"}, split{split_workspace_bytes(device), "split work items"},
      theirs{static_cast<size_t>(rows * outputs) * 4, "y"};
  PackedMatrix packed = packed_shape(type, outputs, cols);

  Comparison(const Device& gpu, DType t, int64_t m, int64_t n, int64_t k)
      : device(gpu), type(t), rows(m), outputs(n), cols(k) {
    fill<<<1024, 256, 0, stream.get()>>>(nullptr, weights.as<uint16_t>(), static_cast<size_t>(n * k), 1);
    fill<<<1024, 256, 0, stream.get()>>>(x.as<float>(), x_bf16.as<uint16_t>(), static_cast<size_t>(m * k), 2);
    tiles = DeviceBuffer(static_cast<size_t>(packed.tiles_per_expert) * packed.tile_bytes, "tiles");
    DeviceMatrix raw;
    raw.data = weights.as<const uint8_t>();
    raw.rows = n;
    raw.cols = k;
    raw.row_bytes = static_cast<int64_t>(bytes_of(type, k));
    raw.type = type;
    if (type != DType::kBF16) {
      codes = DeviceBuffer(static_cast<size_t>(n * raw.row_bytes), "codes");
      fill_q8<<<1024, 256, 0, stream.get()>>>(codes.as<uint8_t>(), codes.bytes());
      raw.data = codes.as<const uint8_t>();
    }
    launch_repack(raw, 0, packed, tiles.as<uint8_t>(), at);
    packed.tiles = tiles.as<const uint8_t>();
    if (split.bytes() > 0)
      MILLRACE_CUDA_TRY(cudaMemsetAsync(split.as<void>(), 0, split.bytes(), stream.get()));
    dequantized = DeviceBuffer(device.has_wgmma() ? dequantized_bytes(packed) : 0, "dequantized tiles");
    if (dequantized.bytes() > 0) dequantize();
    packed.dequantized = dequantized.as<const uint8_t>();
    stream.synchronize();
  }

  void dequantize() { launch_dequantize(packed, dequantized.as<uint8_t>(), at); }

  void round() {
    RoundRows op;
    op.x = x.as<const float>();
    op.rows = rows;
    op.cols = cols;
    op.weights = packed.format;
    op.to = {operand.as<uint8_t>()};
    launch_round_rows(op, at);
  }
  void multiply(const Way& way, const DeviceBuffer& out) { launch_gemm(linear(way, out), at); }
  Gemm linear(const Way& way, const DeviceBuffer& out) const {
    Gemm op;
    op.parts[op.num_parts++] = {packed, nullptr, out.as<float>()};
    op.x = {operand.as<uint8_t>()};
    op.rows = rows;
    op.tile = way.tile;
    op.cluster_shape = way.shape;
    if (!way.rounds) op.split = split_workspace(split.as<void>(), device);
    op.split.force = way.split;
    return op;
  }
  std::vector<Way> ways(bool shapes) const {
    std::vector<Way> all;
    for (const GemmCandidate& candidate : gemm_candidates())
      all.push_back({candidate.tile, std::string(candidate.name)});
    all.push_back({GemmTile::kClusterNoSplitK, "one chain"});
    if (shapes) {
      all.resize(1);
      int i = 0;
      for (const ClusterShape& shape : kClusterShapes) {
        const std::string name = std::to_string(8 * shape.tiles) + " x " + std::to_string(shape.tokens);
        all.push_back({GemmTile::kCluster, name, i, true, false});
        all.push_back({GemmTile::kCluster, name + ", split", i++, false, true});
      }
    }
    std::erase_if(all, [&](const Way& way) {
      return device.has_wgmma() ? !supports_tile(way.tile, linear(way, ours))
                                : way.tile != GemmTile::kDefault;
    });
    return all;
  }
  // Outputs of a way, poisoned before, that differ from those of the built-in choice.
  uint64_t differing(const Way& items) {
    MILLRACE_CUDA_TRY(cudaMemsetAsync(ours.as<void>(), 0xff, ours.bytes(), stream.get()));
    MILLRACE_CUDA_TRY(cudaMemsetAsync(count.as<void>(), 0, 8, stream.get()));
    multiply(items, ours);
    launch_count_differences(ours.as<void>(), first.as<void>(), rows * outputs, count.as<uint64_t>(), at);
    stream.synchronize();
    uint64_t differ = 0;
    MILLRACE_CUDA_TRY(cudaMemcpy(&differ, count.as<void>(), 8, cudaMemcpyDeviceToHost));
    return differ;
  }

  // Of ten launches, in microseconds each. They are all in the stream before the first begins: what launching
  // takes of the host is nobody's time here, as it is not in a step of a model.
  double time(const std::function<void()>& launch, double* ghz = nullptr) const {
    cudaEvent_t begin, end;
    MILLRACE_CUDA_TRY(cudaEventCreate(&begin));
    MILLRACE_CUDA_TRY(cudaEventCreate(&end));
    hold<<<1, 1, 0, stream.get()>>>(200000);
    MILLRACE_CUDA_TRY(cudaEventRecord(begin, stream.get()));
    for (int i = 0; i < 10; ++i) launch();
    MILLRACE_CUDA_TRY(cudaEventRecord(end, stream.get()));
    if (ghz != nullptr) read_clock<<<1, 1, 0, stream.get()>>>(count.as<uint64_t>());
    stream.synchronize();
    float ms = 0;
    MILLRACE_CUDA_TRY(cudaEventElapsedTime(&ms, begin, end));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    if (ghz != nullptr) {
      uint64_t passed[2];
      MILLRACE_CUDA_TRY(cudaMemcpy(passed, count.as<void>(), sizeof(passed), cudaMemcpyDeviceToHost));
      *ghz = static_cast<double>(passed[0]) / static_cast<double>(passed[1]);
    }
    return ms * 100.0;
  }

  double difference() const {  // of the two results' last rows, by their norm
    const int64_t last = std::min<int64_t>(rows, 64), from = (rows - last) * outputs;
    std::vector<float> a(static_cast<size_t>(last * outputs)), b(a.size());
    MILLRACE_CUDA_TRY(cudaMemcpy(a.data(), ours.as<float>() + from, a.size() * 4, cudaMemcpyDeviceToHost));
    MILLRACE_CUDA_TRY(cudaMemcpy(b.data(), theirs.as<float>() + from, b.size() * 4, cudaMemcpyDeviceToHost));
    double error = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      error += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
      size += double{b[i]} * b[i];
    }
    return std::sqrt(error / size);
  }

  void run(const std::function<void(Comparison&)>& library, bool shapes) {
    const std::vector<Way> ways = this->ways(shapes);
    round();
    multiply(ways[0], first);
    std::vector<std::vector<double>> mine(ways.size());
    std::vector<double> other, clocks(ways.size()), their_clock(1);
    for (int i = 0; i < 7; ++i) {
      for (size_t w = 0; w < ways.size(); ++w)
        mine[w].push_back(time([&] { multiply(ways[w], ours); }, &clocks[w]));
      if (library) other.push_back(time([&] { library(*this); }, &their_clock[0]));
    }
    const auto median = [](std::vector<double>& v) {
      std::sort(v.begin(), v.end());
      return v.empty() ? 0.0 : v[v.size() / 2];
    };
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(outputs * cols);
    const double theirs_us = median(other);
    std::printf("%lld x %lld x %lld", static_cast<long long>(rows), static_cast<long long>(outputs),
                static_cast<long long>(cols));
    if (type != DType::kBF16) std::printf(", 8 bits");
    if (library)
      std::printf(": cuBLAS %.1f us, %.1f TFLOP/s, %.2f GHz", theirs_us, flops / theirs_us / 1e6,
                  their_clock[0]);
    std::printf("; rows rounded in %.1f us", time([&] { round(); }));
    if (packed.dequantized != nullptr) {
      const double us = time([&] { dequantize(); });
      std::printf("; weights dequantized in %.1f us, %.0f GB/s", us,
                  static_cast<double>(tiles.bytes() + dequantized.bytes()) / us / 1e3);
    }
    std::printf("\n");
    for (size_t w = 0; w < ways.size(); ++w) {
      const double us = median(mine[w]);
      const uint64_t differ = differing(ways[w]);
      std::printf("  %-24s %8.1f us, %6.1f TFLOP/s, %2.0f%% of the tensor cores at %.2f GHz",
                  ways[w].name.c_str(), us, flops / us / 1e6,
                  flops / us / (clocks[w] * 4096 * device.sm_count()) / 10, clocks[w]);
      if (library) std::printf(", %3.0f%% of cuBLAS", 100 * theirs_us / us);
      if (library && type == DType::kBF16) std::printf(", apart %.1e", difference());
      std::printf(differ == 0 ? "\n" : ", %llu outputs differ\n", static_cast<unsigned long long>(differ));
    }
  }
};

}  // namespace
}  // namespace millrace::cuda

int main(int argc, char** argv) {
  using namespace millrace::cuda;
  const Device device = Device::open(0);
  std::function<void(Comparison&)> library;
#ifdef MILLRACE_HAS_CUBLAS
  cublasHandle_t handle = nullptr;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) {
    std::fprintf(stderr, "gemm_bench: cublasCreate failed\n");
    return 2;
  }
  library = [&](Comparison& g) {
    const float one = 1.0f, zero = 0.0f;
    cublasSetStream(handle, g.stream.get());
    const cublasStatus_t status = cublasGemmEx(
        handle, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(g.outputs), static_cast<int>(g.rows),
        static_cast<int>(g.cols), &one, g.weights.as<void>(), CUDA_R_16BF, static_cast<int>(g.cols),
        g.x_bf16.as<void>(), CUDA_R_16BF, static_cast<int>(g.cols), &zero, g.theirs.as<void>(), CUDA_R_32F,
        static_cast<int>(g.outputs), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) {
      std::fprintf(stderr, "gemm_bench: cublasGemmEx failed with status %d\n", static_cast<int>(status));
      std::exit(2);
    }
  };
#else
  std::printf("built without cuBLAS: ours alone\n");
#endif
  using millrace::DType;
  DType type = DType::kBF16;
  if (argc > 1 && std::string(argv[1]) == "q8") {
    type = DType::kQ8_0;
    --argc, ++argv;
  }
  const bool all_shapes = argc > 1 && std::string(argv[1]) == "shapes";
  if (all_shapes) --argc, ++argv;
  using Shape = std::array<int64_t, 3>;
  std::vector<Shape> shapes;
  for (int i = 1; i < argc; i += 3) {
    Shape s{};
    for (int j = 0; j < 3 && i + j < argc; ++j) s[static_cast<size_t>(j)] = std::atoll(argv[i + j]);
    if (s[0] < 1 || s[1] < 1 || s[2] < 64 || s[2] % 64 != 0) {
      std::fprintf(stderr, "usage: gemm_bench [q8] [shapes] [rows outputs columns]...\n");
      return 2;
    }
    shapes.push_back(s);
  }
  if (shapes.empty()) {
    for (const int64_t rows : {128, 256, 512, 1024, 2048, 4096, 8192}) {  // what heats the GPU comes last
      shapes.push_back({rows, 5120, 2880});
      shapes.push_back({rows, 2880, 4096});
    }
    shapes.push_back({4096, 4096, 4096});
    shapes.push_back({128, 201088, 2880});
  }
  for (const auto& s : shapes) Comparison(device, type, s[0], s[1], s[2]).run(library, all_shapes);
#ifdef MILLRACE_HAS_CUBLAS
  cublasDestroy(handle);
#endif
  return 0;
}
