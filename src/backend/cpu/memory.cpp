#include "backend/cpu/memory.h"

#include <sys/mman.h>

#include "base/error.h"

namespace millrace::cpu {

Pages::Pages(size_t bytes, const char* what) : bytes_(bytes) {
  if (bytes == 0) return;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw_error(ErrorCode::kNoMemory, "{}: cannot reserve {} bytes", what, bytes);
  data_ = static_cast<uint8_t*>(at);
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace millrace::cpu
