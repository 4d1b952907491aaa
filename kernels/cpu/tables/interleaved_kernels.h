// What a kernel table of x86 has for weights whose rows lie interleaved, a lane each. One source of tables/
// for each instruction set reads this.
#pragma once

#include "kernels/cpu/matmul/gemm_x86.h"
#include "kernels/cpu/matmul/gemv_interleaved_x86.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <class F>
void put_interleaved(KernelTable& table, Format format) {
  table.matmul[static_cast<int>(format)] = lane::interleaved_matmul<F>;
}

}  // namespace

void put_interleaved_products(KernelTable& table) {
  // VBMI unpacks these in fewer steps, and no others.
  put_interleaved<lane::FormatQ5_0>(table, Format::kInterleavedQ5_0);
  put_interleaved<lane::FormatQ5_1>(table, Format::kInterleavedQ5_1);
  put_interleaved<lane::FormatMXFP4>(table, Format::kInterleavedMXFP4);
#if !defined(MILLRACE_HAS_AVX512_VBMI)
  put_interleaved<lane::FormatQ8_0>(table, Format::kInterleavedQ8_0);
  put_interleaved<lane::FormatQ4_0>(table, Format::kInterleavedQ4_0);
  put_interleaved<lane::FormatQ4_1>(table, Format::kInterleavedQ4_1);
  put_interleaved<lane::FormatQ4_K>(table, Format::kInterleavedQ4_K);
  put_interleaved<lane::FormatQ5_K>(table, Format::kInterleavedQ5_K);
  put_interleaved<lane::FormatQ6_K>(table, Format::kInterleavedQ6_K);
  put_interleaved<lane::FormatQ4_Z>(table, Format::kInterleavedQ4_Z);
#endif
  table.interleaved_rows = lane::kRows;
}

}  // namespace millrace::cpu::MILLRACE_TARGET
