// Attention by AMX tiles of bf16. Compilers use tiles only where told, so the flags are those of AVX-512 and
// tiles (simd/target.h).
#define MILLRACE_TARGET_AVX512
#include "kernels/cpu/attention/flash_amx.h"
#include "kernels/cpu/attention/flash_backward.h"
#include "kernels/cpu/attention/flash_forward.h"
#include "kernels/cpu/attention/paged_amx.h"
#include "kernels/cpu/tables/isa_parts.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu::avx512 {
namespace {

// By vectors, what does not fit tiles.
void attend_by_vectors(const AttentionSplit& split) {
  avx512_table().attention[static_cast<int>(KvType::kBF16)](split);
}
template <FlashFn KernelTable::*kMember>
void flash_by_vectors(const FlashTask& task) {
  (avx512_table().*kMember)(task);
}

}  // namespace

void put_tile_attention(KernelTable& table) {
  table.attention[static_cast<int>(KvType::kBF16)] = attend_amx<attend_by_vectors>;
  table.flash_forward =
      flash_by_tiles<flash_forward<FlashAmx>, flash_by_vectors<&KernelTable::flash_forward>>;
  table.flash_backward_queries = flash_by_tiles<flash_backward_queries<FlashAmx>,
                                                flash_by_vectors<&KernelTable::flash_backward_queries>>;
  table.flash_backward_keys =
      flash_by_tiles<flash_backward_keys<FlashAmx>, flash_by_vectors<&KernelTable::flash_backward_keys>>;
}

}  // namespace millrace::cpu::avx512
