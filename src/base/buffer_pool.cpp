#include "base/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace millrace {
namespace {

// Zeroed pages aligned to `alignment`, large ones where the system has them; null when it has none at all.
std::byte* map_aligned(size_t bytes, size_t alignment) {
  void* raw = ::mmap(nullptr, bytes + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(raw);
  const size_t skip = (alignment - reinterpret_cast<uintptr_t>(begin) % alignment) % alignment;
  if (skip > 0) ::munmap(begin, skip);
  if (alignment > skip) ::munmap(begin + skip + bytes, alignment - skip);
  ::madvise(begin + skip, bytes, MADV_HUGEPAGE);
  return begin + skip;
}

}  // namespace

// ---------------------------------------------------------------- buddies

BuddyAllocator::~BuddyAllocator() {
  for (const auto& region : regions_) ::munmap(region->base, kRegion);
}

int BuddyAllocator::order_of(size_t bytes) {
  const size_t pages = std::max<size_t>(1, (bytes + kPage - 1) / kPage);
  return std::countr_zero(std::bit_ceil(pages));
}

size_t BuddyAllocator::rounded(size_t bytes) { return kPage << order_of(bytes); }

BuddyAllocator::Region& BuddyAllocator::region_of(const void* block) {
  const auto* at = static_cast<const std::byte*>(block);
  for (const auto& region : regions_) {
    if (at >= region->base && at < region->base + kRegion) return *region;
  }
  MILLRACE_CHECK(false && "a block of no region");
  return *regions_.front();
}

void BuddyAllocator::push(Region& region, std::byte* block, int order) {
  region.head[static_cast<size_t>(block - region.base) / kPage] = static_cast<uint8_t>(order | kFreeBit);
  auto* free = reinterpret_cast<Free*>(block);
  free->previous = nullptr;
  free->next = lists_[static_cast<size_t>(order)];
  if (free->next != nullptr) free->next->previous = free;
  lists_[static_cast<size_t>(order)] = free;
}

void BuddyAllocator::remove(Region& region, std::byte* block, int order) {
  auto* free = reinterpret_cast<Free*>(block);
  if (free->previous != nullptr) {
    free->previous->next = free->next;
  } else {
    lists_[static_cast<size_t>(order)] = free->next;
  }
  if (free->next != nullptr) free->next->previous = free->previous;
  region.head[static_cast<size_t>(block - region.base) / kPage] = kInside;
}

BuddyAllocator::Region* BuddyAllocator::add_region() {
  auto region = std::make_unique<Region>();
  regions_.reserve(regions_.size() + 1);
  region->base = map_aligned(kRegion, kRegion);
  if (region->base == nullptr) return nullptr;
  ++system_calls_;
  region->head.fill(kInside);
  regions_.push_back(std::move(region));
  push(*regions_.back(), regions_.back()->base, kOrders - 1);
  return regions_.back().get();
}

void* BuddyAllocator::allocate(size_t bytes) {
  const int wanted = order_of(bytes);
  MILLRACE_CHECK(wanted < kOrders);
  int order = wanted;
  while (order < kOrders && lists_[static_cast<size_t>(order)] == nullptr) ++order;
  if (order == kOrders) {
    if (add_region() == nullptr) return nullptr;
    order = kOrders - 1;
  }
  auto* block = reinterpret_cast<std::byte*>(lists_[static_cast<size_t>(order)]);
  Region& region = region_of(block);
  remove(region, block, order);
  while (order > wanted) {
    --order;
    push(region, block + (kPage << order), order);
  }
  region.head[static_cast<size_t>(block - region.base) / kPage] = static_cast<uint8_t>(wanted);
  return block;
}

void BuddyAllocator::release(void* pointer) {
  auto* block = static_cast<std::byte*>(pointer);
  Region& region = region_of(block);
  size_t at = static_cast<size_t>(block - region.base) / kPage;
  int order = region.head[at];
  MILLRACE_CHECK(order < kOrders);  // a free one, or the middle of one, is not
  region.head[at] = kInside;
  for (; order + 1 < kOrders; ++order) {
    const size_t buddy = at ^ (size_t{1} << order);
    if (region.head[buddy] != (order | kFreeBit)) break;
    remove(region, region.base + buddy * kPage, order);
    at = std::min(at, buddy);
  }
  push(region, region.base + at * kPage, order);
}

size_t BuddyAllocator::free_bytes() const {
  size_t bytes = 0;
  for (int order = 0; order < kOrders; ++order) {
    for (const Free* f = lists_[static_cast<size_t>(order)]; f != nullptr; f = f->next)
      bytes += kPage << order;
  }
  return bytes;
}

size_t BuddyAllocator::largest_free() const {
  for (int order = kOrders - 1; order >= 0; --order) {
    if (lists_[static_cast<size_t>(order)] != nullptr) return kPage << order;
  }
  return 0;
}

// ---------------------------------------------------------------- size classes

// A piece of 64 KiB cut into places of one class. Its head takes the first places.
struct BufferPool::Slab {
  struct Place {
    Place* next;
  };
  Place* free;
  Slab *next, *previous;  // in partial_
  int32_t index, used;
};

BufferPool::~BufferPool() = default;

int BufferPool::class_of(size_t bytes) {
  if (bytes <= kSmallest) return 0;
  const int octave = static_cast<int>(std::bit_width(bytes - 1)) - 7;  // 65..128: 0
  const size_t quarter = size_t{16} << octave;
  const auto step = static_cast<int>((bytes - (kSmallest << octave) + quarter - 1) / quarter);
  return 4 * octave + step;
}

size_t BufferPool::class_bytes(int index) {
  const int octave = index / 4, step = index % 4;
  return (kSmallest << octave) + static_cast<size_t>(step) * (size_t{16} << octave);
}

void* BufferPool::take_small(int index) {
  Slab*& list = partial_[static_cast<size_t>(index)];
  if (list == nullptr) {
    auto* bytes = static_cast<std::byte*>(buddies_.allocate(kSlab));
    if (bytes == nullptr) return nullptr;
    const size_t place = class_bytes(index), first = (sizeof(Slab) + 63) / 64 * 64;
    auto* slab = new (bytes) Slab{nullptr, nullptr, nullptr, index, 0};
    for (size_t at = first + (kSlab - first) / place * place; at > first;) {
      at -= place;
      slab->free = new (bytes + at) Slab::Place{slab->free};
    }
    list = slab;
  }
  Slab* slab = list;
  void* place = slab->free;
  slab->free = slab->free->next;
  ++slab->used;
  if (slab->free == nullptr) {
    list = slab->next;
    if (list != nullptr) list->previous = nullptr;
  }
  return place;
}

void BufferPool::give_small(void* buffer) {
  // A slab is aligned to its size, as every block of the buddies is.
  auto* slab = reinterpret_cast<Slab*>(reinterpret_cast<uintptr_t>(buffer) / kSlab * kSlab);
  Slab*& list = partial_[static_cast<size_t>(slab->index)];
  const bool was_full = slab->free == nullptr;
  slab->free = new (buffer) Slab::Place{slab->free};
  --slab->used;
  if (was_full) {
    slab->previous = nullptr;
    slab->next = list;
    if (list != nullptr) list->previous = slab;
    list = slab;
  }
  // One slab of a class stays, so that a buffer that comes and goes does not take the slab with it.
  if (slab->used > 0 || (slab->previous == nullptr && slab->next == nullptr)) return;
  if (slab->previous != nullptr) {
    slab->previous->next = slab->next;
  } else {
    list = slab->next;
  }
  if (slab->next != nullptr) slab->next->previous = slab->previous;
  buddies_.release(slab);
}

// ---------------------------------------------------------------- the pool

void* BufferPool::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  void* buffer = nullptr;
  size_t held = 0;
  if (bytes <= kLargestClass) {
    const int index = class_of(bytes);
    buffer = take_small(index);
    held = class_bytes(index);
  } else if (bytes <= BuddyAllocator::kRegion) {
    buffer = buddies_.allocate(bytes);
    held = BuddyAllocator::rounded(bytes);
  } else {
    held = (bytes + BuddyAllocator::kPage - 1) / BuddyAllocator::kPage * BuddyAllocator::kPage;
    buffer = map_aligned(held, BuddyAllocator::kPage);
    if (buffer != nullptr) huge_ += held;
    ++huge_calls_;
  }
  if (buffer == nullptr) throw std::bad_alloc();
  in_use_ += held;
  peak_ = std::max(peak_, in_use_);
  return buffer;
}

void BufferPool::release(void* buffer, size_t bytes) noexcept {
  if (buffer == nullptr) return;
  const std::lock_guard lock(mutex_);
  if (bytes <= kLargestClass) {
    in_use_ -= class_bytes(class_of(bytes));
    give_small(buffer);
  } else if (bytes <= BuddyAllocator::kRegion) {
    in_use_ -= BuddyAllocator::rounded(bytes);
    buddies_.release(buffer);
  } else {
    const size_t held = (bytes + BuddyAllocator::kPage - 1) / BuddyAllocator::kPage * BuddyAllocator::kPage;
    in_use_ -= held;
    huge_ -= held;
    ::munmap(buffer, held);
  }
}

BufferPoolStats BufferPool::stats() const {
  const std::lock_guard lock(mutex_);
  return {.in_use = in_use_,
          .peak = peak_,
          .reserved = buddies_.reserved() + huge_,
          .free = buddies_.free_bytes(),
          .largest_free = buddies_.largest_free(),
          .system_calls = buddies_.system_calls() + huge_calls_};
}

BufferPool& buffer_pool() {
  // Never destroyed: buffers of other static objects may outlive any order of destruction.
  static BufferPool* const pool = new BufferPool;
  return *pool;
}

}  // namespace millrace
