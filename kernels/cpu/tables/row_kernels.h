// What a kernel table has for rows of floats: norms, activations, conversions, the fused operations, and
// layers with a state. One source of tables/ for each instruction set reads this.
#pragma once

#include "kernels/cpu/elementwise/elementwise.h"
#include "kernels/cpu/fused/fused_table.h"
#include "kernels/cpu/matmul/quantize_int8.h"
#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/state/gates.h"
#include "kernels/cpu/state/state_chunk.h"
#include "kernels/cpu/state/wkv7_chunk.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {

void put_rows(KernelTable& table) {
  table.quantize_int8 = quantize_int8;
  table.rms_norm = rms_norm;
  table.silu_mul = silu_mul;
  table.clamped_swiglu = clamped_swiglu;
  table.scale_add = scale_add;
  table.exp = exp_all;
  table.layer_norm = layer_norm;
  table.gelu = gelu_all;
  table.gelu_tanh = gelu_tanh_all;
  table.multiply = multiply;
  table.softcap = softcap_all;
  table.fused = make_fused_kernels();
  table.state_chunk = state_chunk;
  table.short_conv = short_conv;
  table.softplus = softplus;
  table.wkv7_chunk = wkv7_chunk;
}

}  // namespace millrace::cpu::MILLRACE_TARGET
