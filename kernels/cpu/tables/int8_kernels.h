// What a kernel table has for products of int8: block-quantized weights, an int8 cache, matrices of int8.
// This is what instruction sets of a family differ in. A set has here what its own instructions change; the
// rest of its table is that of the set before it (isa_tables.cpp). One source of tables/ for each instruction
// set reads this.
#pragma once

#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/kernel_table.h"
#if !defined(MILLRACE_HAS_AVX512_VBMI) && !defined(MILLRACE_HAS_I8MM)
#define MILLRACE_HAS_INT8_OF_ITS_OWN
#include "kernels/cpu/attention/paged.h"
#if defined(MILLRACE_HAS_AVX512_VNNI) || defined(MILLRACE_HAS_DOTPROD)
#include "kernels/cpu/matmul/dense_dots.h"
#endif
#endif
#if defined(MILLRACE_SIMD_X86)
#include "kernels/cpu/matmul/gemm_x86.h"
#endif
#if defined(MILLRACE_HAS_DOTPROD)
#include "kernels/cpu/matmul/gemm_int8_neon.h"
#include "kernels/cpu/matmul/gemv_interleaved_neon.h"
#elif !defined(MILLRACE_SIMD_AVX512)
#include "kernels/cpu/matmul/gemm_int8.h"
#endif
#if !defined(MILLRACE_SIMD_AVX512)
#include "kernels/cpu/matmul/sum_of_products.h"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

#if defined(MILLRACE_SIMD_X86)
namespace product = lane;  // a lane per row of weights
#else
namespace product = MILLRACE_TARGET;
#endif

template <class F>
void put_product(KernelTable& table, Format format) {
  table.matmul[static_cast<int>(format)] = product::quantized_matmul<F>;
}

// Formats whose codes VBMI unpacks in fewer steps.
inline void put_looked_up(KernelTable& table) {
  put_product<product::FormatQ5_0>(table, Format::kQ5_0);
  put_product<product::FormatQ5_1>(table, Format::kQ5_1);
  put_product<product::FormatMXFP4>(table, Format::kMXFP4);
  put_product<product::FormatMXFP4Split>(table, Format::kMXFP4Split);
}

#if !defined(MILLRACE_HAS_AVX512_VBMI)
inline void put_shifted(KernelTable& table) {
  put_product<product::FormatQ8_0>(table, Format::kQ8_0);
  put_product<product::FormatQ4_0>(table, Format::kQ4_0);
  put_product<product::FormatQ4_1>(table, Format::kQ4_1);
  put_product<product::FormatQ4_K>(table, Format::kQ4_K);
  put_product<product::FormatQ5_K>(table, Format::kQ5_K);
  put_product<product::FormatQ6_K>(table, Format::kQ6_K);
  put_product<product::FormatQ4_Z>(table, Format::kQ4_Z);
}
#endif

#if !defined(MILLRACE_SIMD_AVX512)
// Formats without a sixteen-row form: AVX-512 takes AVX2's kernels.
inline void put_without_lanes(KernelTable& table) {
  table.matmul[static_cast<int>(Format::kIQ4_NL)] = quantized_matmul<FormatIQ4_NL>;
  table.matmul[static_cast<int>(Format::kIQ4_XS)] = quantized_matmul<FormatIQ4_XS>;
  table.matmul[static_cast<int>(Format::kQ3_K)] = quantized_matmul<FormatQ3_K>;
  table.matmul[static_cast<int>(Format::kQ2_K)] =
      sum_of_products<quantized_matmul<FormatQ2_K>, quantized_matmul<FormatQ2_KMins>>;
}
#endif

}  // namespace

void put_int8_products(KernelTable& table) {
  put_looked_up(table);
#if !defined(MILLRACE_HAS_AVX512_VBMI)
  put_shifted(table);
#endif
#if !defined(MILLRACE_SIMD_AVX512)
  put_without_lanes(table);
#endif
#if defined(MILLRACE_HAS_DOTPROD)
  put_interleaved(table);
#endif
#if defined(MILLRACE_HAS_INT8_OF_ITS_OWN)
  table.attention[static_cast<int>(KvType::kInt8)] = attend<KvInt8>;
#if defined(MILLRACE_HAS_AVX512_VNNI) || defined(MILLRACE_HAS_DOTPROD)
  table.dense_dots = dense_dots;
#endif
#endif
}

}  // namespace millrace::cpu::MILLRACE_TARGET
