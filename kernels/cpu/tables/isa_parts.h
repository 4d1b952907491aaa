// What the sources of this folder put into kernel tables: NAME_SET.cpp has kernels NAME of an instruction
// set, compiled with that set's flags, so these run where the processor has it and nowhere else.
// isa_tables.cpp puts tables together.
#pragma once

#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

namespace scalar {
void put_rows(KernelTable& table);
void put_paged_attention(KernelTable& table);
void put_flash_attention(KernelTable& table);
void put_dense_products(KernelTable& table);
void put_int8_products(KernelTable& table);
}  // namespace scalar

// ARM builds
namespace neon {
void put_rows(KernelTable& table);
void put_paged_attention(KernelTable& table);
void put_flash_attention(KernelTable& table);
void put_dense_products(KernelTable& table);
void put_int8_products(KernelTable& table);
}  // namespace neon
namespace neon_dotprod {
void put_paged_attention(KernelTable& table);
void put_int8_products(KernelTable& table);
}  // namespace neon_dotprod
namespace neon_i8mm {
void put_int8_products(KernelTable& table);
}  // namespace neon_i8mm

// x86 builds
namespace avx2 {
void put_rows(KernelTable& table);
void put_paged_attention(KernelTable& table);
void put_flash_attention(KernelTable& table);
void put_dense_products(KernelTable& table);
void put_int8_products(KernelTable& table);
void put_interleaved_products(KernelTable& table);
}  // namespace avx2
namespace avx_vnni {
void put_int8_products(KernelTable& table);
void put_interleaved_products(KernelTable& table);
}  // namespace avx_vnni
namespace avx512_bw {
void put_rows(KernelTable& table);
void put_paged_attention(KernelTable& table);
void put_flash_attention(KernelTable& table);
void put_dense_products(KernelTable& table);
void put_int8_products(KernelTable& table);
void put_interleaved_products(KernelTable& table);
}  // namespace avx512_bw
namespace avx512_vnni {
void put_int8_products(KernelTable& table);
void put_interleaved_products(KernelTable& table);
}  // namespace avx512_vnni
namespace avx512 {
void put_rows(KernelTable& table);
void put_int8_products(KernelTable& table);
void put_interleaved_products(KernelTable& table);
void put_tile_attention(KernelTable& table);
void put_tile_dense(KernelTable& table);
void put_tile_products(KernelTable& table);
}  // namespace avx512

}  // namespace millrace::cpu
