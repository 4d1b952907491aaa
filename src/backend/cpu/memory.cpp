#include "backend/cpu/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "base/buffer_pool.h"
#include "base/error.h"
#include "base/topology.h"

namespace millrace::cpu {

Pages::Pages(size_t bytes, const char* what) : bytes_(bytes) {
  if (bytes == 0) return;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw_error(ErrorCode::kNoMemory, "{}: cannot reserve {} bytes", what, bytes);
  data_ = static_cast<uint8_t*>(at);
  // Pools are read from end to end: pages of 2 MiB spare most walks of the page table. A kernel that has
  // none refuses, and nothing is lost.
  constexpr size_t kHugePage = size_t{2} << 20;
  if (bytes >= kHugePage) (void)madvise(at, bytes, MADV_HUGEPAGE);
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

CopyMemory::Piece CopyMemory::take(size_t bytes) {
  constexpr size_t kLine = 64, kReserved = size_t{64} << 20;  // pages cost nothing until they are touched
  const size_t rounded = (bytes + kLine - 1) / kLine * kLine;
  if (pages_ == nullptr || bytes_ - used_ < rounded) {
    bytes_ = std::max(rounded, std::min(kReserved, most_));
    pages_ = std::make_shared<Pages>(bytes_, "copies of weights");
    used_ = 0;
  }
  uint8_t* const data = pages_->data() + used_;
  used_ += rounded;
  return {pages_, data};
}

bool has_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  return std::getline(file, modes) && modes.find("[never]") == std::string::npos;
}

// At least more than the largest class, so that it begins a page.
StepMemory::StepMemory(size_t bytes, const char* what) : bytes_(std::max(bytes, size_t{32} << 10)) {
  try {
    data_ = static_cast<uint8_t*>(buffer_pool().allocate_zeroed(bytes_));
  } catch (const std::bad_alloc&) {
    throw_error(ErrorCode::kNoMemory, "{}: cannot reserve {} bytes", what, bytes);
  }
}

StepMemory::~StepMemory() { buffer_pool().release(data_, bytes_); }

size_t usable_memory() {
  struct sysinfo memory {};
  const size_t machine = sysinfo(&memory) == 0 ? static_cast<size_t>(memory.totalram) * memory.mem_unit : 0;
  return std::min(machine, cgroup_memory("/proc/self/cgroup", "/sys/fs/cgroup"));
}

size_t private_memory() {
  size_t bytes = usable_memory();
  for (const auto resource : {RLIMIT_DATA, RLIMIT_AS}) {
    rlimit limit{};
    if (getrlimit(resource, &limit) == 0) bytes = std::min(bytes, static_cast<size_t>(limit.rlim_cur));
  }
  return bytes;
}

ReadAhead::ReadAhead() : left_(usable_memory() / 10 * 8) {}

bool ReadAhead::claim(size_t bytes) {
  if (bytes > left_) return false;
  left_ -= bytes;
  return true;
}

void ReadAhead::read_by_node(const uint8_t* data, int64_t matrices, int64_t rows, int64_t stride,
                             ThreadPool& pool) {
  if (data == nullptr || !claim(static_cast<size_t>(matrices * rows * stride))) return;
  constexpr int64_t kStep = 4096, kRows = 16;
  pool.parallel_for(rows, kRows, [&](int64_t begin, int64_t end, int) {
    for (int64_t matrix = 0; matrix < matrices; ++matrix) {
      const uint8_t* first = data + (matrix * rows + begin) * stride;
      for (int64_t at = 0; at < (end - begin) * stride; at += kStep) {
        (void)*static_cast<const volatile uint8_t*>(first + at);
      }
    }
  });
}

void ReadAhead::read(const void* data, size_t bytes, bool enter) {
  if (data == nullptr || bytes == 0 || !claim(bytes)) return;
  start_reading(static_cast<const std::byte*>(data), bytes);
  if (enter) warmer_.add(static_cast<const std::byte*>(data), bytes);
}

}  // namespace millrace::cpu
