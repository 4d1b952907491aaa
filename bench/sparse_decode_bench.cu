// Decode attention of a long context on this machine's GPU, full and sparse (base/sparse_pages.h), bf16, keys
// and values in scattered blocks: microseconds a layer. Sparse: rotation and append, bounds and choice,
// attention over the chosen pages; what is chosen is compared with the rule in float64 first. Behind these
// the last 2,048 tokens of a prompt: full attention by the prompts' kernel, sparse attention as a step
// computes it, as many rows at a time as 128 MB hold.
//   sparse_decode_bench [context, 131072] [budget, 4096]
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "base/paging.h"
#include "base/sparse_pages.h"
#include "graph_time.cuh"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/key_tiles.h"
#include "kernels/cuda/attention/sparse.h"
#include "kernels/cuda/attention/split_plan.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {
namespace {

constexpr int kLayers = 3, kLaunches = 6;

__device__ uint32_t hash(size_t i, uint32_t seed) {
  uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
  x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
  return x;
}
__global__ void fill_bf16(uint32_t* to, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words;
       i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t x = hash(i, seed);
    to[i] = (x & 0x807f807fu) | 0x3f003f00u | (x >> 9 & 0x00800080u);  // +-0.5 to 2
  }
}
__global__ void fill_floats(float* to, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    to[i] = (static_cast<float>(hash(i, seed) & 0xffff) / 32768.0f - 1.0f) * 1.7f;
  }
}
DeviceBuffer floats(size_t count, uint32_t seed) {
  DeviceBuffer buffer(count * sizeof(float), "floats");
  fill_floats<<<512, 256>>>(buffer.as<float>(), count, seed);
  return buffer;
}
template <class T>
std::vector<T> from_device(const void* from, size_t count) {
  std::vector<T> values(count);
  MILLRACE_CUDA_TRY(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

constexpr int64_t kRowBytes = int64_t{128} << 20;  // of the rows that choose at a time

struct Setting {
  int32_t heads, kv_heads, dim, rows, context, budget;
  bool prompt = false;  // the rows are the last of one sequence; else each has one of its own
  int32_t sequences() const { return prompt ? 1 : rows; }
};

struct Bench {
  const Device& device;
  Setting s;
  Stream stream;
  int32_t blocks = blocks_for(s.context), pages = (blocks + kSummaryTile - 1) / kSummaryTile * kSummaryTile;
  int64_t layer_elements = int64_t{2} * s.kv_heads * kBlockTokens * s.dim;
  size_t sz(int64_t n) const { return static_cast<size_t>(n); }
  int32_t at_once =
      s.prompt
          ? static_cast<int32_t>(std::clamp<int64_t>(
                kRowBytes / static_cast<int64_t>(sparse_row_bytes(s.heads, s.kv_heads, pages)), 1, s.rows))
          : s.rows;
  DeviceBuffer pool{sz(int64_t{s.sequences()} * blocks * kLayers * layer_elements) * 2, "pool"};
  DeviceBuffer summaries{sz(int64_t{kLayers} * s.sequences() * blocks * s.kv_heads * 2 * s.dim) * 2,
                         "summaries"};
  DeviceBuffer query = floats(sz(int64_t{s.rows} * s.heads * s.dim), 1),
               key = floats(sz(int64_t{s.rows} * s.kv_heads * s.dim), 2),
               value = floats(sz(int64_t{s.rows} * s.kv_heads * s.dim), 3),
               out = floats(sz(int64_t{s.rows} * s.heads * s.dim), 4),
               angles{sz(int64_t{s.rows} * s.dim) * 4, "angles"};
  DeviceBuffer weights{sz(int64_t{at_once} * s.heads * pages) * 4, "weights"},
      tiles{sz(int64_t{at_once} * s.heads * (pages / kSummaryTile)) * 8, "tiles"},
      chosen{sz(int64_t{at_once} * s.kv_heads * pages) * 4, "chosen"},
      tables{sz(int64_t{at_once} * s.kv_heads) * 8, "tables"}, positions{sz(at_once) * 4, "positions"},
      arrived{sz(int64_t{s.rows} * s.kv_heads) * 4, "arrived"},
      partial{paged_attention_partial_bytes(at_once, std::bit_ceil(sz(attention_splits(s.context, 0))),
                                            s.kv_heads, s.dim),
              "partial"},
      ints;
  std::vector<int32_t> table;
  size_t chunks_at = 0;
  int32_t num_chunks = 0;

  Bench(const Device& gpu, const Setting& setting) : device(gpu), s(setting) {
    fill_bf16<<<2048, 256>>>(pool.as<uint32_t>(), pool.bytes() / 4, 77u);
    std::vector<float2> none(angles.bytes() / sizeof(float2), {1.0f, 0.0f});  // queries stay as they are
    MILLRACE_CUDA_TRY(cudaMemcpy(angles.as<void>(), none.data(), angles.bytes(), cudaMemcpyHostToDevice));
    MILLRACE_CUDA_TRY(cudaMemset(arrived.as<void>(), 0, arrived.bytes()));
    table.resize(sz(s.sequences()) * sz(blocks));
    std::iota(table.begin(), table.end(), 0);
    std::mt19937 random(1);
    std::shuffle(table.begin(), table.end(), random);
    std::vector<int32_t> host;
    for (int32_t r = 0; r < s.rows; ++r)
      host.push_back(s.prompt ? s.context - s.rows + r : s.context - 1 - r % 7);
    for (int32_t r = 0; r < s.rows; ++r) host.push_back(s.prompt ? 0 : r);
    for (int32_t r = 0; r < s.rows; ++r) host.push_back(s.prompt ? 0 : r * blocks);
    for (int32_t r = 0; r < s.rows; ++r) host.push_back(s.budget / kBlockTokens);
    host.insert(host.end(), table.begin(), table.end());
    host.resize((host.size() + 3) / 4 * 4);
    chunks_at = host.size();
    const int32_t most = prefill_chunk_tokens(s.heads, s.kv_heads, s.dim);
    for (int32_t at = (s.rows - 1) / most * most; at >= 0 && s.prompt; at -= most, ++num_chunks)
      host.insert(host.end(), {at, std::min(most, s.rows - at), s.context - s.rows + at, 0});
    ints = DeviceBuffer(host.size() * 4, "ints");
    MILLRACE_CUDA_TRY(cudaMemcpy(ints.as<void>(), host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    for (int l = 0; l < kLayers; ++l) {
      for (int32_t b = 0; b < s.sequences() * blocks; ++b) {
        launch_summarize_block(cache(l), summaries_of(l), b, {device, stream.get()});
      }
    }
    stream.synchronize();
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
  }
  LayerCache cache(int layer) const {
    const auto* at = ints.as<const int32_t>();
    return {.pool = pool.as<void>(),
            .type = DType::kBF16,
            .block_elements = kLayers * layer_elements,
            .layer_offset = layer % kLayers * layer_elements,
            .positions = at,
            .sequence_of = at + s.rows,
            .table_starts = at + 2 * s.rows,
            .tables = at + 4 * s.rows,
            .heads = s.heads,
            .kv_heads = s.kv_heads,
            .head_dim = s.dim,
            .order = CacheOrder::kSwizzled};
  }
  PageSummaries summaries_of(int layer) const {
    return {
        summaries.as<uint16_t>() + int64_t{layer % kLayers} * s.sequences() * blocks * s.kv_heads * 2 * s.dim,
        s.dim};
  }
  // Of rows [first, first + at_once).
  SparseRows choice(int layer, int32_t first = 0) const {
    SparseRows c;
    c.cache = cache(layer);
    c.cache.positions += first, c.cache.sequence_of += first;
    c.summaries = summaries_of(layer);
    c.budgets = ints.as<const int32_t>() + 3 * s.rows + first;
    c.query = query.as<const float>() + int64_t{first} * s.heads * s.dim;
    c.scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
    c.rows = std::min(at_once, s.rows - first);
    c.pages = pages;
    c.most_before = std::min(pages, max_splits_for(s.context - 1, 0) * (kSplitKeys / kBlockTokens));
    c.summarizes = !s.prompt;
    c.weights = weights.as<float>(), c.tiles = tiles.as<float2>(), c.chosen = chosen.as<int32_t>();
    c.tables = tables.as<const int32_t*>(), c.positions = positions.as<int32_t>();
    return c;
  }
  PagedAttention attention(int layer, bool sparse, int32_t first = 0) const {
    PagedAttention a;
    a.cache = cache(layer);
    a.op = {0, 1.0f / std::sqrt(static_cast<float>(s.dim)), nullptr};
    a.rows = sparse ? std::min(at_once, s.rows - first) : s.rows;
    a.max_splits = max_splits_for((sparse ? s.budget : s.context) - 1, 0);
    const int64_t row = int64_t{first} * s.heads * s.dim;
    a.query = query.as<float>() + row, a.key = key.as<float>(), a.value = value.as<float>();
    a.out = out.as<float>() + row;
    a.arrived = arrived.as<int32_t>();
    if (sparse) {
      a.cache.positions = positions.as<const int32_t>();
      a.cache.head_tables = tables.as<const int32_t* const>();
    } else if (s.prompt) {
      a.chunks = ints.as<const int32_t>() + chunks_at;
      a.num_chunks = num_chunks;
      return a;
    } else {
      a.angles = angles.as<const float2>();
    }
    if (splits_in_parallel(a.rows, s.kv_heads, s.dim, a.max_splits, 0, partial.bytes(), device))
      a.partial = partial.as<float>();
    return a;
  }

  // Pages of row 0, first and last KV head, that are not those of the rule in float64.
  int wrong_pages() {
    launch_choose_pages(choice(0), {device, stream.get()});
    stream.synchronize();
    const auto bounds = from_device<uint16_t>(summaries_of(0).data, summaries.bytes() / 2 / kLayers);
    const auto q = from_device<float>(query.as<void>(), query.bytes() / 4);
    const int32_t before = (s.context - 1) / kBlockTokens, group = s.heads / s.kv_heads;
    const PageChoice want = page_choice(s.budget / kBlockTokens, before + 1);
    int wrong = 0;
    for (const int32_t kv_head : {0, s.kv_heads - 1}) {
      std::vector<double> weight(sz(before));
      for (int32_t g = 0; g < group; ++g) {
        std::vector<double> score(sz(before));
        double largest = -1e300, sum = 0;
        for (int32_t p = 0; p < before; ++p) {
          const uint16_t* least = bounds.data() + (int64_t{table[sz(p)]} * s.kv_heads + kv_head) * 2 * s.dim;
          for (int32_t d = 0; d < s.dim; ++d) {
            const double x = static_cast<double>(q[sz((kv_head * group + g) * s.dim + d)]);
            const uint16_t bits = x < 0 ? least[d] : least[s.dim + d];
            score[sz(p)] += x * static_cast<double>(std::bit_cast<float>(uint32_t{bits} << 16));
          }
          score[sz(p)] /= std::sqrt(static_cast<double>(s.dim));
          largest = std::max(largest, score[sz(p)]);
        }
        for (const double x : score) sum += std::exp(x - largest);
        for (int32_t p = 0; p < before; ++p) weight[sz(p)] += std::exp(score[sz(p)] - largest) / sum;
      }
      std::vector<int32_t> order(sz(want.last - want.first));
      std::iota(order.begin(), order.end(), want.first);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return weight[sz(a)] > weight[sz(b)]; });
      order.resize(sz(want.wanted));
      std::sort(order.begin(), order.end());
      std::vector<int32_t> list = {table[0]};
      for (const int32_t p : order) list.push_back(table[sz(p)]);
      for (int32_t p = want.last; p <= before; ++p) list.push_back(table[sz(p)]);
      const auto got = from_device<int32_t>(chosen.as<int32_t>() + int64_t{kv_head} * pages, list.size());
      for (const int32_t block : list) wrong += std::find(got.begin(), got.end(), block) == got.end();
      const auto at = from_device<int32_t>(positions.as<void>(), 1);
      wrong += at[0] != s.budget - kBlockTokens + (s.context - 1) % kBlockTokens;
    }
    return wrong;
  }

  double time(const std::function<void(int)>& layer) {
    return median_us(stream, 3, 15,
                     [&] {
                       for (int l = 0; l < kLaunches; ++l) layer(l);
                     }) /
           kLaunches;
  }
  // The rows of a prompt.
  void run_prompt() {
    const Launch at{device, stream.get()};
    const auto by_parts = [&](const std::function<void(int32_t)>& part) {
      for (int32_t first = 0; first < s.rows; first += at_once) part(first);
    };
    const double full = time([&](int l) { launch_paged_attention(attention(l, false), at); });
    const double choose =
        time([&](int l) { by_parts([&](int32_t first) { launch_choose_pages(choice(l, first), at); }); });
    const double all = time([&](int l) {
      by_parts([&](int32_t first) {
        launch_choose_pages(choice(l, first), at);
        launch_paged_attention(attention(l, true, first), at);
      });
    });
    std::printf(
        "%4d last of %6d heads %d/%d dim %3d budget %5d: full %8.1f us, sparse %8.1f us = %5.1f%% (choose "
        "%8.1f), %d rows at a time\n",
        s.rows, s.context, s.heads, s.kv_heads, s.dim, s.budget, full, all, 100 * all / full, choose,
        at_once);
  }
  void run() {
    const Launch at{device, stream.get()};
    const int wrong = wrong_pages();
    const RopeParams rope{nullptr, s.dim / 2, 1.0f, false};
    const double full = time([&](int l) { launch_paged_attention(attention(l, false), at); });
    const double append = time([&](int l) {
      launch_rope_append_kv(cache(l), rope, angles.as<const float2>(), s.rows, query.as<float>(),
                            key.as<float>(), value.as<float>(), at);
    });
    const double choose = time([&](int l) { launch_choose_pages(choice(l), at); });
    const double attend = time([&](int l) { launch_paged_attention(attention(l, true), at); });
    const double all = time([&](int l) {
      launch_rope_append_kv(cache(l), rope, angles.as<const float2>(), s.rows, query.as<float>(),
                            key.as<float>(), value.as<float>(), at);
      launch_choose_pages(choice(l), at);
      launch_paged_attention(attention(l, true), at);
    });
    std::printf(
        "%2d x %6d heads %d/%d dim %3d budget %5d: full %8.1f us, sparse %7.1f us = %5.1f%% (append %5.1f, "
        "choose %6.1f, attend %6.1f), %d pages wrong\n",
        s.rows, s.context, s.heads, s.kv_heads, s.dim, s.budget, full, all, 100 * all / full, append, choose,
        attend, wrong);
  }
};

}  // namespace
}  // namespace millrace::cuda

int main(int argc, char** argv) {
  using namespace millrace::cuda;
  const Device device = Device::open(0);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int32_t context = argc > 1 ? std::atoi(argv[1]) : 131072,
                budget = argc > 2 ? std::atoi(argv[2]) : 4096;
  if (budget < millrace::kLeastSparseBudget || context <= budget || budget % millrace::kBlockTokens != 0) {
    std::fprintf(stderr, "usage: sparse_decode_bench [context] [budget, below it, whole pages]\n");
    return 2;
  }
  for (const int32_t rows : {1, 4, 16}) {
    Bench(device, {64, 8, 64, rows, context, budget}).run();
    Bench(device, {32, 8, 128, rows, context, budget}).run();
  }
  constexpr int32_t kPromptRows = 2048;
  if (context < kPromptRows + budget) return 0;
  Bench(device, {64, 8, 64, kPromptRows, context, budget, true}).run_prompt();
  Bench(device, {32, 8, 128, kPromptRows, context, budget, true}).run_prompt();
  return 0;
}
