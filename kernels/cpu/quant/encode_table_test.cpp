// The encoders of every instruction set this machine can run: the same bytes from all of them, and from those
// of other processors (by a hash that is the same wherever the test runs: under qemu too), and an error no
// larger than that of the float search with weights that are all alike.
#include "kernels/cpu/quant/encode_dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cpu/quant/encoder.h"
#include "kernels/quant/codec.h"

namespace millrace::quant {
namespace {

struct Entry {
  DType type;
  Encoding encoding;
  uint64_t hash;  // of the bytes of kKinds
};
const Entry kEntries[] = {{DType::kF16, Encoding::kF16, 5854609247649933741u},
                          {DType::kBF16, Encoding::kBF16, 15742589818364199881u},
                          {DType::kQ8_0, Encoding::kQ8_0, 1806007179124938515u},
                          {DType::kQ4_0, Encoding::kQ4_0, 91313599759753665u},
                          {DType::kQ5_0, Encoding::kQ5_0, 2138184783582612182u},
                          {DType::kQ4_1, Encoding::kQ4_1, 12095426134062220553u},
                          {DType::kQ5_1, Encoding::kQ5_1, 9756518772811396474u},
                          {DType::kMXFP4, Encoding::kMXFP4, 1922601874098487164u},
                          {DType::kQ4_K, Encoding::kQ4_K, 1694794253935333518u},
                          {DType::kQ5_K, Encoding::kQ5_K, 3468007007026551748u},
                          {DType::kQ6_K, Encoding::kQ6_K, 15454774647155456908u}};

constexpr size_t kValues = 256 * 13;

// Integer arithmetic and exact products alone: the same numbers everywhere.
struct Numbers {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
  }
  // The sum of twelve uniform numbers less six: close to a Gaussian.
  float gaussian() {
    int64_t sum = 0;
    for (int i = 0; i < 12; ++i) sum += next() & 0xffff;
    return static_cast<float>(sum - 6 * 0xffff) * 0x1p-16f;
  }
};

// What weights look like, and what they do not: outliers, one sign, far from zero, hardly any range, whole
// and partial zeros, the largest and smallest numbers there are.
constexpr int kKinds = 10;
std::vector<float> values_of(int kind, size_t count = kValues) {
  Numbers numbers{static_cast<uint64_t>(kind) + 1};
  std::vector<float> x(count);
  for (size_t i = 0; i < x.size(); ++i) {
    const float g = numbers.gaussian();
    switch (kind) {
      case 0:
        x[i] = 0.02f * g;
        break;
      case 1:
        x[i] = 0.02f * g * (numbers.next() % 50 == 0 ? 12.0f : 1.0f);
        break;
      case 2:
        x[i] = 0.02f * std::fabs(g);
        break;
      case 3:
        x[i] = 1.0f + 0.01f * g;
        break;
      case 4:
        x[i] = i / 64 % 3 == 0 ? 0.0f : i % 7 == 0 ? -0.0f : 0.5f * g;
        break;
      case 5:
        x[i] = 1e37f * g * (i / 256 % 2 == 0 ? 8.0f : 1.0f);
        break;
      case 6:
        x[i] = 1e-38f * g;  // subnormal for the most part
        break;
      case 7:
        x[i] = 1e-6f * g;  // scales that f16 rounds to its last bits
        break;
      case 8:
        x[i] = i / 32 % 2 == 0 ? -3.0f : 0.25f * static_cast<float>(numbers.next() % 16);  // exact in a block
        break;
      default:
        x[i] = g * std::ldexp(1.0f, static_cast<int>(i / 32 % 40) - 20);  // sub-blocks far apart
    }
  }
  return x;
}

// As many of the values as do not fill a group of blocks, of any width.
int64_t count_of(const Entry& entry) {
  const int elements = info(entry.type).block_elements;
  return static_cast<int64_t>(kValues) - (elements == 256 ? 0 : elements == 32 ? 96 : 99);
}

std::vector<uint8_t> encoded(const EncodeTable& table, const Entry& entry, const std::vector<float>& x,
                             EncodeSums* sums = nullptr) {
  std::vector<uint8_t> out(bytes_of(entry.type, count_of(entry)));
  const EncodeSums all = table.encode[static_cast<int>(entry.encoding)](
      x.data(), count_of(entry) / info(entry.type).block_elements, out.data());
  if (sums != nullptr) *sums = all;
  return out;
}

double relative_rms(const std::vector<float>& x, DType type, int64_t count, const std::byte* bytes) {
  std::vector<float> back(static_cast<size_t>(count));
  dequantize(type, bytes, back.data(), count);
  double error = 0.0, total = 0.0;
  for (size_t i = 0; i < back.size(); ++i) {
    error += (static_cast<double>(x[i]) - back[i]) * (static_cast<double>(x[i]) - back[i]);
    total += static_cast<double>(x[i]) * x[i];
  }
  return std::sqrt(error / total);
}

TEST(EncodeTables, WriteTheSameBytes) {
  for (const Entry& entry : kEntries) {
    for (int kind = 0; kind < kKinds; ++kind) {
      const std::vector<float> x = values_of(kind);
      const std::vector<uint8_t> expected = encoded(kScalarEncoders, entry, x);
      for (const EncodeTable* table : runnable_encoders()) {
        EXPECT_TRUE(encoded(*table, entry, x) == expected)
            << table->name << " " << info(entry.type).name << ", values of kind " << kind;
      }
    }
  }
}

// The hashes were taken on ARM; a processor that writes other bytes has another one.
TEST(EncodeTables, WriteTheSameBytesOnEveryProcessor) {
  for (const Entry& entry : kEntries) {
    uint64_t hash = 14695981039346656037u;
    for (int kind = 0; kind < kKinds; ++kind) {
      for (const uint8_t byte : encoded(*runnable_encoders().back(), entry, values_of(kind))) {
        hash = (hash ^ byte) * 1099511628211u;
      }
    }
    EXPECT_EQ(hash, entry.hash) << info(entry.type).name;
  }
}

// The searches with weights and q4_z's are plain C++, in float and double: held in the same way.
TEST(EncodeTables, SearchesWithWeightsWriteTheSameBytesOnEveryProcessor) {
  const std::vector<float> x = values_of(1);
  std::vector<float> weights(256);
  Numbers numbers{99};
  for (float& w : weights) w = std::fabs(numbers.gaussian());
  // The types of version 0.2, and those that came later.
  const std::vector<DType> later = {DType::kQ2_K, DType::kQ3_K, DType::kIQ4_NL, DType::kIQ4_XS,
                                    DType::kNVFP4};
  uint64_t hashes[2] = {14695981039346656037u, 14695981039346656037u};
  for (const DType type : encodable_types()) {
    uint64_t& hash = hashes[std::find(later.begin(), later.end(), type) == later.end() ? 0 : 1];
    std::vector<std::byte> out(bytes_of(type, kValues));
    encode_rows(type, x.data(), kValues / 256, 256, weights.data(), out.data());
    for (const std::byte byte : out) hash = (hash ^ static_cast<uint8_t>(byte)) * 1099511628211u;
  }
  EXPECT_EQ(hashes[0], uint64_t{12508659018473367060u});
  EXPECT_EQ(hashes[1], uint64_t{2938446647154776555u});
}

TEST(EncodeTables, CountWhatTheyMiss) {
  for (const Entry& entry : kEntries) {
    for (const int kind : {0, 1, 2, 4}) {
      const std::vector<float> x = values_of(kind);
      for (const EncodeTable* table : runnable_encoders()) {
        EncodeSums sums;
        const std::vector<uint8_t> out = encoded(*table, entry, x, &sums);
        const double expected =
            relative_rms(x, entry.type, count_of(entry), reinterpret_cast<const std::byte*>(out.data()));
        EXPECT_NEAR(std::sqrt(sums.error / sums.total), expected, 1e-3 * expected)
            << table->name << " " << info(entry.type).name << ", values of kind " << kind;
      }
    }
  }
}

TEST(EncodeTables, ErrNoMoreThanTheSearchInFloat) {
  constexpr int64_t kMany = 256 * 64;
  const std::vector<float> ones(256, 1.0f);
  for (const DType type : encodable_types()) {
    if (type == DType::kF32) continue;
    for (const int kind : {0, 1}) {
      const std::vector<float> x = values_of(kind, kMany);
      std::vector<std::byte> searched(bytes_of(type, kMany)), ours(searched.size());
      encode_rows(type, x.data(), kMany / 256, 256, ones.data(), searched.data());
      encode_rows(type, x.data(), kMany / 256, 256, nullptr, ours.data());
      const double in_float = relative_rms(x, type, kMany, searched.data());
      const double error = relative_rms(x, type, kMany, ours.data());
      std::printf("[  figure  ] %-6s kind %d: relative rms %.6f, %.4f of the float search's\n",
                  std::string(info(type).name).c_str(), kind, error, error / in_float);
      EXPECT_LE(error, 1.003 * in_float) << info(type).name << ", values of kind " << kind;  // of a sample
    }
  }
}

TEST(EncodeTables, WidenSixteenBitsExactly) {
  std::vector<uint16_t> bits(0x10000 + 3);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  const auto* bytes = reinterpret_cast<const uint8_t*>(bits.data());
  std::vector<float> expected(bits.size()), out(bits.size());
  for (const EncodeTable* table : runnable_encoders()) {
    for (const DType type : {DType::kF16, DType::kBF16}) {
      const auto widen_bits = type == DType::kF16 ? table->widen_f16 : table->widen_bf16;
      const int infinite = type == DType::kF16 ? 0x7c00 : 0x7f80;
      dequantize(type, reinterpret_cast<const std::byte*>(bytes), expected.data(), infinite);
      EXPECT_TRUE(widen_bits(bytes, infinite, out.data())) << table->name;
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), sizeof(float) * static_cast<size_t>(infinite)), 0)
          << table->name << " " << info(type).name;
      // Each of the first that is not finite, at the end of a count that is no multiple of anything.
      EXPECT_FALSE(widen_bits(bytes, infinite + 1, out.data())) << table->name;
      EXPECT_FALSE(widen_bits(bytes + 2 * infinite + 4, 1, out.data())) << table->name;
      EXPECT_FALSE(widen_bits(bytes, static_cast<int64_t>(bits.size()), out.data())) << table->name;
    }
  }
}

}  // namespace
}  // namespace millrace::quant
