// Each kernel keeps more accumulators than an instruction's latency times its rate, all in registers; an
// empty asm statement hides their values, so that no multiplication is left out.
#include "backend/peak.h"

#include <algorithm>
#include <chrono>
#include <string_view>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

namespace millrace {
namespace {

constexpr int64_t kRounds = 20000;  // of a kernel's inner loop in one call: some hundred microseconds

// A kernel returns the operations it has done.
using Kernel = double (*)();

#if defined(__aarch64__)
constexpr int kAccumulators = 16;

// By their encodings: g++, clang and their assemblers disagree on how a function asks for these extensions.
// v0 to v15 are the accumulators, v16 and v17 the factors; what is in them does not change the speed.
#define MILLRACE_SIXTEEN_TIMES(encoding)                                                                   \
  asm volatile(                                                                                            \
      ".irp d,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\t"                                                   \
      ".inst " encoding                                                                                    \
      " + (17 << 16) + (16 << 5) + \\d\n\t"                                                                \
      ".endr" ::                                                                                           \
          : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", \
            "v15")

double dot_int8() {  // sdot v.4s, v17.16b, v16.16b
  for (int64_t i = 0; i < kRounds; ++i) MILLRACE_SIXTEEN_TIMES("0x4e809400");
  return static_cast<double>(kRounds) * kAccumulators * 32;
}

double matrix_int8() {  // smmla, the same operands
  for (int64_t i = 0; i < kRounds; ++i) MILLRACE_SIXTEEN_TIMES("0x4e80a400");
  return static_cast<double>(kRounds) * kAccumulators * 64;
}
#undef MILLRACE_SIXTEEN_TIMES

double fma_float() {
  float32x4_t sums[kAccumulators] = {};
  float32x4_t a = vdupq_n_f32(1.0f), b = vdupq_n_f32(0.5f);
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile("" : "+w"(a), "+w"(b));
    for (float32x4_t& sum : sums) sum = vfmaq_f32(sum, a, b);
  }
  for (float32x4_t& sum : sums) asm volatile("" : "+w"(sum));
  return static_cast<double>(kRounds) * kAccumulators * 8;
}
#elif defined(__x86_64__)
constexpr int kAccumulators = 10;

// Unsigned times signed bytes to words, words to doublewords, and their sum: three instructions for 64
// operations.
__attribute__((target("avx2"))) double dot_int8() {
  __m256i sums[kAccumulators] = {};
  __m256i a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(2);
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile("" : "+x"(a), "+x"(b));
    for (__m256i& sum : sums) {
      __m256i words = _mm256_maddubs_epi16(a, b);
      asm volatile("" : "+x"(words));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words, ones));
    }
  }
  for (__m256i& sum : sums) asm volatile("" : "+x"(sum));
  return static_cast<double>(kRounds) * kAccumulators * 64;
}

__attribute__((target("avx512f,avx512vnni"))) double dot_int8_avx512_vnni() {
  __m512i sums[kAccumulators];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  __m512i a = _mm512_set1_epi32(0x01010101), b = _mm512_set1_epi32(0x02020202);
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
    for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, b);
  }
  for (__m512i& sum : sums) asm volatile("" : "+v"(sum));
  return static_cast<double>(kRounds) * kAccumulators * 128;
}

// As dot_int8, with vectors of twice the size.
__attribute__((target("avx512f,avx512bw"))) double dot_int8_avx512_bw() {
  __m512i sums[kAccumulators];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  __m512i a = _mm512_set1_epi32(0x01010101), b = _mm512_set1_epi32(0x02020202);
  const __m512i ones = _mm512_set1_epi32(0x00010001);
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
    for (__m512i& sum : sums) {
      __m512i words = _mm512_maddubs_epi16(a, b);
      asm volatile("" : "+v"(words));
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(words, ones));
    }
  }
  for (__m512i& sum : sums) asm volatile("" : "+v"(sum));
  return static_cast<double>(kRounds) * kAccumulators * 128;
}

__attribute__((target("avx2,fma"))) double fma_float() {
  __m256 sums[kAccumulators] = {};
  __m256 a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(0.5f);
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile("" : "+x"(a), "+x"(b));
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(a, b, sum);
  }
  for (__m256& sum : sums) asm volatile("" : "+x"(sum));
  return static_cast<double>(kRounds) * kAccumulators * 16;
}

__attribute__((target("avx512f"))) double fma_float_avx512() {
  __m512 sums[kAccumulators];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(0.5f);
  for (int64_t i = 0; i < kRounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(a, b, sum);
  }
  for (__m512& sum : sums) asm volatile("" : "+v"(sum));
  return static_cast<double>(kRounds) * kAccumulators * 32;
}

// Six tiles of sums, two of factors: a product's latency (52 cycles) is 3.25 times what it occupies the unit
// for. The factors are ordinary numbers, for the unit may be quicker with zeros.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr int kTileRounds = 2000, kSumTiles = 6;

constexpr TileConfig kTileConfig;  // in memory: g++ 12 does not know that loading one reads all of it

#define MILLRACE_TILE_PEAK(product, first, second)               \
  alignas(64) uint8_t factors[16 * 64];                          \
  for (int i = 0; i < 16 * 64; i += 2) {                         \
    factors[i] = first;                                          \
    factors[i + 1] = second;                                     \
  }                                                              \
  asm volatile("" ::"r"(&kTileConfig), "r"(factors) : "memory"); \
  _tile_loadconfig(&kTileConfig);                                \
  _tile_loadd(6, factors, 64);                                   \
  _tile_loadd(7, factors, 64);                                   \
  _tile_zero(0);                                                 \
  _tile_zero(1);                                                 \
  _tile_zero(2);                                                 \
  _tile_zero(3);                                                 \
  _tile_zero(4);                                                 \
  _tile_zero(5);                                                 \
  for (int i = 0; i < kTileRounds; ++i) {                        \
    product(0, 6, 7);                                            \
    product(1, 6, 7);                                            \
    product(2, 6, 7);                                            \
    product(3, 6, 7);                                            \
    product(4, 6, 7);                                            \
    product(5, 6, 7);                                            \
  }                                                              \
  _tile_release()

__attribute__((target("amx-tile,amx-int8"))) double tile_int8() {
  MILLRACE_TILE_PEAK(_tile_dpbssd, 0xfd, 0x05);  // -3, 5
  return static_cast<double>(kTileRounds) * kSumTiles * 2 * 16 * 16 * 64;
}

__attribute__((target("amx-tile,amx-bf16"))) double tile_bf16() {
  MILLRACE_TILE_PEAK(_tile_dpbf16ps, 0xa0, 0x3f);  // 1.25
  return static_cast<double>(kTileRounds) * kSumTiles * 2 * 16 * 16 * 32;
}
#undef MILLRACE_TILE_PEAK
#endif

struct Kernels {
  Kernel int8 = nullptr, fma = nullptr;
  const char* int8_instruction = "";
  Kernel bf16 = nullptr;
};

// By the name of the backend's table, which the machine can run or it would not have been chosen.
Kernels kernels_for([[maybe_unused]] std::string_view isa) {
#if defined(__aarch64__)
  if (isa.find("i8mm") != isa.npos) return {matrix_int8, fma_float, "smmla"};
  if (isa.find("dotprod") != isa.npos) return {dot_int8, fma_float, "sdot"};
  if (isa.find("neon") != isa.npos) return {nullptr, fma_float, ""};
#elif defined(__x86_64__)
  if (isa.find("amx") != isa.npos) return {tile_int8, fma_float_avx512, "tdpbssd", tile_bf16};
  if (isa.find("avx512_bw") != isa.npos)
    return {dot_int8_avx512_bw, fma_float_avx512, "vpmaddubsw + vpmaddwd"};
  if (isa.find("avx512") != isa.npos) return {dot_int8_avx512_vnni, fma_float_avx512, "vpdpbusd"};
  if (isa.find("avx") != isa.npos) return {dot_int8, fma_float, "vpmaddubsw + vpmaddwd"};
#endif
  return {};
}

std::optional<double> best_rate(Backend& backend, Kernel kernel) {
  constexpr int kPasses = 5, kCallsPerThread = 64;
  if (kernel == nullptr) return std::nullopt;
  double best = 0.0;
  const int64_t calls = int64_t{kCallsPerThread} * backend.threads();
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    backend.parallel(calls, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kernel();
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, kernel() * static_cast<double>(calls) / seconds);
  }
  return best;
}

}  // namespace

Peak measure_peak(Backend& backend) {
  const Kernels kernels = kernels_for(backend.isa());
  return {best_rate(backend, kernels.int8), best_rate(backend, kernels.fma), kernels.int8_instruction,
          best_rate(backend, kernels.bf16)};
}

}  // namespace millrace
