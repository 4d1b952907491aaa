// Times the products of a dense model's layer for one to four rows: q, k, v with the norm; the projection;
// gate, up and their activation; down; each alone and as a layer, in a graph of launches that depend on one
// another, over as many layers as no L2 holds; then layers with attention over a short context between them.
// Beside each a kernel that reads the same bytes in the same launches and multiplies nothing.
//   dense_bench [--shape 8b|14b|1b|70b|gpt-oss] [--types q4_k,q6_k,..] [--rows N] [--ring BYTES,..]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/paging.h"
#include "graph_time.cuh"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

struct Shape {
  const char* name;
  int64_t hidden, query, kv, ffn, vocab;
  int32_t head_dim;
};
constexpr int32_t kContext = 128;  // positions that attention sees
constexpr Shape kShapes[] = {{"8b", 4096, 4096, 1024, 14336, 128256, 128},
                             {"14b", 5120, 5120, 1024, 17408, 151936, 128},
                             {"1b", 2048, 2048, 512, 8192, 128256, 64},
                             {"70b", 8192, 8192, 1024, 28672, 128256, 128},
                             {"gpt-oss", 2880, 4096, 512, 2880, 201088, 64}};

__global__ void fill_random(uint32_t* to, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    to[i] = x & 0xbf7fbf7fu;  // as bf16: finite
  }
}

// Reads its share of `bytes` through a ring of shared memory, and does nothing with it.
constexpr int kProbeStages = 6;
constexpr uint32_t kProbeBytes = 16384;
__global__ void __launch_bounds__(512, 2) probe_kernel(const uint8_t* from, size_t pieces, uint32_t* out) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto* full = reinterpret_cast<uint64_t*>(shared + kProbeStages * kProbeBytes);
  const size_t first = blockIdx.x * pieces / gridDim.x, last = (blockIdx.x + 1) * pieces / gridDim.x;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kProbeStages; ++s) ptx::barrier_init(full + s, 1);
    ptx::barrier_init_fence();
  }
  const auto load = [&](size_t i) {
    const auto s = static_cast<uint32_t>((i - first) % kProbeStages);
    ptx::barrier_arrive_expect(full + s, kProbeBytes);
    ptx::bulk_copy(shared + s * kProbeBytes, from + i * kProbeBytes, kProbeBytes, full + s);
  };
  if (threadIdx.x == 0) {
    for (size_t i = first; i < last && i < first + kProbeStages; ++i) load(i);
  }
  ptx::let_dependents_start();
  __syncthreads();
  ptx::wait_for_previous();
  if (threadIdx.x != 0) return;
  for (size_t i = first; i < last; ++i) {
    ptx::barrier_wait(full + (i - first) % kProbeStages,
                      static_cast<uint32_t>((i - first) / kProbeStages) & 1u);
    if (i + kProbeStages < last) load(i + kProbeStages);
  }
  if (pieces == 0) *out = 1;
}

// The same by sixteen warps, each with a ring of its own and pieces of kBytes: one bulk copy each, or 16
// bytes a lane.
template <int kBytes>
__global__ void __launch_bounds__(512, 2)
    probe_warps_kernel(const uint8_t* from, size_t bytes, uint32_t* out) {
  constexpr int kStages = 81920 / 16 / kBytes;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto* full = reinterpret_cast<uint64_t*>(shared + 16 * kStages * kBytes) + warp * kStages;
  uint8_t* mine = shared + warp * kStages * kBytes;
  const size_t rounds = bytes / (16 * kBytes);
  const size_t first = blockIdx.x * rounds / gridDim.x, last = (blockIdx.x + 1) * rounds / gridDim.x;
  if (lane < kStages) ptx::barrier_init(full + lane, 1);
  ptx::barrier_init_fence();
  __syncwarp();
  const auto load = [&](size_t i) {
    const auto s = static_cast<uint32_t>((i - first) % kStages);
    const uint8_t* at = from + (i * 16 + static_cast<size_t>(warp)) * kBytes;
    if (lane != 0) return;
    ptx::barrier_arrive_expect(full + s, kBytes);
    ptx::bulk_copy(mine + s * kBytes, at, kBytes, full + s);
  };
  for (size_t i = first; i < last && i < first + kStages; ++i) load(i);
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  for (size_t i = first; i < last; ++i) {
    ptx::barrier_wait(full + (i - first) % kStages, static_cast<uint32_t>((i - first) / kStages) & 1u);
    __syncwarp();
    if (i + kStages < last) load(i + kStages);
  }
  if (bytes == 0) *out = 1;
}

struct Weights {
  DeviceBuffer buffer;
  size_t used = 0;
  explicit Weights(size_t bytes) : buffer(bytes, "weights") {
    fill_random<<<2048, 256>>>(buffer.as<uint32_t>(), bytes / 4, 7);
    check_launch("fill_random");
  }
  PackedMatrix take(DType type, int64_t rows, int64_t cols) {
    PackedMatrix w = packed_shape(type, rows, cols);
    w.tiles = buffer.as<const uint8_t>() + used;
    used += (static_cast<size_t>(w.tiles_per_expert) * w.tile_bytes + 1023) / 1024 * 1024;
    return w;
  }
};

double bytes_of_packed(const PackedMatrix& w) { return double(w.tiles_per_expert) * w.tile_bytes; }

struct Bench {
  const Device& device;
  Shape shape;
  DType type;
  int32_t rows;
  uint32_t ring = 0;
  Stream stream;
  Launch at{device, stream.get()};
  struct Layer {
    PackedMatrix q, k, v, o, gate, up, down;
  };
  std::vector<Layer> layers;
  Weights weights;
  DeviceBuffer x{size_t{4} * 32768 * 4, "x"}, norm{size_t{32768} * 4, "norm"},
      query{size_t{4} * 65536 * 4, "q"}, act{size_t{4} * 32768 * 2, "act"},
      attended{size_t{4} * 32768 * 4, "out"}, angles{size_t{4} * 256 * 4, "angles"},
      arrived{size_t{4} * 64 * 4, "arrived"}, pool, batch;

  static int count_of(const Shape& s, DType type) {
    const double bytes = layer_bytes(s, type);
    const int n = static_cast<int>(1.2e9 / bytes) + 1;
    return n < 2 ? 2 : n > 32 ? 32 : n;
  }
  static double layer_bytes(const Shape& s, DType type) {
    return bytes_of_packed(packed_shape(type, s.query + 2 * s.kv, s.hidden)) +
           bytes_of_packed(packed_shape(type, s.hidden, s.query)) +
           bytes_of_packed(packed_shape(type, 2 * s.ffn, s.hidden)) +
           bytes_of_packed(packed_shape(type, s.hidden, s.ffn));
  }
  Bench(const Device& gpu, const Shape& s, DType t, int32_t r)
      : device(gpu),
        shape(s),
        type(t),
        rows(r),
        layers(static_cast<size_t>(count_of(s, t))),
        weights(static_cast<size_t>(count_of(s, t)) * (static_cast<size_t>(layer_bytes(s, t)) + 65536)) {
    for (Layer& l : layers) {
      l.q = weights.take(type, s.query, s.hidden), l.k = weights.take(type, s.kv, s.hidden);
      l.v = weights.take(type, s.kv, s.hidden), l.o = weights.take(type, s.hidden, s.query);
      l.gate = weights.take(type, s.ffn, s.hidden), l.up = weights.take(type, s.ffn, s.hidden);
      l.down = weights.take(type, s.hidden, s.ffn);
    }
    MILLRACE_CUDA_TRY(cudaMemset(x.as<void>(), 0, x.bytes()));
    MILLRACE_CUDA_TRY(cudaMemset(norm.as<void>(), 0, norm.bytes()));
    MILLRACE_CUDA_TRY(cudaMemset(act.as<void>(), 0, act.bytes()));
    MILLRACE_CUDA_TRY(cudaMemset(arrived.as<void>(), 0, arrived.bytes()));
    MILLRACE_CUDA_TRY(cudaMemset(angles.as<void>(), 0, angles.bytes()));
    const int32_t blocks = blocks_for(kContext + 1);
    pool = DeviceBuffer(static_cast<size_t>(blocks * rows) * kv_block_elements() * 2, "pool");
    MILLRACE_CUDA_TRY(cudaMemset(pool.as<void>(), 0, pool.bytes()));
    std::vector<int32_t> host(16, kContext);  // positions; sequence_of; table_starts; then tables
    for (int32_t row = 0; row < 4; ++row) {
      host[static_cast<size_t>(4 + row)] = row;
      host[static_cast<size_t>(8 + row)] = 16 + row * blocks;
    }
    for (int32_t i = 0; i < rows * blocks; ++i) host.push_back(i);
    batch = DeviceBuffer(host.size() * 4, "batch");
    MILLRACE_CUDA_TRY(cudaMemcpy(batch.as<void>(), host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
  }
  int32_t kv_heads() const { return static_cast<int32_t>(shape.kv / shape.head_dim); }
  size_t kv_block_elements() const { return size_t{2} * static_cast<size_t>(shape.kv) * kBlockTokens; }
  void attend(const Layer&) {
    PagedAttention op;
    const auto* ints = batch.as<const int32_t>();
    op.cache = {.pool = pool.as<void>(),
                .type = DType::kBF16,
                .block_elements = static_cast<int64_t>(kv_block_elements()),
                .layer_offset = 0,
                .positions = ints,
                .sequence_of = ints + 4,
                .table_starts = ints + 8,
                .tables = ints,
                .heads = static_cast<int32_t>(shape.query / shape.head_dim),
                .kv_heads = kv_heads(),
                .head_dim = shape.head_dim,
                .order = CacheOrder::kSwizzled};
    op.op = {0, 0.1f, nullptr};
    op.rows = rows;
    op.angles = angles.as<const float2>();
    op.query = query.as<float>();
    op.key = query.as<float>() + 4 * shape.query;
    op.value = query.as<float>() + 4 * (shape.query + shape.kv);
    op.out = attended.as<float>();
    op.arrived = arrived.as<int32_t>();
    launch_paged_attention(op, at);
  }
  void launch(Gemv op) {
    op.tokens = rows, op.ring_bytes = ring;
    launch_gemv(op, at);
  }
  void qkv(const Layer& l) {
    Gemv op;
    auto* out = query.as<float>();
    op.num_parts = 3;
    op.parts[0] = {l.q, nullptr, out}, op.parts[1] = {l.k, nullptr, out + 4 * shape.query};
    op.parts[2] = {l.v, nullptr, out + 4 * (shape.query + shape.kv)};
    op.x = x.as<float>(), op.norm_weight = norm.as<float>(), op.eps = 1e-5f;
    launch(op);
  }
  void project(const Layer& l) {
    Gemv op;
    op.num_parts = 1;
    op.parts[0] = {l.o, nullptr, x.as<float>()};
    op.x = query.as<float>(), op.add = true;
    launch(op);
  }
  void gate_up(const Layer& l) {
    Gemv op;
    op.num_parts = 2;
    op.parts[0] = {l.gate, nullptr, nullptr}, op.parts[1] = {l.up, nullptr, nullptr};
    op.x = x.as<float>(), op.norm_weight = norm.as<float>(), op.eps = 1e-5f;
    op.act = act.as<uint16_t>();
    launch(op);
  }
  void down(const Layer& l) {
    Gemv op;
    op.num_parts = 1;
    op.parts[0] = {l.down, nullptr, x.as<float>()};
    op.x_bf16 = act.as<const uint16_t>(), op.add = true;
    launch(op);
  }
  void probe(const uint8_t* from, double bytes) {
    const size_t shared = kProbeStages * kProbeBytes + 64;
    allow_shared_memory(probe_kernel, shared);
    launch_dependent("probe_kernel", probe_kernel, dim3(static_cast<unsigned>(device.sm_count())), 512,
                     shared, at, from, static_cast<size_t>(bytes) / kProbeBytes, x.as<uint32_t>());
  }
  template <int kBytes>
  void probe_warps(const uint8_t* from, double bytes) {
    const auto kernel = probe_warps_kernel<kBytes>;
    const size_t shared = 81920 + 16 * (81920 / 16 / kBytes) * 8;
    allow_shared_memory(kernel, shared);
    launch_dependent("probe_warps_kernel", kernel, dim3(static_cast<unsigned>(device.sm_count())), 512,
                     shared, at, from, static_cast<size_t>(bytes), x.as<uint32_t>());
  }
  template <int kBytes>
  void time_warps() {
    const double us = median_us(
        stream, 2, 5, [&] { probe_warps<kBytes>(weights.buffer.as<const uint8_t>(), double(weights.used)); });
    std::printf(" %d B %.2f TB/s;", kBytes, double(weights.used) / us / 1e6);
  }
  void run_probes() {
    std::printf("   a ring a warp:");
    time_warps<640>();
    time_warps<1024>();
    time_warps<1280>();
    time_warps<2560>();
    time_warps<5120>();
    std::printf("\n");
  }
  // Launches over all layers, `passes` times; microseconds of one.
  double time(const std::function<void(const Layer&)>& each) {
    const int passes = layers.size() < 16 ? 3 : 1;
    const double us = median_us(stream, 2, 7, [&] {
      for (int i = 0; i < passes; ++i) {
        for (const Layer& l : layers) each(l);
      }
    });
    return us / (passes * static_cast<double>(layers.size()));
  }
  void print_logits() {
    Weights table(static_cast<size_t>(bytes_of_packed(packed_shape(type, shape.vocab, shape.hidden))) + 4096);
    const DeviceBuffer out(static_cast<size_t>(shape.vocab) * 4 * sizeof(float), "logits");
    Gemv op;
    op.num_parts = 1;
    op.parts[0] = {table.take(type, shape.vocab, shape.hidden), nullptr, out.as<float>()};
    op.x = x.as<float>(), op.norm_weight = norm.as<float>(), op.eps = 1e-5f;
    const double us = median_us(stream, 2, 7, [&] { launch(op); });
    std::printf(" logits %.1f us %.2f TB/s", us, double(table.used) / us / 1e6);
  }
  void run(const char* type_name, bool with_probe) {
    const Layer& l = layers[0];
    struct Op {
      const char* name;
      double bytes;
      void (Bench::*launch)(const Layer&);
      const uint8_t* (*first)(const Layer&);
    };
    const Op ops[] = {
        {"qkv", bytes_of_packed(l.q) + bytes_of_packed(l.k) + bytes_of_packed(l.v), &Bench::qkv,
         [](const Layer& of) { return of.q.tiles; }},
        {"o", bytes_of_packed(l.o), &Bench::project, [](const Layer& of) { return of.o.tiles; }},
        {"gate+up", 2 * bytes_of_packed(l.gate), &Bench::gate_up,
         [](const Layer& of) { return of.gate.tiles; }},
        {"down", bytes_of_packed(l.down), &Bench::down, [](const Layer& of) { return of.down.tiles; }}};
    const auto print = [](const char* what, double us, double bytes) {
      std::printf(" %s %.2f us %.2f TB/s;", what, us, bytes / us / 1e6);
      std::fflush(stdout);
    };
    double total = 0;
    std::printf("%s %s rows %d ring %u:", shape.name, type_name, rows, ring);
    for (const Op& op : ops) {
      total += op.bytes;
      print(op.name, time([&](const Layer& at_layer) { (this->*op.launch)(at_layer); }), op.bytes);
    }
    print("layer", time([&](const Layer& at_layer) {
            for (const Op& op : ops) (this->*op.launch)(at_layer);
          }),
          total);
    print("with attention", time([&](const Layer& at_layer) {
            qkv(at_layer);
            attend(at_layer);
            for (int i = 1; i < 4; ++i) (this->*ops[i].launch)(at_layer);
          }),
          total);
    print("attention alone", time([&](const Layer& at_layer) { attend(at_layer); }), 1e-6);
    print_logits();
    if (with_probe) {
      std::printf("\n");
      run_probes();
      std::printf("   probe:");
      for (const Op& op : ops)
        print(op.name, time([&](const Layer& at_layer) { probe(op.first(at_layer), op.bytes); }), op.bytes);
      print("layer", time([&](const Layer& at_layer) {
              for (const Op& op : ops) probe(op.first(at_layer), op.bytes);
            }),
            total);
      print("all at once",
            median_us(stream, 2, 5, [&] { probe(weights.buffer.as<const uint8_t>(), double(weights.used)); }),
            double(weights.used));
    }
    std::printf("\n");
  }
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    parts.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}
DType type_named(const std::string& name) {
  for (const DType type :
       {DType::kQ4_K, DType::kQ5_K, DType::kQ6_K, DType::kQ8_0, DType::kBF16, DType::kQ4_0}) {
    std::string lower;
    for (const char c : std::string(info(type).name)) lower += static_cast<char>(std::tolower(c));
    if (lower == name) return type;
  }
  std::fprintf(stderr, "dense_bench: --types: unknown type \"%s\"\n", name.c_str());
  std::exit(2);
}

int main_of(int argc, char** argv) {
  Shape shape = kShapes[0];
  std::vector<std::string> types = {"q4_k", "q6_k", "q8_0"}, rings = {"0"};
  int32_t rows = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--types") {
      types = split(value);
    } else if (key == "--ring") {
      rings = split(value);
    } else if (key == "--rows") {
      rows = std::atoi(value.c_str());
    } else if (key == "--shape") {
      bool found = false;
      for (const Shape& s : kShapes) {
        if (value == s.name) shape = s, found = true;
      }
      if (!found) return std::fprintf(stderr, "dense_bench: --shape: unknown \"%s\"\n", value.c_str()), 2;
    } else {
      return std::fprintf(stderr, "dense_bench: unknown option %s\n", key.c_str()), 2;
    }
  }
  if (rows < 1 || rows > kMaxGemvRows) return std::fprintf(stderr, "dense_bench: --rows: 1 to 4\n"), 2;
  const Device device = Device::open(0);
  for (const std::string& type : types) {
    Bench bench(device, shape, type_named(type), rows);
    bool first = true;
    for (const std::string& ring : rings) {
      bench.ring = static_cast<uint32_t>(std::atoi(ring.c_str()));
      bench.run(type.c_str(), first);
      first = false;
    }
  }
  return 0;
}

}  // namespace
}  // namespace millrace::cuda

int main(int argc, char** argv) {
  try {
    return millrace::cuda::main_of(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "dense_bench: %s\n", e.what());
    return 1;
  }
}
