// The list of kernels, in the order of Format: the one place that names every instantiation. Included last
// inside the anonymous namespace of every table.
#pragma once

constexpr KernelTable make_table(const char* name) {
  return {name,
          {float_matmul<LoadF32>, float_matmul<LoadF16>, float_matmul<LoadBF16>, quantized_matmul<FormatQ8_0>,
           quantized_matmul<FormatQ4_0>, quantized_matmul<FormatQ4_1>, quantized_matmul<FormatQ5_0>,
           quantized_matmul<FormatQ5_1>, quantized_matmul<FormatQ4_K>, quantized_matmul<FormatQ5_K>,
           quantized_matmul<FormatQ6_K>, quantized_matmul<FormatMXFP4>, quantized_matmul<FormatMXFP4Split>,
           quantized_matmul<FormatQ4_Z>},
          {attend<KvFloat<LoadF32>>, attend<KvFloat<LoadF16>>, attend<KvFloat<LoadBF16>>, attend<KvInt8>,
           attend<KvFp8>},
          quantize,
          rms_norm,
          silu_mul,
          clamped_swiglu,
          scale_add,
          exp_all};
}
