// Speeds of attention on this machine's GPU: prompts in TFLOP/s (causal, half of all pairs counted; 4
// operations per pair and dimension) with block tables in order and shuffled, single rows in TB/s of keys and
// values. bench/attention_torch.py prints torch's in the same units.
//   attention_bench [prompt|decode|long|fp8]   (long: one row at 32k, for a profiler; fp8: caches of bf16 and
//                                              of fp8 in turn)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "base/paging.h"
#include "graph_time.cuh"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {
namespace {

__global__ void fill_bf16(uint32_t* to, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    to[i] = (x & 0x807f807fu) | 0x3f003f00u | (x >> 9 & 0x00800080u);  // +-0.5 to 2
  }
}
// Codes of one sign and scales up to 1: any byte may be either.
__global__ void fill_fp8(uint32_t* to, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    to[i] = (x & 0x3f3f3f3fu) | 0x40404040u;
  }
}
__global__ void fill_floats(float* to, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    to[i] = (static_cast<float>(x & 0xffff) / 32768.0f - 1.0f) * 1.7f;
  }
}
DeviceBuffer floats(size_t count) {
  DeviceBuffer buffer(count * sizeof(float), "floats");
  fill_floats<<<512, 256>>>(buffer.as<float>(), count, static_cast<uint32_t>(count));
  return buffer;
}

double median_us(const Stream& stream, int times, const std::function<void()>& record) {
  return median_us(stream, 3, times, record);
}

struct Setting {
  int32_t heads, kv_heads, dim, sequences, context, tokens;  // new tokens are the context's last
  int32_t window;
  int32_t layers;
  bool shuffled, sinks;
  bool fp8 = false;
};

struct Setup {
  const Device& device;
  Setting s;
  Stream stream;
  int32_t rows = s.sequences * s.tokens, blocks = blocks_for(s.context);
  int64_t layer_elements = int64_t{2} * s.kv_heads * kBlockTokens * (s.fp8 ? s.dim + 1 : s.dim);
  int64_t block_elements = s.layers * layer_elements;
  DeviceBuffer pool{static_cast<size_t>(s.sequences * blocks * block_elements) * (s.fp8 ? 1 : 2), "pool"},
      ints, query = floats(static_cast<size_t>(rows) * static_cast<size_t>(s.heads * s.dim)),
            key = floats(static_cast<size_t>(rows) * static_cast<size_t>(s.kv_heads * s.dim)),
            value = floats(static_cast<size_t>(rows) * static_cast<size_t>(s.kv_heads * s.dim)),
            out = floats(static_cast<size_t>(rows) * static_cast<size_t>(s.heads * s.dim)),
            angles = floats(static_cast<size_t>(rows) * static_cast<size_t>(s.dim)),
            sinks = floats(static_cast<size_t>(s.heads)), partial,
            arrived{static_cast<size_t>(rows * s.kv_heads) * 4, "arrived"};
  size_t chunks_at = 0;
  int32_t num_chunks = 0;

  Setup(const Device& gpu, const Setting& setting) : device(gpu), s(setting) {
    (s.fp8 ? fill_fp8 : fill_bf16)<<<2048, 256>>>(pool.as<uint32_t>(), pool.bytes() / 4, 77u);
    MILLRACE_CUDA_TRY(cudaMemset(arrived.as<void>(), 0, arrived.bytes()));
    std::vector<int32_t> host, table;
    for (int32_t r = 0; r < rows; ++r) host.push_back(s.context - s.tokens + r % s.tokens);
    for (int32_t r = 0; r < rows; ++r) host.push_back(r / s.tokens);
    for (int32_t q = 0; q < s.sequences; ++q) host.push_back(q * blocks);
    for (int32_t i = 0; i < s.sequences * blocks; ++i) table.push_back(i);
    std::mt19937 random(1);
    if (s.shuffled) std::shuffle(table.begin(), table.end(), random);
    host.insert(host.end(), table.begin(), table.end());
    while (host.size() % 4 != 0) host.push_back(0);
    chunks_at = host.size();
    const int32_t max_tokens = prefill_chunk_tokens(s.heads, s.kv_heads, s.dim);
    for (int32_t at = (s.tokens - 1) / max_tokens * max_tokens; at >= 0 && s.tokens > 1; at -= max_tokens) {
      for (int32_t q = 0; q < s.sequences; ++q, ++num_chunks) {
        for (const int32_t v :
             {q * s.tokens + at, std::min(max_tokens, s.tokens - at), s.context - s.tokens + at, q}) {
          host.push_back(v);
        }
      }
    }
    ints = DeviceBuffer(host.size() * 4, "ints");
    MILLRACE_CUDA_TRY(cudaMemcpy(ints.as<void>(), host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    partial = DeviceBuffer(
        paged_attention_partial_bytes(rows, std::max(2, attention_splits(s.context, 0)), s.kv_heads, s.dim),
        "partial");
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
  }
  PagedAttention op(int32_t layer, bool side_by_side) const {
    const auto* at = ints.as<const int32_t>();
    PagedAttention a;
    a.cache = {.pool = pool.as<void>(),
               .type = s.fp8 ? DType::kF8E4M3 : DType::kBF16,
               .block_elements = block_elements,
               .layer_offset = layer % s.layers * layer_elements,
               .positions = at,
               .sequence_of = at + rows,
               .table_starts = at + 2 * rows,
               .tables = at + 2 * rows + s.sequences,
               .heads = s.heads,
               .kv_heads = s.kv_heads,
               .head_dim = s.dim,
               .order = CacheOrder::kSwizzled};
    a.op = {s.window, 1.0f / std::sqrt(static_cast<float>(s.dim)), s.sinks ? sinks.as<float>() : nullptr};
    a.rows = rows;
    a.max_splits = attention_splits(s.context - 1, s.window);
    a.query = query.as<float>(), a.key = key.as<float>(), a.value = value.as<float>();
    a.out = out.as<float>();
    a.arrived = arrived.as<int32_t>();
    a.chunks = at + chunks_at;
    a.num_chunks = num_chunks;
    if (s.tokens == 1) a.angles = angles.as<const float2>();
    if (side_by_side && a.max_splits > 1) a.partial = partial.as<float>();
    return a;
  }
};

void prompt(const Device& device, const Setting& s) {
  const Setup setup(device, s);
  const double us = median_us(setup.stream, 9, [&] {
    launch_paged_attention(setup.op(0, false), {setup.device, setup.stream.get()});
  });
  double pairs = 0;
  for (int32_t t = 0; t < s.tokens; ++t) {
    const int32_t seen = s.context - s.tokens + t + 1;
    pairs += s.window > 0 ? std::min(seen, s.window) : seen;
  }
  std::printf("prompt %s %2d x %5d heads %d/%d dim %3d window %3d %-9s %-6s %9.1f us %7.1f TFLOP/s\n",
              s.fp8 ? "fp8 " : "bf16", s.sequences, s.tokens, s.heads, s.kv_heads, s.dim, s.window,
              s.shuffled ? "shuffled" : "in order", s.sinks ? "sinks" : "", us,
              4 * pairs * s.heads * s.dim * s.sequences / us * 1e-6);
}

void decode(const Device& device, const Setting& s, bool side_by_side) {
  constexpr int kLaunches = 12;
  const Setup setup(device, s);
  const double us = median_us(setup.stream, 15, [&] {
    for (int l = 0; l < kLaunches; ++l)
      launch_paged_attention(setup.op(l, side_by_side), {setup.device, setup.stream.get()});
  });
  const double seen = s.window > 0 ? std::min(s.context, s.window) : s.context;
  const double bytes = seen * s.sequences * s.kv_heads * (s.fp8 ? 2 * s.dim + 2 : 4 * s.dim) * kLaunches;
  std::printf("decode %s %3d x %5d heads %d/%d dim %3d window %3d %-12s %8.2f us a launch %6.2f TB/s\n",
              s.fp8 ? "fp8 " : "bf16", s.sequences, s.context, s.heads, s.kv_heads, s.dim, s.window,
              side_by_side ? "side by side" : "in turn", us / kLaunches, bytes / us * 1e-6);
}

}  // namespace
}  // namespace millrace::cuda

int main(int argc, char** argv) {
  using namespace millrace::cuda;
  const Device device = Device::open(0);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const char* only = argc > 1 ? argv[1] : "";
  if (std::strcmp(only, "long") == 0) {
    decode(device, {64, 8, 64, 1, 32768, 1, 0, 12, true, true}, true);
    return 0;
  }
  if (std::strcmp(only, "fp8") == 0) {
    for (const int32_t context : {1024, 8192, 32768}) {
      for (const bool fp8 : {false, true, false, true}) {
        decode(device, {64, 8, 64, 1, context, 1, 0, 12, true, true, fp8}, true);
      }
    }
    for (const bool fp8 : {false, true}) {
      decode(device, {64, 8, 64, 1, 2048, 1, 128, 12, true, true, fp8}, false);
      decode(device, {64, 8, 64, 128, 1024, 1, 0, 2, true, true, fp8}, false);
      decode(device, {32, 8, 128, 1, 32768, 1, 0, 2, true, false, fp8}, true);
      prompt(device, {64, 8, 64, 1, 8192, 8192, 0, 1, true, true, fp8});
      prompt(device, {64, 8, 64, 1, 2048, 2048, 128, 1, true, true, fp8});
      prompt(device, {32, 8, 128, 1, 8192, 8192, 0, 1, true, false, fp8});
    }
    return 0;
  }
  if (std::strcmp(only, "decode") != 0) {
    for (const bool shuffled : {false, true}) {
      prompt(device, {64, 8, 64, 1, 8192, 8192, 0, 1, shuffled, true});
      prompt(device, {16, 16, 64, 2, 8192, 8192, 0, 1, shuffled, false});
      prompt(device, {16, 16, 64, 1, 16384, 16384, 0, 1, shuffled, false});
      prompt(device, {32, 8, 128, 1, 8192, 8192, 0, 1, shuffled, false});
      prompt(device, {16, 16, 128, 1, 16384, 16384, 0, 1, shuffled, false});
    }
    prompt(device, {64, 8, 64, 1, 2048, 2048, 0, 1, true, true});
    prompt(device, {64, 8, 64, 1, 2048, 2048, 128, 1, true, true});
    prompt(device, {64, 8, 64, 16, 700, 700, 0, 1, true, true});
  }
  if (std::strcmp(only, "prompt") != 0) {
    for (const int32_t context : {128, 512, 1024, 2048, 32768}) {
      decode(device, {64, 8, 64, 1, context, 1, 0, 12, true, true}, context > 512);
    }
    decode(device, {64, 8, 64, 1, 2048, 1, 128, 12, true, true}, false);
    decode(device, {64, 8, 64, 128, 1024, 1, 0, 2, true, true}, false);
    decode(device, {64, 8, 64, 128, 1024, 1, 0, 2, true, true}, true);
    decode(device, {64, 8, 64, 128, 1024, 1, 128, 2, true, true}, false);
    decode(device, {64, 8, 64, 128, 128, 1, 0, 2, true, true}, false);
    decode(device, {32, 8, 128, 1, 32768, 1, 0, 2, true, false}, true);
  }
  return 0;
}
