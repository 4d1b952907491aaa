// The list of kernels, in the order of Format: the one place that names every instantiation that all tables
// have. What a table has besides is said in its own file.
#pragma once

#include "kernels/cpu/attention/flash_backward.h"
#include "kernels/cpu/attention/flash_forward.h"
#include "kernels/cpu/attention/index_scores.h"
#include "kernels/cpu/attention/page_scores.h"
#include "kernels/cpu/attention/paged.h"
#include "kernels/cpu/elementwise/elementwise.h"
#include "kernels/cpu/fused/fused_table.h"
#include "kernels/cpu/matmul/dense_panel.h"
#include "kernels/cpu/matmul/float.h"
#include "kernels/cpu/matmul/quantize_int8.h"
#include "kernels/cpu/matmul/sum_of_products.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/state/state_chunk.h"
#include "kernels/cpu/state/wkv7_chunk.h"
#include "kernels/cpu/tables/kernel_table.h"
#if defined(MILLRACE_SIMD_AVX512)
#include "kernels/cpu/matmul/gemm_x86.h"
#include "kernels/cpu/tables/isa_tables.h"
#elif defined(MILLRACE_SIMD_AVX2)
#include "kernels/cpu/matmul/gemm_x86.h"
#include "kernels/cpu/matmul/quantized.h"
#elif defined(MILLRACE_HAS_DOTPROD)
#include "kernels/cpu/matmul/quantized_neon.h"
#else
#include "kernels/cpu/matmul/quantized.h"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

#if defined(MILLRACE_SIMD_AVX512)
// By the kernels of AVX2, which such a processor has: these types have no sixteen-row form.
template <Format kFormat>
void matmul_by_avx2(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                    float* out, int64_t out_stride) {
  kAvx2Table.matmul[static_cast<int>(kFormat)](w, first, num_rows, x, num_m, out, out_stride);
}
constexpr MatmulFn kMatmulIQ4_NL = matmul_by_avx2<Format::kIQ4_NL>;
constexpr MatmulFn kMatmulIQ4_XS = matmul_by_avx2<Format::kIQ4_XS>;
constexpr MatmulFn kMatmulQ3_K = matmul_by_avx2<Format::kQ3_K>;
constexpr MatmulFn kMatmulQ2_K = matmul_by_avx2<Format::kQ2_K>;
#else
constexpr MatmulFn kMatmulIQ4_NL = quantized_matmul<FormatIQ4_NL>;
constexpr MatmulFn kMatmulIQ4_XS = quantized_matmul<FormatIQ4_XS>;
constexpr MatmulFn kMatmulQ3_K = quantized_matmul<FormatQ3_K>;
constexpr MatmulFn kMatmulQ2_K =
    sum_of_products<quantized_matmul<FormatQ2_K>, quantized_matmul<FormatQ2_KMins>>;
#endif

#if defined(MILLRACE_SIMD_X86)
namespace product = lane;  // a lane per row of weights
#else
namespace product = MILLRACE_TARGET;
#endif

constexpr KernelTable make_table(const char* name) {
  return {
      name,
      {float_matmul<LoadF32>, float_matmul<LoadF16>, float_matmul<LoadBF16>,
       product::quantized_matmul<product::FormatQ8_0>, product::quantized_matmul<product::FormatQ4_0>,
       product::quantized_matmul<product::FormatQ4_1>, product::quantized_matmul<product::FormatQ5_0>,
       product::quantized_matmul<product::FormatQ5_1>, product::quantized_matmul<product::FormatQ4_K>,
       product::quantized_matmul<product::FormatQ5_K>, product::quantized_matmul<product::FormatQ6_K>,
       product::quantized_matmul<product::FormatMXFP4>, product::quantized_matmul<product::FormatMXFP4Split>,
       product::quantized_matmul<product::FormatQ4_Z>, kMatmulIQ4_NL, kMatmulIQ4_XS, kMatmulQ3_K,
       kMatmulQ2_K},
      {attend<KvFloat<LoadF32>>, attend<KvFloat<LoadF16>>, attend<KvFloat<LoadBF16>>, attend<KvInt8>,
       attend<KvFp8>},
      page_scores,
      index_scores,
      quantize_int8,
      rms_norm,
      silu_mul,
      clamped_swiglu,
      scale_add,
      exp_all,
      layer_norm,
      gelu_all,
      gelu_tanh_all,
      multiply,
      softcap_all,
      make_fused_kernels(),
      flash_forward<FlashFloat>,
      flash_delta,
      flash_backward_queries<FlashFloat>,
      flash_backward_keys<FlashFloat>,
      flash_merge_rows,
      flash_finish_rows,
      dense_panel,
      dense_widen,
      state_chunk,
      short_conv,
      wkv7_chunk};
}

#if defined(MILLRACE_SIMD_X86)
constexpr KernelTable make_x86_table(const char* name) {
  KernelTable table = make_table(name);
  table.rows_per_pass = 1 << 20;  // all there are
  return table;
}
#endif
#if defined(MILLRACE_SIMD_AVX512)
constexpr KernelTable make_avx512_table(const char* name) {
  KernelTable table = make_x86_table(name);
  table.set_heads_per_split(KvType::kInt8, 4);  // runs of 4,352 bytes of heads of 64 dimensions
  return table;
}
#endif

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
