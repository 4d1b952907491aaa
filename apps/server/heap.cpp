#include "heap.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace millrace::server {

// By default glibc raises the size from which memory is mapped, and unmapped when it is freed, to 32 MiB once
// such a block was freed: bodies and prompts would then lie among small blocks and hold their pages. Threads
// keep heaps of their own: a shared one would let the slow lane, which runs at low priority, hold a lock that
// everybody waits for.
void keep_heap_small() {
#if defined(__GLIBC__)
  constexpr int kMapFrom = 256 << 10;
  mallopt(M_MMAP_THRESHOLD, kMapFrom);
#endif
}

}  // namespace millrace::server
