// In a build for tests, instead of the kernels that the processor which builds it cannot run (CMakeLists.txt
// defines MILLRACE_WITHOUT_*). Nothing asks for them there; a processor that has the instructions, to which
// such a build was carried, is told why it has no kernels.
#include "base/error.h"
#include "kernels/cpu/tables/isa_parts.h"

#define MILLRACE_LEFT_OUT(set, part)                                                                    \
  void set::part(KernelTable&) {                                                                        \
    throw_error(ErrorCode::kBadInput,                                                                   \
                "kernels for {}: not in this build for tests, it was made on a processor without them", \
                #set);                                                                                  \
  }

namespace millrace::cpu {

#if defined(MILLRACE_WITHOUT_AVX_VNNI)
MILLRACE_LEFT_OUT(avx_vnni, put_int8_products)
MILLRACE_LEFT_OUT(avx_vnni, put_interleaved_products)
#endif
#if defined(MILLRACE_WITHOUT_AVX512_BW)
MILLRACE_LEFT_OUT(avx512_bw, put_rows)
MILLRACE_LEFT_OUT(avx512_bw, put_paged_attention)
MILLRACE_LEFT_OUT(avx512_bw, put_flash_attention)
MILLRACE_LEFT_OUT(avx512_bw, put_dense_products)
MILLRACE_LEFT_OUT(avx512_bw, put_int8_products)
MILLRACE_LEFT_OUT(avx512_bw, put_interleaved_products)
#endif
#if defined(MILLRACE_WITHOUT_AVX512_VNNI)
MILLRACE_LEFT_OUT(avx512_vnni, put_int8_products)
MILLRACE_LEFT_OUT(avx512_vnni, put_interleaved_products)
#endif
#if defined(MILLRACE_WITHOUT_AVX512)
MILLRACE_LEFT_OUT(avx512, put_rows)
MILLRACE_LEFT_OUT(avx512, put_int8_products)
MILLRACE_LEFT_OUT(avx512, put_interleaved_products)
#endif
#if defined(MILLRACE_WITHOUT_AMX)
MILLRACE_LEFT_OUT(avx512, put_tile_attention)
MILLRACE_LEFT_OUT(avx512, put_tile_dense)
MILLRACE_LEFT_OUT(avx512, put_tile_products)
#endif

}  // namespace millrace::cpu
