// The list of kernels, in the order of Format: the one place that names every instantiation that all tables
// have. What a table has besides is said in its own file.
#pragma once

#include "kernels/cpu/attention/paged.h"
#include "kernels/cpu/elementwise/elementwise.h"
#include "kernels/cpu/matmul/float.h"
#include "kernels/cpu/matmul/quantize_int8.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/tables/kernel_table.h"
#if defined(MILLRACE_SIMD_AVX512)
#include "kernels/cpu/matmul/gemm_avx512.h"
#elif defined(MILLRACE_HAS_DOTPROD)
#include "kernels/cpu/matmul/quantized_neon.h"
#else
#include "kernels/cpu/matmul/quantized.h"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

constexpr KernelTable make_table(const char* name) {
  return {name,
          {float_matmul<LoadF32>, float_matmul<LoadF16>, float_matmul<LoadBF16>, quantized_matmul<FormatQ8_0>,
           quantized_matmul<FormatQ4_0>, quantized_matmul<FormatQ4_1>, quantized_matmul<FormatQ5_0>,
           quantized_matmul<FormatQ5_1>, quantized_matmul<FormatQ4_K>, quantized_matmul<FormatQ5_K>,
           quantized_matmul<FormatQ6_K>, quantized_matmul<FormatMXFP4>, quantized_matmul<FormatMXFP4Split>,
           quantized_matmul<FormatQ4_Z>},
          {attend<KvFloat<LoadF32>>, attend<KvFloat<LoadF16>>, attend<KvFloat<LoadBF16>>, attend<KvInt8>,
           attend<KvFp8>},
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
          softcap_all};
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
