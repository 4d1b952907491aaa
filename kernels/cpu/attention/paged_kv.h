// One layer's keys and values in a paged cache, blocks of 16 tokens. In a block each KV head has a run of
// keys and a run of values, in the order of the CPU kernels (kernel_table.h): keys transposed
// [head_dim][16], values [16][head_dim]; fp8 has scales [16] first; int8: attention/paged_int8.h.
#pragma once

#include <cstdint>

#include "base/paging.h"
#include "kernels/cpu/tables/kernel_table.h"
#include "tensor/dtype.h"

namespace millrace::cpu {

struct PagedKv {
  DType type = DType::kBF16;  // kF32, kF16, kBF16, kQ8_0 (int8) or kF8E4M3 (fp8)
  uint8_t* pool = nullptr;    // [num_blocks], block_bytes apart
  int32_t num_blocks = 0;
  int64_t block_bytes = 0;
  int64_t key_offset = 0, value_offset = 0;  // of head 0, bytes into a block
  int64_t head_bytes = 0;                    // of one head's keys, or values, in a block
  const int32_t* const* tables = nullptr;    // [sequences]: logical block -> block
  // Each KV head has a table of its own: `tables` is [sequences][kv heads] (sparse attention).
  bool head_tables = false;
  // All query heads read the first head, in groups that a plan takes for heads (latent attention).
  bool one_head = false;
  // Blocks that a table lacks are other ranks': what would be stored there is left out.
  bool absent_elsewhere = false;
  int64_t head_offset(int64_t head) const { return one_head ? 0 : head * head_bytes; }
};

inline KvType kv_kernel_type(DType type) {
  switch (type) {
    case DType::kF32:
      return KvType::kF32;
    case DType::kF16:
      return KvType::kF16;
    case DType::kQ8_0:
      return KvType::kInt8;
    case DType::kF8E4M3:
      return KvType::kFp8;
    default:
      return KvType::kBF16;
  }
}

// Where head `head`'s keys and values of one token go: to the caches' types and order. key, value:
// [head_dim]; without a value there are keys alone. By the calling thread.
void store_kv(const PagedKv& kv, int32_t sequence, int32_t position, int64_t head, int64_t head_dim,
              const float* key, const float* value);

// Dimension d of the 16 keys of a head at `keys`, as store_kv left them.
void load_key_dimension(DType type, const uint8_t* keys, int64_t head_dim, int64_t d, float* to);

}  // namespace millrace::cpu
