// The list of encoders, in the order of Encoding: the one place that names every instantiation.
#pragma once

#include "kernels/cpu/quant/encode_blocks32.h"
#include "kernels/cpu/quant/encode_float16.h"
#include "kernels/cpu/quant/encode_group.h"
#include "kernels/cpu/quant/encode_k.h"
#include "kernels/cpu/quant/encode_mxfp4.h"
#include "kernels/cpu/quant/encode_table.h"
#include "kernels/cpu/simd/target.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

constexpr EncodeTable make_table(const char* name) {
  return {name,
          {encode_f16, encode_bf16, encode_groups<BlockQ8_0, encode_q8_0>,
           encode_groups<BlockQ4_0, encode_around_zero<BlockQ4_0, 4>>,
           encode_groups<BlockQ5_0, encode_around_zero<BlockQ5_0, 5>>,
           encode_groups<BlockQ4_1, encode_above_min<BlockQ4_1, 15>>,
           encode_groups<BlockQ5_1, encode_above_min<BlockQ5_1, 31>>, encode_groups<BlockMXFP4, encode_mxfp4>,
           encode_super_blocks<BlockQ4_K, encode_with_mins<BlockQ4_K, 15>>,
           encode_super_blocks<BlockQ5_K, encode_with_mins<BlockQ5_K, 31>>,
           encode_super_blocks<BlockQ6_K, encode_q6_k>},
          widen_f16,
          widen_bf16};
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
