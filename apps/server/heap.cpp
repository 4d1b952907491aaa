#include "heap.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace millrace::server {

#if defined(__GLIBC__)

// By default glibc raises the size from which memory is mapped, and unmapped when it is freed, to 32 MiB once
// such a block was freed: bodies and prompts would then lie among small blocks and hold their pages. And each
// thread of many gets a heap of its own, of which each grows to the largest request it ever read.
void keep_heap_small() {
  constexpr int kMapFrom = 256 << 10, kHeaps = 4;
  mallopt(M_MMAP_THRESHOLD, kMapFrom);
  mallopt(M_ARENA_MAX, kHeaps);
}

void give_heap_back() { malloc_trim(0); }

#else

void keep_heap_small() {}
void give_heap_back() {}

#endif

}  // namespace millrace::server
