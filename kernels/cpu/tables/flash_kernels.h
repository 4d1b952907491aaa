// What a kernel table has for attention over tensors. One source of tables/ for each instruction set reads
// this.
#pragma once

#include "kernels/cpu/attention/flash_backward.h"
#include "kernels/cpu/attention/flash_forward.h"
#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {

void put_flash_attention(KernelTable& table) {
  table.flash_forward = flash_forward<FlashFloat>;
  table.flash_delta = flash_delta;
  table.flash_backward_queries = flash_backward_queries<FlashFloat>;
  table.flash_backward_keys = flash_backward_keys<FlashFloat>;
  table.flash_merge_rows = flash_merge_rows;
  table.flash_finish_rows = flash_finish_rows;
}

}  // namespace millrace::cpu::MILLRACE_TARGET
