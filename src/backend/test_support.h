// What the backend tests share: random weights of every type, a small model that uses every operation, and
// the devices to run it on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/cpu_backend.h"
#include "base/normal_floats.h"
#include "kernels/cpu/tables/features.h"
#include "kernels/quant/blocks.h"
#include "kernels/quant/codec.h"

namespace millrace::testing_support {

// A tensor that owns its bytes.
struct OwnedTensor {
  std::vector<std::byte> bytes, scale_bytes;
  TensorView view;

  std::vector<float> row(int64_t r) const {
    std::vector<float> out(static_cast<size_t>(view.cols()));
    quant::dequantize_row(view, r, out.data());
    return out;
  }
};

inline const std::vector<DType>& matrix_types() {
  static const std::vector<DType> types = {DType::kF32,   DType::kF16,        DType::kBF16, DType::kF8E4M3,
                                           DType::kQ8_0,  DType::kQ4_0,       DType::kQ4_1, DType::kQ5_0,
                                           DType::kQ5_1,  DType::kQ4_K,       DType::kQ5_K, DType::kQ6_K,
                                           DType::kMXFP4, DType::kMXFP4Split, DType::kQ4_Z};
  return types;
}

// Those that a GPU decodes into bf16 tiles: with kernels on the cpu, and dequantized to float32 there.
inline const std::vector<DType>& cpu_kernel_types() {
  static const std::vector<DType> types = {DType::kQ2_K, DType::kQ3_K, DType::kIQ4_NL, DType::kIQ4_XS};
  return types;
}
inline const std::vector<DType>& cpu_dequantized_types() {
  static const std::vector<DType> types = {DType::kIQ3_XXS, DType::kIQ3_S, DType::kIQ2_XXS, DType::kIQ2_XS,
                                           DType::kIQ2_S,   DType::kIQ1_S, DType::kIQ1_M,   DType::kTQ1_0,
                                           DType::kTQ2_0,   DType::kNVFP4};
  return types;
}
// What a weight is off by, relatively, on a device that holds it as bf16.
inline double weight_error(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kBF16:
    case DType::kMXFP4:
    case DType::kMXFP4Split:
      return 0;
    case DType::kQ8_0:
    case DType::kQ4_0:
    case DType::kQ5_0:
    case DType::kQ6_K:
      return 2.01 * 0x1p-8;  // the scale, and its product with the code
    default:
      return 0x1p-8;
  }
}
// The same beyond that, in parts of the largest weight of a block: a minimum and the code's product that it
// is taken from are each rounded, and as large as the block's largest, twice for codes that do not begin at
// 0.
inline double minimum_error(DType type) {
  switch (type) {
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
    case DType::kQ4_Z:
      return 4 * 0x1p-8;
    default:
      return 0;
  }
}
inline double largest_of_block(const float* w, int64_t c) {
  double most = 0;
  for (int64_t i = c / 32 * 32; i < c / 32 * 32 + 32; ++i)
    most = std::max(most, std::fabs(static_cast<double>(w[i])));
  return most;
}

// All that have kernels of their own on some device.
inline std::vector<DType> types_with_kernels() {
  std::vector<DType> types = matrix_types();
  types.insert(types.end(), cpu_kernel_types().begin(), cpu_kernel_types().end());
  return types;
}

// A matrix as a model would have it loaded that has memory for dequantized copies.
inline WeightUse dequantized_where(const Backend& backend, const TensorView& view, WeightUse use) {
  return use == WeightUse::kMatrix && backend.dequantized_bytes(view) > 0 ? WeightUse::kDequantized : use;
}

// Multiplied as float32 with float32 activations.
inline bool is_float(DType type) {
  return type <= DType::kF8E4M3 || (type >= DType::kIQ3_XXS && type <= DType::kNVFP4);
}

inline std::vector<float> random_floats(std::mt19937& random, size_t count, float scale = 1.0f) {
  NormalFloats normal(scale);
  std::vector<float> x(count);
  for (float& v : x) v = normal(random);
  return x;
}

// f16 bits of a number in +-[0.01, 0.04].
inline uint16_t random_half_scale(std::mt19937& random, bool positive = false) {
  const uint32_t bits = 0x2100u + random() % 0x0800u;
  return static_cast<uint16_t>(bits | (positive || random() % 2 ? 0u : 0x8000u));
}

// Where the f16 scales of a block are, and how many bytes of them.
struct ScaleBytes {
  size_t at = 0, count = 2;
};
inline ScaleBytes scale_bytes_of(DType type) {
  switch (type) {
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {0, 4};
    case DType::kQ6_K:
      return {offsetof(quant::BlockQ6_K, d), 2};
    case DType::kQ2_K:
      return {offsetof(quant::BlockQ2_K, d), 4};
    case DType::kQ3_K:
      return {offsetof(quant::BlockQ3_K, d), 2};
    case DType::kTQ1_0:
      return {offsetof(quant::BlockTQ1_0, d), 2};
    case DType::kTQ2_0:
      return {offsetof(quant::BlockTQ2_0, d), 2};
    case DType::kIQ1_M:
    case DType::kNVFP4:
      return {0, 0};
    default:
      return {};
  }
}

// Blocks with every bit random but the f16 scales, which stay small: the types nobody here can write.
inline void random_blocks(std::mt19937& random, DType type, std::vector<std::byte>& bytes) {
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  const size_t step = static_cast<size_t>(info(type).block_bytes);
  const ScaleBytes scale = scale_bytes_of(type);
  for (size_t at = 0; at < bytes.size(); at += step) {
    const uint16_t scales[2] = {random_half_scale(random), random_half_scale(random)};
    std::memcpy(&bytes[at + scale.at], scales, scale.count);
    if (type == DType::kNVFP4) {
      for (size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<std::byte>(8 + random() % 48);  // below 16
    }
    if (type == DType::kIQ1_M) {  // the upper four bits of its last four words
      for (size_t i = 0; i < 4; ++i) {
        std::byte& upper = bytes[at + 48 + 2 * i + 1];
        upper = (upper & std::byte{15}) | static_cast<std::byte>((scales[0] >> (4 * i) & 15) << 4);
      }
    }
  }
}

// [experts,] rows x cols; experts 0: rank 2.
inline OwnedTensor random_tensor(std::mt19937& random, DType type, int64_t rows, int64_t cols,
                                 int64_t experts = 0, float scale = 1.0f) {
  OwnedTensor t;
  const int64_t all_rows = rows * std::max<int64_t>(1, experts);
  t.view.name = "random";
  t.view.type = type;
  t.view.rank = experts > 0 ? 3 : 2;
  t.view.shape =
      experts > 0 ? std::array<int64_t, 4>{experts, rows, cols, 1} : std::array<int64_t, 4>{rows, cols, 1, 1};
  t.view.row_stride_bytes = static_cast<int64_t>(bytes_of(type, cols));
  t.bytes.resize(static_cast<size_t>(all_rows * t.view.row_stride_bytes));
  if (type == DType::kQ4_K || type == DType::kQ5_K || type == DType::kQ6_K ||
      (type >= DType::kQ2_K && type <= DType::kNVFP4)) {
    random_blocks(random, type, t.bytes);
  } else if (type == DType::kMXFP4Split) {
    for (std::byte& b : t.bytes) b = static_cast<std::byte>(random());
    t.scale_bytes.resize(static_cast<size_t>(all_rows * cols / 32));
    for (std::byte& b : t.scale_bytes) b = static_cast<std::byte>(122 + random() % 5);
    t.view.scales = {t.scale_bytes.data(), DType::kU8, 1, 32, cols / 32};
  } else if (type == DType::kF8E4M3) {
    for (std::byte& b : t.bytes) b = static_cast<std::byte>((random() % 2 << 7) | random() % 0x58);
    const int64_t grid_cols = (cols + 6) / 7;  // patches of 3 x 7: a grid that divides nothing
    const std::vector<float> grid =
        random_floats(random, static_cast<size_t>((all_rows + 2) / 3 * grid_cols));
    t.scale_bytes.resize(grid.size() * sizeof(float));
    std::memcpy(t.scale_bytes.data(), grid.data(), t.scale_bytes.size());
    t.view.scales = {t.scale_bytes.data(), DType::kF32, 3, 7, grid_cols};
  } else {
    const std::vector<float> x = random_floats(random, static_cast<size_t>(all_rows * cols), scale);
    quant::quantize(type, x.data(), t.bytes.data(), static_cast<int64_t>(x.size()));
  }
  t.view.data = t.bytes.data();
  return t;
}

inline OwnedTensor random_vector(std::mt19937& random, int64_t size, float middle, float spread) {
  OwnedTensor t = random_tensor(random, DType::kF32, 1, size, 0, spread);
  auto* x = reinterpret_cast<float*>(t.bytes.data());
  for (int64_t i = 0; i < size; ++i) x[i] += middle;
  return t;
}

// A device under test.
struct Device {
  std::string label;
  std::unique_ptr<Backend> backend;
};

// The cpu backend once per instruction set this machine can run.
inline std::vector<Device> cpu_devices(int threads = 2) {
  std::vector<Device> devices;
  for (const cpu::KernelTable* table : cpu::runnable_tables()) {
    devices.push_back({std::string("cpu/") + table->name, make_cpu_backend({threads}, table->name)});
  }
  return devices;
}

// Names of further devices to test, from MILLRACE_TEST_DEVICES ("cpu,cuda"). One that is named must work: a
// test on it fails rather than skips.
inline std::vector<std::string> further_devices() {
  std::vector<std::string> names;
  const char* variable = std::getenv("MILLRACE_TEST_DEVICES");
  std::istringstream list(variable != nullptr ? variable : "");
  for (std::string name; std::getline(list, name, ',');) {
    if (name != "cpu" && name != "reference") names.push_back(name);
  }
  return names;
}

// All of them: the cpu's instruction sets, then the further ones.
inline std::vector<std::string> device_labels() {
  std::vector<std::string> labels;
  for (const cpu::KernelTable* table : cpu::runnable_tables()) labels.push_back(table->name);
  for (const std::string& name : further_devices()) labels.push_back(name);
  return labels;
}
inline std::unique_ptr<Backend> make_device(size_t index, int threads = 2) {
  const size_t tables = cpu::runnable_tables().size();
  if (index < tables) return make_cpu_backend({threads}, cpu::runnable_tables()[index]->name);
  return make_backend(further_devices()[index - tables], {threads});
}
inline std::vector<Device> all_devices(int threads = 2) {
  std::vector<Device> devices;
  for (size_t i = 0; i < device_labels().size(); ++i) {
    devices.push_back({device_labels()[i], make_device(i, threads)});
  }
  return devices;
}

// A sequence with block tables of its own. Blocks come from a shared counter per group, in a scattered order.
struct TestSequence {
  std::array<std::vector<int32_t>, kMaxKvGroups> tables;
  int32_t length = 0;

  // Room for `tokens` more; `next[g]` is the next free block of a group, `stride` scatters the ids.
  void reserve(const ExecutorSpec& spec, int32_t tokens, std::array<int32_t, kMaxKvGroups>& next) {
    for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
      while (static_cast<int32_t>(tables[g].size()) < blocks_for(length + tokens)) {
        const int32_t pool = spec.kv_groups[g].num_blocks;
        tables[g].push_back(static_cast<int32_t>((int64_t{next[g]++} * 7 + 3) % pool));
      }
      if (spec.kv_groups[g].window > 0) {  // what no later token can see is gone
        const int32_t first = std::max(0, length - spec.kv_groups[g].window + 1) / kBlockTokens;
        std::fill_n(tables[g].begin(), std::min<size_t>(first, tables[g].size()), kNoBlock);
      }
    }
  }
  SequenceSlice slice(int32_t first_row, int32_t tokens) const {
    SequenceSlice s{first_row, tokens, length, {}};
    for (size_t g = 0; g < tables.size(); ++g) s.tables[g] = tables[g].data();
    return s;
  }
};

}  // namespace millrace::testing_support
