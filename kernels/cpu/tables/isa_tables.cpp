// Each table is another one and what its instruction set changes of it: kernels without such instructions are
// compiled once for a family. This file itself is compiled for every processor.
#include "kernels/cpu/tables/isa_tables.h"

#include "kernels/cpu/tables/isa_parts.h"

namespace millrace::cpu {
namespace {

KernelTable named(const KernelTable& like, const char* name) {
  KernelTable table = like;
  table.name = name;
  return table;
}

}  // namespace

const KernelTable& scalar_table() {
  static const KernelTable table = [] {
    KernelTable t = named({}, "scalar");
    scalar::put_rows(t);
    scalar::put_paged_attention(t);
    scalar::put_flash_attention(t);
    scalar::put_dense_products(t);
    scalar::put_int8_products(t);
    // As the table with the most heads at a time, so that every machine tests it.
    t.set_heads_per_split(KvType::kBF16, 2);
    t.set_heads_per_split(KvType::kInt8, 4);
    return t;
  }();
  return table;
}

#if defined(__aarch64__)

const KernelTable& neon_table() {
  static const KernelTable table = [] {
    KernelTable t = named({}, "neon");
    neon::put_rows(t);
    neon::put_paged_attention(t);
    neon::put_flash_attention(t);
    neon::put_dense_products(t);
    neon::put_int8_products(t);
    return t;
  }();
  return table;
}

const KernelTable& neon_dotprod_table() {
  static const KernelTable table = [] {
    KernelTable t = named(neon_table(), "neon_dotprod");
    neon_dotprod::put_paged_attention(t);
    neon_dotprod::put_int8_products(t);
    return t;
  }();
  return table;
}

const KernelTable& neon_i8mm_table() {
  static const KernelTable table = [] {
    KernelTable t = named(neon_dotprod_table(), "neon_i8mm");
    neon_i8mm::put_int8_products(t);
    return t;
  }();
  return table;
}

#elif defined(__x86_64__)

const KernelTable& avx2_table() {
  static const KernelTable table = [] {
    KernelTable t = named({}, "avx2");
    t.rows_per_pass = 1 << 20;  // all there are
    avx2::put_rows(t);
    avx2::put_paged_attention(t);
    avx2::put_flash_attention(t);
    avx2::put_dense_products(t);
    avx2::put_int8_products(t);
    avx2::put_interleaved_products(t);
    return t;
  }();
  return table;
}

const KernelTable& avx_vnni_table() {
  static const KernelTable table = [] {
    KernelTable t = named(avx2_table(), "avx_vnni");
    avx_vnni::put_int8_products(t);
    avx_vnni::put_interleaved_products(t);
    return t;
  }();
  return table;
}

const KernelTable& avx512_bw_table() {
  static const KernelTable table = [] {
    KernelTable t = named(avx2_table(), "avx512_bw");
    avx512_bw::put_rows(t);
    avx512_bw::put_paged_attention(t);
    avx512_bw::put_flash_attention(t);
    avx512_bw::put_dense_products(t);
    avx512_bw::put_int8_products(t);
    avx512_bw::put_interleaved_products(t);
    t.set_heads_per_split(KvType::kInt8, 4);  // runs of 4,352 bytes of heads of 64 dimensions
    return t;
  }();
  return table;
}

const KernelTable& avx512_vnni_table() {
  static const KernelTable table = [] {
    KernelTable t = named(avx512_bw_table(), "avx512_vnni");
    avx512_vnni::put_int8_products(t);
    avx512_vnni::put_interleaved_products(t);
    return t;
  }();
  return table;
}

const KernelTable& avx512_table() {
  static const KernelTable table = [] {
    KernelTable t = named(avx512_vnni_table(), "avx512");
    avx512::put_rows(t);
    avx512::put_int8_products(t);
    avx512::put_interleaved_products(t);
    return t;
  }();
  return table;
}

const KernelTable& amx_table() {
  static const KernelTable table = [] {
    KernelTable t = named(avx512_table(), "amx");
    avx512::put_tile_attention(t);
    avx512::put_tile_dense(t);
    avx512::put_tile_products(t);
    constexpr KvType kByTwos[] = {KvType::kF32, KvType::kF16, KvType::kBF16, KvType::kFp8};
    for (const KvType type : kByTwos) t.set_heads_per_split(type, 2);
    return t;
  }();
  return table;
}

#endif

}  // namespace millrace::cpu
