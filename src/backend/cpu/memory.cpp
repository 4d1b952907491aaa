#include "backend/cpu/memory.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "base/error.h"

namespace millrace::cpu {

Pages::Pages(size_t bytes, const char* what) : bytes_(bytes) {
  if (bytes == 0) return;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw_error(ErrorCode::kNoMemory, "{}: cannot reserve {} bytes", what, bytes);
  data_ = static_cast<uint8_t*>(at);
  // Pools are walked from end to end: pages of 2 MiB spare most walks of the page table. A kernel that has
  // none refuses, and nothing is lost.
  constexpr size_t kHugePage = size_t{2} << 20;
  if (bytes >= kHugePage) (void)madvise(at, bytes, MADV_HUGEPAGE);
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

ReadAhead::ReadAhead() : room_(0) {
  struct sysinfo memory {};
  if (sysinfo(&memory) == 0) room_ = static_cast<size_t>(memory.totalram) * memory.mem_unit / 10 * 8;
}

void ReadAhead::ask(const void* data, size_t bytes) {
  if (data == nullptr || bytes == 0 || bytes > room_) return;
  room_ -= bytes;
  // Whole pages around the tensor. A wish: memory that is no file says EINVAL or does nothing.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(data) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(data) + bytes;
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_WILLNEED);
}

}  // namespace millrace::cpu
