#include "kernels/cpu/attention/paged_kv.h"

#include <bit>

#include "base/check.h"
#include "base/float_bits.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

// One token's head into an int8 cache: scales [count / 32][16], then codes, of keys [count / 4][16][4] and of
// values [4][count][4 tokens].
void store_int8(const float* x, int64_t count, uint8_t* to, int32_t token, bool values) {
  constexpr int64_t kTogether = 4;
  auto* scales = reinterpret_cast<uint16_t*>(to);
  auto* out = reinterpret_cast<int8_t*>(scales + count / kKvScaleDims * kBlockTokens);
  out += values ? token / kTogether * count * kTogether + token % kTogether : token * kTogether;
  for (int64_t d = 0; d < count; d += kKvScaleDims) {
    int8_t codes[kKvScaleDims];
    scales[d / kKvScaleDims * kBlockTokens + token] = to_int8_codes(x + d, codes);
    for (int64_t i = 0; i < kKvScaleDims; i += kTogether) {
      for (int64_t j = 0; j < kTogether; ++j) {
        out[values ? (d + i + j) * kTogether : (d + i) * kBlockTokens + j] = codes[i + j];
      }
    }
  }
}

// One token's head of keys (at token, stride 16) or values (at token * count, stride 1) into the cache.
void store_head(DType type, const float* x, int64_t count, uint8_t* to, int32_t token, int64_t at,
                int64_t stride) {
  if (type == DType::kQ8_0) {
    store_int8(x, count, to, token, stride == 1);
    return;
  }
  if (type == DType::kF8E4M3) {  // scales [16] first
    to[token] = to_fp8_codes(x, count, to + kBlockTokens + at, stride);
    return;
  }
  if (type == DType::kF32) {
    auto* out = reinterpret_cast<float*>(to) + at;
    for (int64_t d = 0; d < count; ++d) out[d * stride] = x[d];
  } else if (type == DType::kBF16) {
    auto* out = reinterpret_cast<uint16_t*>(to) + at;
    for (int64_t d = 0; d < count; ++d) out[d * stride] = to_bfloat16(x[d]).bits;
  } else {
    auto* out = reinterpret_cast<uint16_t*>(to) + at;
    for (int64_t d = 0; d < count; ++d) out[d * stride] = to_half(x[d]).bits;
  }
}

}  // namespace

void store_kv(const PagedKv& kv, int32_t sequence, int32_t position, int64_t head, int64_t head_dim,
              const float* key, const float* value) {
  const int32_t token = position % kBlockTokens, block = kv.tables[sequence][position / kBlockTokens];
  if (block == kNoBlock && kv.absent_elsewhere) return;
  MILLRACE_CHECK(block >= 0 && block < kv.num_blocks);
  uint8_t* base = kv.pool + block * kv.block_bytes + head * kv.head_bytes;
  store_head(kv.type, key, head_dim, base + kv.key_offset, token, token, kBlockTokens);
  if (value == nullptr) return;
  store_head(kv.type, value, head_dim, base + kv.value_offset, token, token * head_dim, 1);
}

void load_key_dimension(DType type, const uint8_t* keys, int64_t head_dim, int64_t d, float* to) {
  const int64_t at = d * kBlockTokens;
  switch (type) {
    case DType::kF32:
      for (int t = 0; t < kBlockTokens; ++t) to[t] = reinterpret_cast<const float*>(keys)[at + t];
      return;
    case DType::kF16:
      for (int t = 0; t < kBlockTokens; ++t)
        to[t] = to_float(Half{reinterpret_cast<const uint16_t*>(keys)[at + t]});
      return;
    case DType::kQ8_0: {  // scales [head_dim / 32][16], then codes [head_dim / 4][16][4]
      const auto* scales = reinterpret_cast<const uint16_t*>(keys);
      const auto* codes = reinterpret_cast<const int8_t*>(scales + head_dim / kKvScaleDims * kBlockTokens);
      for (int t = 0; t < kBlockTokens; ++t) {
        to[t] = static_cast<float>(codes[d / 4 * 4 * kBlockTokens + t * 4 + d % 4]) *
                to_float(Half{scales[d / kKvScaleDims * kBlockTokens + t]});
      }
      return;
    }
    case DType::kF8E4M3:  // scales [16], then codes [head_dim][16]
      for (int t = 0; t < kBlockTokens; ++t) {
        to[t] = to_float(Fp8E4M3{keys[kBlockTokens + at + t]}) * std::bit_cast<float>(fp8_scale(keys[t]));
      }
      return;
    default:
      for (int t = 0; t < kBlockTokens; ++t)
        to[t] = to_float(BFloat16{reinterpret_cast<const uint16_t*>(keys)[at + t]});
  }
}

}  // namespace millrace::cpu
