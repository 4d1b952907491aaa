// What a kernel table has for products in floats: weights of floats, plain matrices, four-bit weights that
// are widened. One source of tables/ for each instruction set reads this.
#pragma once

#include "kernels/cpu/matmul/dense_few.h"
#include "kernels/cpu/matmul/dense_pack.h"
#include "kernels/cpu/matmul/dense_panel.h"
#include "kernels/cpu/matmul/gemm_float.h"
#include "kernels/cpu/matmul/lowbit_panel.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {

void put_dense_products(KernelTable& table) {
  table.matmul[static_cast<int>(Format::kF32)] = float_matmul<LoadF32>;
  table.matmul[static_cast<int>(Format::kF16)] = float_matmul<LoadF16>;
  table.matmul[static_cast<int>(Format::kBF16)] = float_matmul<LoadBF16>;
  table.dense_panel = dense_panel;
  table.dense_few = dense_few;
  table.dense_widen = dense_widen;
  table.dense_transpose = dense_transpose;
  table.dense_narrow = dense_narrow;
  table.dense_multiply_add = dense_multiply_add;
  table.lowbit_rows = lowbit_rows;
  table.lowbit_widen = lowbit_widen;
  table.fp4_widen = fp4_widen;
}

}  // namespace millrace::cpu::MILLRACE_TARGET
