// Times the decode path's kernels on random weights of gpt-oss-20b's shape: each kind alone (24 launches in a
// graph, each with its own layer's weights, so that nothing comes from L2), then whole layers, then layers
// without one kind: what a kind costs where it stands. Medians over replays, with the bytes that have to be
// read.
//   cuda_kernel_bench [context] [rows]
//   cuda_kernel_bench [context] [rows] once    one layer and the logits, launched plainly: for a profiler
//   cuda_kernel_bench gemm [rows]              the products of a prompt of so many rows, or of a large batch
//   ... bf16                                   the same with BF16 in place of Q8_0
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/paging.h"
#include "graph_time.cuh"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/sample/argmax.h"

namespace millrace::cuda {
namespace {

constexpr int kLayers = 24, kHidden = 2880, kHeads = 64, kKvHeads = 8, kDim = 64, kExperts = 32, kChosen = 4,
              kVocab = 201088;

__global__ void fill_random(uint32_t* to, size_t words, uint32_t seed, uint32_t mask, uint32_t add) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    to[i] = (x & mask) + add;
  }
}
__global__ void fill_floats(float* to, size_t count, uint32_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    to[i] = (static_cast<float>(x & 0xffff) / 32768.0f - 1.0f) * scale;
  }
}

struct Matrix {
  DeviceBuffer buffer;
  PackedMatrix packed;
  size_t bytes = 0;  // of one expert
  Matrix() = default;
  Matrix(DType type, int64_t rows, int64_t cols, int64_t experts = 1) {
    packed = packed_shape(type, rows, cols);
    bytes = static_cast<size_t>(packed.tiles_per_expert) * packed.tile_bytes;
    buffer = DeviceBuffer(bytes * static_cast<size_t>(experts), "weights");
    // Random codes; scales are whatever falls out, kept finite: e8m0 of 2^-29 to 4, and elsewhere with the
    // top bit of an exponent clear nothing overflows.
    const bool mxfp4 = packed.format == PackedFormat::kMxfp4;
    fill_random<<<2048, 256>>>(buffer.as<uint32_t>(), bytes * static_cast<size_t>(experts) / 4,
                               static_cast<uint32_t>(rows * 31 + cols), mxfp4 ? 0x1f1f1f1fu : 0xbf7fbf7fu,
                               mxfp4 ? 0xc0c0c0c0u : 0u);
    packed.tiles = buffer.as<const uint8_t>();
  }
};

DeviceBuffer floats(size_t count, float scale = 1.0f) {
  DeviceBuffer buffer(count * sizeof(float), "floats");
  fill_floats<<<256, 256>>>(buffer.as<float>(), count, static_cast<uint32_t>(count), scale);
  return buffer;
}

double median_us(const Stream& stream, const std::function<void()>& record) {
  return median_us(stream, 10, 30, record);
}

DType dense_type = DType::kQ8_0;  // of everything but the experts and the router

struct Layer {
  Matrix q{dense_type, kHeads*kDim, kHidden}, k{dense_type, kKvHeads*kDim, kHidden},
      v{dense_type, kKvHeads*kDim, kHidden}, o{dense_type, kHidden, kHeads*kDim};
  Matrix gate{DType::kMXFP4, kHidden, kHidden, kExperts}, up{DType::kMXFP4, kHidden, kHidden, kExperts},
      down{DType::kMXFP4, kHidden, kHidden, kExperts};
  DeviceBuffer router = floats(kExperts * kHidden, 0.05f), norm = floats(kHidden),
               bias = floats(kHeads * kDim), expert_bias = floats(kExperts * kHidden);
};

struct Bench {
  const Device& device;
  int32_t context, rows;
  Stream stream;
  Launch at{device, stream.get()};
  std::vector<Layer> layers{kLayers};
  Matrix output{dense_type, kVocab, kHidden};
  DeviceBuffer residual = floats(4 * kHidden), normed = floats(4 * kHidden),
               query = floats(4 * kHeads * kDim), attention = floats(4 * kHeads * kDim),
               key = floats(4 * kHeads * kDim), value = floats(4 * kHeads * kDim),
               scores = floats(4 * kExperts), act = floats(16 * kHidden), logits = floats(size_t{4} * kVocab),
               angles = floats(4 * kDim);
  DeviceBuffer x_bf16{4 * kHidden * 2, "rows"}, pool, batch,
      partial{paged_attention_partial_bytes(4, 256, kKvHeads, kDim), "partial"},
      arrived{4 * kKvHeads * 4, "arrived"}, best{16, "best"},
      candidates{argmax_candidates_bytes(4), "candidates"}, moe_sync{sizeof(PersistentMoeSync), "sync"};

  Bench(const Device& gpu, int32_t context_len, int32_t num_rows)
      : device(gpu), context(context_len), rows(num_rows) {
    const int32_t blocks = blocks_for(context + 1);
    const size_t block_bytes = size_t{kLayers} / 2 * 2 * kKvHeads * kBlockTokens * kDim * 2;
    pool = DeviceBuffer(block_bytes * static_cast<size_t>(blocks) * static_cast<size_t>(rows), "pool");
    fill_random<<<2048, 256>>>(pool.as<uint32_t>(), pool.bytes() / 4, 77, 0xbf7fbf7fu, 0);
    std::vector<int32_t> host(16, context);                                              // positions
    for (int32_t r = 0; r < 4; ++r) host[static_cast<size_t>(4 + r)] = r;                // sequence_of
    for (int32_t r = 0; r < 4; ++r) host[static_cast<size_t>(8 + r)] = 16 + r * blocks;  // table_starts
    for (int32_t i = 0; i < rows * blocks; ++i)
      host.push_back(static_cast<int32_t>(int64_t{i} * 7919 % (rows * blocks)));
    batch = DeviceBuffer(host.size() * 4 + 64, "batch");
    MILLRACE_CUDA_TRY(cudaMemcpy(batch.as<void>(), host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    MILLRACE_CUDA_TRY(cudaMemset(arrived.as<void>(), 0, arrived.bytes()));
    MILLRACE_CUDA_TRY(cudaMemset(candidates.as<void>(), 0, candidates.bytes()));
    MILLRACE_CUDA_TRY(cudaMemset(moe_sync.as<void>(), 0, moe_sync.bytes()));
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
  }

  void qkv(int l) {
    Layer& w = layers[static_cast<size_t>(l)];
    Gemv op;
    op.num_parts = 3;
    op.parts[0] = {w.q.packed, w.bias.as<float>(), query.as<float>()};
    op.parts[1] = {w.k.packed, w.bias.as<float>(), key.as<float>()};
    op.parts[2] = {w.v.packed, w.bias.as<float>(), value.as<float>()};
    op.x = residual.as<float>();
    op.norm_weight = w.norm.as<float>();
    op.eps = 1e-5f;
    op.tokens = rows;
    launch_gemv(op, at);
  }
  void attend(int l) {
    PagedAttention op;
    const auto* ints = batch.as<const int32_t>();
    op.cache = {.pool = pool.as<void>(),
                .type = DType::kBF16,
                .block_elements = int64_t{kLayers} / 2 * 2 * kKvHeads * kBlockTokens * kDim,
                .layer_offset = int64_t{l} / 2 * 2 * kKvHeads * kBlockTokens * kDim,
                .positions = ints,
                .sequence_of = ints + 4,
                .table_starts = ints + 8,
                .tables = ints,
                .heads = kHeads,
                .kv_heads = kKvHeads,
                .head_dim = kDim,
                .order = CacheOrder::kSwizzled};
    op.op = {l % 2 == 0 ? 128 : 0, 0.125f, layers[static_cast<size_t>(l)].bias.as<float>()};
    op.rows = rows;
    op.max_splits = attention_splits(context, op.op.window);
    op.angles = angles.as<const float2>();
    op.query = query.as<float>();
    op.key = key.as<float>();
    op.value = value.as<float>();
    op.out = attention.as<float>();
    op.partial = op.max_splits > 1 && op.op.window == 0 ? partial.as<float>() : nullptr;
    op.arrived = arrived.as<int32_t>();
    launch_paged_attention(op, at);
  }
  void project(int l) {
    Gemv op;
    op.num_parts = 1;
    op.parts[0] = {layers[static_cast<size_t>(l)].o.packed, nullptr, residual.as<float>()};
    op.x = attention.as<float>();
    op.tokens = rows;
    op.add = true;
    launch_gemv(op, at);
  }
  Router route_of(int l) {
    Layer& w = layers[static_cast<size_t>(l)];
    return {w.router.as<float>(),
            w.bias.as<float>(),
            residual.as<float>(),
            w.norm.as<float>(),
            1e-5f,
            rows,
            kExperts,
            kHidden,
            scores.as<float>(),
            normed.as<float>(),
            x_bf16.as<uint16_t>()};
  }
  GemvExperts experts_of(int l) {
    Layer& w = layers[static_cast<size_t>(l)];
    GemvExperts op;
    op.gate = w.gate.packed, op.up = w.up.packed, op.down = w.down.packed;
    op.gate_bias = op.up_bias = op.down_bias = w.expert_bias.as<float>();
    op.scores = scores.as<float>();
    op.tokens = rows, op.experts = kExperts, op.k = kChosen;
    op.activation.clamped = true;
    op.x_bf16 = x_bf16.as<uint16_t>();
    op.act = act.as<float>();
    op.residual = residual.as<float>();
    return op;
  }
  void route(int l) { launch_router(route_of(l), at); }
  void experts(int l) { launch_gemv_experts(experts_of(l), at); }
  void moe(int l) { launch_persistent_moe(route_of(l), experts_of(l), moe_sync.as<PersistentMoeSync>(), at); }
  void head() {
    Gemv op;
    op.num_parts = 1;
    op.parts[0] = {output.packed, nullptr, logits.as<float>()};
    op.x = residual.as<float>();
    op.norm_weight = layers[0].norm.as<float>();
    op.eps = 1e-5f;
    op.tokens = rows;
    launch_gemv(op, at);
    launch_argmax(logits.as<float>(), rows, kVocab, candidates.as<void>(), best.as<int32_t>(), at);
  }

  void report(const char* name, double us, int launches, double bytes) {
    std::printf("%-34s %9.1f us, %7.2f us each, %8.2f MB, %5.2f TB/s\n", name, us, us / launches, bytes / 1e6,
                bytes / us / 1e6);
  }

  void once() {
    for (const int l : {1, 2}) {
      qkv(l);
      attend(l);
      project(l);
      route(l);
      experts(l);
    }
    head();
    stream.synchronize();
  }

  // Some layers' router and experts, in three kernels and in one.
  bool same_bits() {
    std::vector<float> start(static_cast<size_t>(rows) * kHidden), results[2];
    const size_t bytes = start.size() * sizeof(float);
    MILLRACE_CUDA_TRY(cudaMemcpy(start.data(), residual.as<void>(), bytes, cudaMemcpyDeviceToHost));
    for (std::vector<float>& result : results) {
      MILLRACE_CUDA_TRY(cudaMemcpy(residual.as<void>(), start.data(), bytes, cudaMemcpyHostToDevice));
      for (int l = 0; l < 8; ++l) {
        if (&result == results) {
          route(l);
          experts(l);
        } else {
          moe(l);
        }
      }
      stream.synchronize();
      result.resize(start.size());
      MILLRACE_CUDA_TRY(cudaMemcpy(result.data(), residual.as<void>(), bytes, cudaMemcpyDeviceToHost));
    }
    MILLRACE_CUDA_TRY(cudaMemcpy(residual.as<void>(), start.data(), bytes, cudaMemcpyHostToDevice));
    return results[0] != start && std::memcmp(results[0].data(), results[1].data(), bytes) == 0;
  }

  void run() {
    const bool fused = supports_persistent_moe(route_of(0), experts_of(0), device);
    Layer& w = layers[0];
    const double qkv_bytes = static_cast<double>(w.q.bytes + w.k.bytes + w.v.bytes);
    const double o_bytes = static_cast<double>(w.o.bytes), router_bytes = kExperts * kHidden * 4.0;
    const double experts_bytes = 3.0 * kChosen * static_cast<double>(w.gate.bytes) * rows;
    const double output_bytes = static_cast<double>(output.bytes);
    const double kv_bytes = rows * kKvHeads * kDim * 4.0 * ((context + 1) + std::min(128, context + 1)) * 12;
    const double all =
        kLayers * (qkv_bytes + o_bytes + router_bytes + experts_bytes) + output_bytes + kv_bytes;
    const auto each = [&](const std::function<void(int)>& launch) {
      return median_us(stream, [&] {
        for (int l = 0; l < kLayers; ++l) launch(l);
      });
    };
    std::printf("context %d, rows %d\n", context, rows);
    report("norm, q, k, v", each([&](int l) { qkv(l); }), kLayers, kLayers * qkv_bytes);
    report("rope, append, attention", each([&](int l) { attend(l); }), kLayers, kv_bytes);
    report("projection", each([&](int l) { project(l); }), kLayers, kLayers * o_bytes);
    report("norm, router", each([&](int l) { route(l); }), kLayers, kLayers * router_bytes);
    report("experts", each([&](int l) { experts(l); }), kLayers, kLayers * experts_bytes);
    if (fused) {
      std::printf("norm, router, experts in one kernel: %s bits\n", same_bits() ? "the same" : "OTHER");
      report("norm, router, experts", each([&](int l) { moe(l); }), kLayers,
             kLayers * (router_bytes + experts_bytes));
    }
    report("norm, logits, argmax", median_us(stream, [&] { head(); }), 1, output_bytes);
    const auto step = [&](int without) {
      return median_us(stream, [&] {
        for (int l = 0; l < kLayers; ++l) {
          if (without != 0) qkv(l);
          if (without != 1) attend(l);
          if (without != 2) project(l);
          if (without == 3) continue;
          if (fused) {
            moe(l);
          } else {
            route(l);
            experts(l);
          }
        }
        if (without != 4) head();
      });
    };
    const double whole = step(-1);
    report("whole step", whole, 1, all);
    const char* names[] = {"without qkv", "without attention", "without projection", "without experts",
                           "without logits"};
    for (int i = 0; i < 5; ++i) {
      std::printf("  %-32s %9.1f us: it costs %.2f us a layer\n", names[i], step(i),
                  (whole - step(i)) / (i == 4 ? 1 : kLayers));
    }
  }
};

// The products of many rows: experts of random tokens, q, k, v and the projection. Four layers in turn.
struct GemmBench {
  static constexpr int kBenchLayers = 4;
  const Device& device;
  int64_t rows;
  Stream stream;
  Launch at{device, stream.get()};
  std::vector<Layer> layers{kBenchLayers};
  Matrix output{dense_type, kVocab, kHidden};
  DeviceBuffer logits{static_cast<size_t>(std::min<int64_t>(rows, 128)) * kVocab * 4, "logits"};
  int64_t pairs = rows * kChosen;
  ExpertGroups sizes = expert_groups(nullptr, pairs, kExperts, device);
  DeviceBuffer x = floats(static_cast<size_t>(rows * kHeads) * kDim),
               out{static_cast<size_t>(pairs) * kHidden * 4, "out"},
               query{static_cast<size_t>(rows * kHeads) * kDim * 4, "query"};
  DeviceBuffer operand{bf16_rows_bytes(sizes.max_rows, kHeads*kDim, device), "operand"},
      act{bf16_rows_bytes(sizes.max_rows, kHidden, device), "act"},
      groups{expert_groups_ints(pairs, kExperts, device) * 4, "groups"},
      chosen{static_cast<size_t>(pairs) * 4, "chosen"};

  GemmBench(const Device& gpu, int64_t count) : device(gpu), rows(count) {
    std::vector<int32_t> host(static_cast<size_t>(pairs));
    uint32_t state = 12345;
    for (int64_t r = 0; r < rows; ++r) {
      for (int s = 0; s < kChosen; ++s) {  // four different ones
        state = state * 1664525u + 1013904223u;
        host[static_cast<size_t>(r * kChosen + s)] =
            static_cast<int32_t>((state >> 20) % (kExperts / kChosen)) * kChosen + s;
      }
    }
    MILLRACE_CUDA_TRY(cudaMemcpy(chosen.as<void>(), host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
  }
  ExpertGroups made() { return expert_groups(groups.as<int32_t>(), pairs, kExperts, device); }
  void group() { launch_group_experts(chosen.as<int32_t>(), pairs, kExperts, made(), at); }
  void round_rows(int32_t copies, const int32_t* sorted_rows, int64_t count, int64_t cols,
                  PackedFormat format) {
    RoundRows op;
    op.x = x.as<float>();
    op.sorted_rows = sorted_rows;
    op.copies = copies;
    op.rows = count;
    op.cols = cols;
    op.weights = format;
    op.to = {operand.as<uint8_t>()};
    launch_round_rows(op, at);
  }
  void gate_up(int l) {
    Layer& w = layers[static_cast<size_t>(l)];
    GroupedGemm op;
    op.experts = kExperts;
    op.gate = w.gate.packed, op.up = w.up.packed;
    op.gate_bias = op.up_bias = w.expert_bias.as<float>();
    op.activation.clamped = true;
    op.groups = made();
    op.x = {operand.as<uint8_t>()};
    op.out = out.as<float>();
    if (device.has_wgmma()) op.act = {act.as<uint8_t>()}, op.act_weights = w.down.packed.format;
    launch_grouped_gemm(op, at);
  }
  void down(int l) {
    GroupedGemm op;
    op.experts = kExperts;
    op.gate = layers[static_cast<size_t>(l)].down.packed;
    op.gate_bias = layers[static_cast<size_t>(l)].expert_bias.as<float>();
    op.groups = made();
    op.x = {operand.as<uint8_t>()};
    op.out = out.as<float>();
    launch_grouped_gemm(op, at);
  }
  void linear(int l, bool projection) {
    Layer& w = layers[static_cast<size_t>(l)];
    Gemm op;
    if (projection) {
      op.parts[op.num_parts++] = {w.o.packed, nullptr, out.as<float>()};
    } else {
      op.parts[op.num_parts++] = {w.q.packed, w.bias.as<float>(), query.as<float>()};
      op.parts[op.num_parts++] = {w.k.packed, w.bias.as<float>(), out.as<float>()};
      op.parts[op.num_parts++] = {w.v.packed, w.bias.as<float>(), out.as<float>()};
    }
    op.x = {operand.as<uint8_t>()};
    op.rows = rows;
    op.add = projection;
    launch_gemm(op, at);
  }
  void head(int64_t count) {
    Gemm op;
    op.parts[op.num_parts++] = {output.packed, nullptr, logits.as<float>()};
    op.x = {operand.as<uint8_t>()};
    op.rows = count;
    launch_gemm(op, at);
  }
  void report(const char* name, const std::function<void(int)>& launch, double flops, double bytes) {
    const double us = median_us(stream,
                                [&] {
                                  for (int l = 0; l < kBenchLayers; ++l) launch(l);
                                }) /
                      kBenchLayers;
    std::printf("%-28s %9.1f us, %6.1f TFLOP/s, %5.2f TB/s of weights\n", name, us, flops / us / 1e6,
                bytes / us / 1e6);
  }
  void run() {
    const double expert = 2.0 * kHidden * kHidden * static_cast<double>(pairs);
    const double experts_bytes =
        static_cast<double>(layers[0].gate.bytes) * std::min<double>(kExperts, static_cast<double>(pairs));
    std::printf("%lld rows\n", static_cast<long long>(rows));
    report(
        "group", [&](int) { group(); }, 0, 0);
    report(
        "rows for gate and up",
        [&](int) { round_rows(kChosen, made().sorted_rows, rows, kHidden, PackedFormat::kMxfp4); }, 0, 0);
    report(
        "gate and up", [&](int l) { gate_up(l); }, 2 * expert, 2 * experts_bytes);
    report(
        "down", [&](int l) { down(l); }, expert, experts_bytes);
    report(
        "rows for q, k, v",
        [&](int) { round_rows(1, nullptr, rows, kHidden, packed_format(dense_type, kHidden)); }, 0, 0);
    report(
        "q, k, v", [&](int l) { linear(l, false); },
        2.0 * kHidden * (kHeads + 2 * kKvHeads) * kDim * static_cast<double>(rows),
        static_cast<double>(layers[0].q.bytes + layers[0].k.bytes + layers[0].v.bytes));
    round_rows(1, nullptr, rows, kHeads * kDim, packed_format(dense_type, kHidden));
    report(
        "projection", [&](int l) { linear(l, true); },
        2.0 * kHidden * kHeads * kDim * static_cast<double>(rows), static_cast<double>(layers[0].o.bytes));
    const int64_t logit_rows = std::min<int64_t>(rows, 128);
    report(
        "logits of up to 128 rows", [&](int) { head(logit_rows); },
        2.0 * kHidden * kVocab * static_cast<double>(logit_rows), static_cast<double>(output.bytes));
  }
};

}  // namespace
}  // namespace millrace::cuda

int main(int argc, char** argv) {
  using namespace millrace::cuda;
  const Device device = Device::open(0);
  if (argc > 1 && std::string(argv[argc - 1]) == "bf16") {
    dense_type = millrace::DType::kBF16;
    --argc;
  }
  if (argc > 1 && std::string(argv[1]) == "gemm") {
    const int rows = argc > 2 ? std::atoi(argv[2]) : 2048;
    if (rows < 1 || rows > 16384) {
      std::fprintf(stderr, "usage: cuda_kernel_bench gemm [rows, 1 to 16384]\n");
      return 2;
    }
    GemmBench(device, rows).run();
    return 0;
  }
  const int context = argc > 1 ? std::atoi(argv[1]) : 128, rows = argc > 2 ? std::atoi(argv[2]) : 1;
  if (context < 0 || rows < 1 || rows > 4) {
    std::fprintf(stderr, "usage: cuda_kernel_bench [context] [rows, 1 to 4]\n");
    return 2;
  }
  Bench bench(device, context, rows);
  if (argc > 3 && std::string(argv[3]) == "once") {
    bench.once();
  } else {
    bench.run();
  }
  return 0;
}
