// kernel_bench: the matrix products of one instruction set, per weight type and number of activation rows:
// bytes of weights per second, also as a share of a loop that only reads them in the same run, and operations
// per second (a multiply and an add are two). Weights are far larger than the caches, activations are not.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "backend/cpu/memory.h"
#include "base/error.h"
#include "base/read_loop.h"
#include "base/thread_pool.h"
#include "base/topology.h"
#include "kernels/cpu/matmul/interleave_rows.h"
#include "kernels/cpu/tables/features.h"

namespace millrace::cpu {
namespace {

struct Type {
  const char* name;
  Format format;
  int64_t elements, bytes;  // of a block
};
constexpr Type kTypes[] = {{"mxfp4", Format::kMXFP4, 32, 17}, {"mxfp4_split", Format::kMXFP4Split, 32, 16},
                           {"q8_0", Format::kQ8_0, 32, 34},   {"q4_0", Format::kQ4_0, 32, 18},
                           {"q4_1", Format::kQ4_1, 32, 20},   {"q5_0", Format::kQ5_0, 32, 22},
                           {"q5_1", Format::kQ5_1, 32, 24},   {"q4_k", Format::kQ4_K, 256, 144},
                           {"q5_k", Format::kQ5_K, 256, 176}, {"q6_k", Format::kQ6_K, 256, 210},
                           {"bf16", Format::kBF16, 1, 2},     {"f16", Format::kF16, 1, 2},
                           {"f32", Format::kF32, 1, 4}};

constexpr int64_t kRowsPerTask = 128;

struct Options {
  std::vector<std::string> types{"mxfp4", "q8_0"};
  std::vector<int64_t> rows{1, 8, 64, 512};
  std::string isa;
  int threads = 0;
  int64_t mib = 0;       // beyond the caches
  double seconds = 0.3;  // per figure
  bool interleaved = false, json = false;
};

// Seconds of the best of the runs that fit into `budget`, at least two.
template <class F>
double best_time(double budget, F run) {
  using Clock = std::chrono::steady_clock;
  double best = 1e30, spent = 0;
  for (int i = 0; i < 2 || spent < budget; ++i) {
    const auto start = Clock::now();
    run();
    const double took = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::min(best, took);
    spent += took;
  }
  return best;
}

double read_seconds(ThreadPool& pool, const uint8_t* data, int64_t bytes, double budget) {
  constexpr int64_t kChunk = 1 << 18;
  std::vector<uint64_t> sums(static_cast<size_t>(pool.size()) * 8);  // kept, so that the loop is
  const auto* memory = reinterpret_cast<const std::byte*>(data);
  const auto read = [&](bool ahead) {
    return best_time(budget, [&] {
      pool.parallel_for(bytes / kChunk, 1, [&](int64_t begin, int64_t end, int thread) {
        sums[static_cast<size_t>(thread) * 8] +=
            sum_words(memory + begin * kChunk, (end - begin) * kChunk, ahead);
      });
    });
  };
  return std::min(read(false), read(true));
}

// To the next line of a cache, as the executor's activations lie.
template <class T>
T* aligned(T* p) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64);
}

struct Figure {
  double bytes_per_s, ops_per_s;
};

Figure measure(const KernelTable& kernels, ThreadPool& pool, const Type& type, int64_t num_m,
               const uint8_t* data, int64_t bytes, double budget) {
  const int64_t cols = type.elements == 256 ? 2816 : 2880;
  const int64_t row_bytes = cols / type.elements * type.bytes, scale_bytes = cols / 32;
  const int64_t rows =
      std::min(bytes / row_bytes, std::max<int64_t>(kRowsPerTask, (int64_t{1} << 25) / num_m));
  const MatrixView w{data, row_bytes, data, scale_bytes, cols};
  std::vector<float> values(static_cast<size_t>(num_m * cols));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 2654435761u % 1999) - 999.0f;
  std::vector<ActivationBlock> blocks;
  std::vector<uint16_t> tiles;
  Panel x{reinterpret_cast<const uint8_t*>(values.data()), cols * 4, nullptr};
  const ActivationFormat format = kernels.activations(type.format, num_m);
  if (format == ActivationFormat::kBf16Tiles) {
    tiles.resize(static_cast<size_t>(num_m * cols + kTileSlackBytes + 32));
    uint16_t* const panel = aligned(tiles.data());
    for (int64_t m = 0; m < num_m; ++m) {
      const Bf16TileRow to = bf16_tile_row(panel, num_m, cols, m);
      kernels.quantize_bf16_tile(&values[m * cols], cols, to.at, to.height);
    }
    x = {reinterpret_cast<const uint8_t*>(panel), cols * 2, nullptr, {}, bf16_tile_height(num_m)};
  } else if (format == ActivationFormat::kInt8Tiles) {
    blocks.resize(static_cast<size_t>((num_m + kTileHeight) * cols / 32 + 2));
    auto* int8_tiles = reinterpret_cast<Int8Tile*>(aligned(blocks.data()));
    for (int64_t m = 0; m < num_m; ++m) {
      const int64_t group = m / kTileHeight * kTileHeight;
      kernels.quantize_int8_tile(&values[m * cols], cols, int8_tiles + group / kTileHeight * (cols / 32),
                                 m - group, std::min(kTileHeight, num_m - group));
    }
    x = {reinterpret_cast<const uint8_t*>(int8_tiles),
         cols / 32 * static_cast<int64_t>(sizeof(ActivationBlock)), nullptr};
  } else if (format != ActivationFormat::kFloat32) {
    const auto quantize =
        format == ActivationFormat::kInt8Blocks ? kernels.quantize_int8 : kernels.quantize_pow2;
    blocks.resize(static_cast<size_t>(num_m * cols / 32));
    for (int64_t m = 0; m < num_m; ++m) quantize(&values[m * cols], cols, &blocks[m * cols / 32]);
    x = {reinterpret_cast<const uint8_t*>(blocks.data()),
         cols / 32 * static_cast<int64_t>(sizeof(ActivationBlock)), nullptr};
  }
  const auto at = static_cast<int>(type.format);
  const MatmulFn kernel = format == ActivationFormat::kBf16Tiles   ? kernels.bf16_tile_matmul[at]
                          : format == ActivationFormat::kInt8Tiles ? kernels.int8_tile_matmul[at]
                                                                   : kernels.matmul[at];
  // Outputs as the callers have them, a buffer per thread.
  std::vector<float> out(static_cast<size_t>(num_m * kRowsPerTask * pool.size()));
  const double took = best_time(budget, [&] {
    pool.parallel_for(
        (rows + kRowsPerTask - 1) / kRowsPerTask, 1, [&](int64_t begin, int64_t end, int thread) {
          float* to = out.data() + thread * num_m * kRowsPerTask;
          for (int64_t task = begin; task < end; ++task) {
            const int64_t first = task * kRowsPerTask, count = std::min(kRowsPerTask, rows - first);
            for (int64_t m = 0; m < num_m; m += kernels.rows_per_pass) {
              const Panel part{x.data + m * x.row_bytes, x.row_bytes, nullptr, {}, x.height};
              kernel(w, first, count, part, std::min(kernels.rows_per_pass, num_m - m), to + m * kRowsPerTask,
                     kRowsPerTask);
            }
          }
        });
  });
  const auto all = static_cast<double>(rows);
  return {all * static_cast<double>(row_bytes) / took, all * 2.0 * static_cast<double>(cols * num_m) / took};
}

int run(const Options& options) {
  const KernelTable& kernels = choose_table(options.isa.empty() ? wanted_isa() : options.isa);
  ThreadPool pool(options.threads);
  const int64_t mib = options.mib > 0 ? options.mib : static_cast<int64_t>(beyond_caches() >> 20),
                bytes = mib << 20;
  const Pages memory(static_cast<size_t>(bytes), "weights");
  // f16 0.065, e8m0 2^-83: nothing overflows or becomes subnormal. Touched by the threads that will read.
  pool.parallel_for(mib, 1, [&](int64_t begin, int64_t end, int) {
    std::memset(memory.data() + (begin << 20), 0x2c, static_cast<size_t>(end - begin) << 20);
  });
  const double read = static_cast<double>(bytes) / read_seconds(pool, memory.data(), bytes, options.seconds);
  nlohmann::json report{{"isa", kernels.name}, {"threads", pool.size()}, {"read_bytes_per_s", read}};
  if (!options.json) std::printf("%s, %d threads, reads %.1f GB/s\n", kernels.name, pool.size(), read / 1e9);
  for (const std::string& name : options.types) {
    const Type* type =
        std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type& t) { return name == t.name; });
    if (type == std::end(kTypes))
      throw_error(ErrorCode::kBadInput, "--types: found \"{}\", expected e.g. mxfp4", name);
    Type of = *type;
    if (options.interleaved) {
      const auto layout = interleaved_layout(type->format, kernels.interleaved_rows);
      if (!layout || kernels.matmul[static_cast<int>(layout->format)] == nullptr) {
        throw_error(ErrorCode::kBadInput, "--interleaved: found {}, which {} has no such kernel for", name,
                    kernels.name);
      }
      of.format = layout->format;
    }
    for (int64_t m : options.rows) {
      const Figure f = measure(kernels, pool, of, m, memory.data(), bytes, options.seconds);
      report["products"].push_back({{"type", name},
                                    {"rows", m},
                                    {"bytes_per_s", f.bytes_per_s},
                                    {"share_of_read", f.bytes_per_s / read},
                                    {"ops_per_s", f.ops_per_s}});
      if (options.json) continue;
      std::printf("%-12s %4lld rows  %7.1f GB/s  %5.1f%% of reading  %8.1f GOP/s  %7.2f per thread\n",
                  type->name, static_cast<long long>(m), f.bytes_per_s / 1e9, 100 * f.bytes_per_s / read,
                  f.ops_per_s / 1e9, f.ops_per_s / 1e9 / pool.size());
    }
  }
  if (options.json) std::printf("%s\n", report.dump(2).c_str());
  return 0;
}

}  // namespace
}  // namespace millrace::cpu

int main(int argc, char** argv) {
  millrace::cpu::Options options;
  CLI::App app("Speed of the matrix kernels");
  app.add_option("--types", options.types, "weight types: mxfp4, mxfp4_split, q8_0, q4_k, bf16 ...")
      ->delimiter(',');
  app.add_option("--rows", options.rows, "rows of activations")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--isa", options.isa, "kernel table (default: MILLRACE_ISA, else the best)");
  app.add_option("--threads", options.threads, "0: all")->check(CLI::Range(0, 1024));
  app.add_option("--mib", options.mib,
                 "weights to read (default: sixteen times the largest cache, at least 512)")
      ->check(CLI::Range(16, 1 << 20));
  app.add_option("--seconds", options.seconds, "per figure")->check(CLI::Range(0.0, 3600.0));
  app.add_flag("--interleaved", options.interleaved, "rows interleaved, as the engine's copies are");
  app.add_flag("--json", options.json);
  CLI11_PARSE(app, argc, argv);
  try {
    return millrace::cpu::run(options);
  } catch (const millrace::Error& e) {
    std::fprintf(stderr, "kernel_bench: %s\n", e.what());
    return 2;
  }
}
