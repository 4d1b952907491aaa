// What a kernel table has for attention over a paged cache of floats, and for finding what to attend to. One
// source of tables/ for each instruction set reads this.
#pragma once

#include "kernels/cpu/attention/index_scores.h"
#include "kernels/cpu/attention/page_scores.h"
#include "kernels/cpu/attention/paged.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {

void put_paged_attention(KernelTable& table) {
  table.attention[static_cast<int>(KvType::kF32)] = attend<KvFloat<LoadF32>>;
  table.attention[static_cast<int>(KvType::kF16)] = attend<KvFloat<LoadF16>>;
  table.attention[static_cast<int>(KvType::kBF16)] = attend<KvFloat<LoadBF16>>;
  table.attention[static_cast<int>(KvType::kFp8)] = attend<KvFp8>;
  table.page_scores = page_scores;
  table.index_scores = index_scores;
}

}  // namespace millrace::cpu::MILLRACE_TARGET
