#include "base/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace millrace {
namespace {

// Zeroed pages aligned to `alignment`, large ones where the system has them; null when it has none at all.
std::byte* map_aligned(size_t bytes, size_t alignment) {
  void* raw = ::mmap(nullptr, bytes + alignment, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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
  return std::countr_zero(std::bit_ceil(std::max<size_t>(1, (bytes + kPage - 1) / kPage)));
}

uint32_t BuddyAllocator::page_at(const void* run) const {
  const auto* at = static_cast<const std::byte*>(run);
  for (size_t r = 0; r < regions_.size(); ++r) {
    const std::byte* base = regions_[r]->base;
    if (at >= base && at < base + kRegion) {
      return static_cast<uint32_t>(r * kRegionPages + static_cast<size_t>(at - base) / kPage);
    }
  }
  MILLRACE_CHECK(false && "memory of no region");
  return kNoPage;
}

void BuddyAllocator::push(uint32_t page, int order) {
  uint32_t& list = lists_[static_cast<size_t>(order)];
  head(page) = static_cast<uint8_t>(order | kFreeBit);
  previous(page) = kNoPage;
  next(page) = list;
  if (list != kNoPage) previous(list) = page;
  list = page;
  free_.fetch_add(kPage << order, std::memory_order_relaxed);
  free_blocks_[static_cast<size_t>(order)].fetch_add(1, std::memory_order_relaxed);
}

void BuddyAllocator::remove(uint32_t page, int order) {
  const uint32_t before = previous(page), after = next(page);
  (before == kNoPage ? lists_[static_cast<size_t>(order)] : next(before)) = after;
  if (after != kNoPage) previous(after) = before;
  head(page) = kInside;
  free_.fetch_sub(kPage << order, std::memory_order_relaxed);
  free_blocks_[static_cast<size_t>(order)].fetch_sub(1, std::memory_order_relaxed);
}

bool BuddyAllocator::add_region() {
  auto region = std::make_unique<Region>();
  regions_.reserve(regions_.size() + 1);
  region->base = map_aligned(kRegion, kRegion);
  if (region->base == nullptr) return false;
  region->head.fill(kInside);
  regions_.push_back(std::move(region));
  reserved_.fetch_add(kRegion, std::memory_order_relaxed);
  push(static_cast<uint32_t>((regions_.size() - 1) * kRegionPages), kOrders - 1);
  return true;
}

void* BuddyAllocator::allocate(size_t bytes) {
  const int wanted = order_of(bytes);
  MILLRACE_CHECK(wanted < kOrders);
  int order = wanted;
  while (order < kOrders && lists_[static_cast<size_t>(order)] == kNoPage) ++order;
  if (order == kOrders) {
    if (!add_region()) return nullptr;
    order = kOrders - 1;
  }
  const uint32_t page = lists_[static_cast<size_t>(order)];
  remove(page, order);
  trim(page, order, rounded(std::max<size_t>(bytes, 1)) / kPage);
  return regions_[page / kRegionPages]->base + page % kRegionPages * kPage;
}

// Keeps the first `pages` of a block that is nobody's, as blocks of falling orders; the rest is free.
void BuddyAllocator::trim(uint32_t page, int order, size_t pages) {
  while (pages != size_t{1} << order) {
    --order;
    const size_t half = size_t{1} << order;
    if (pages > half) {
      head(page) = static_cast<uint8_t>(order);
      page += static_cast<uint32_t>(half);
      pages -= half;
    } else {
      push(page + static_cast<uint32_t>(half), order);
    }
  }
  head(page) = static_cast<uint8_t>(order);
}

void BuddyAllocator::release(void* run, size_t bytes) {
  uint32_t page = page_at(run);
  const uint32_t end = page + static_cast<uint32_t>(rounded(std::max<size_t>(bytes, 1)) / kPage);
  while (page < end) {
    const int order = head(page);
    MILLRACE_CHECK(order < kOrders);  // a free one, or the middle of one, is not
    give_block(page, order);
    page += uint32_t{1} << order;
  }
  MILLRACE_CHECK(page == end);
}

void BuddyAllocator::give_block(uint32_t page, int order) {
  head(page) = kInside;
  for (; order + 1 < kOrders; ++order) {
    const uint32_t buddy = page ^ (uint32_t{1} << order);
    if (head(buddy) != (order | kFreeBit)) break;
    remove(buddy, order);
    page = std::min(page, buddy);
  }
  push(page, order);
}

size_t BuddyAllocator::largest_free() const {
  for (int order = kOrders - 1; order >= 0; --order) {
    if (free_blocks_[static_cast<size_t>(order)].load(std::memory_order_relaxed) > 0) return kPage << order;
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
  buddies_.release(slab, kSlab);
}

// ---------------------------------------------------------------- the pool

void BufferPool::count(size_t held) {
  const size_t now = in_use_.load(std::memory_order_relaxed) + held;
  in_use_.store(now, std::memory_order_relaxed);
  if (now > peak_.load(std::memory_order_relaxed)) peak_.store(now, std::memory_order_relaxed);
}

void* BufferPool::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  void* buffer = nullptr;
  size_t held = BuddyAllocator::rounded(bytes);
  if (bytes <= kLargestClass) {
    const int index = class_of(bytes);
    buffer = take_small(index);
    held = class_bytes(index);
  } else if (bytes <= BuddyAllocator::kRegion) {
    buffer = buddies_.allocate(bytes);
  } else {
    constexpr size_t kHugePage = size_t{2} << 20;
    buffer = map_aligned(held, kHugePage);
    if (buffer != nullptr) huge_.fetch_add(held, std::memory_order_relaxed);
    huge_calls_.fetch_add(1, std::memory_order_relaxed);
  }
  if (buffer == nullptr) throw std::bad_alloc();
  count(held);
  return buffer;
}

void* BufferPool::allocate_zeroed(size_t bytes) {
  void* buffer = allocate(bytes);
  if (bytes <= BuddyAllocator::kRegion) std::memset(buffer, 0, bytes);  // beyond, it is the system's own
  return buffer;
}

void BufferPool::release(void* buffer, size_t bytes) noexcept {
  if (buffer == nullptr) return;
  const std::lock_guard lock(mutex_);
  size_t held = BuddyAllocator::rounded(bytes);
  if (bytes <= kLargestClass) {
    held = class_bytes(class_of(bytes));
    give_small(buffer);
  } else if (bytes <= BuddyAllocator::kRegion) {
    buddies_.release(buffer, bytes);
  } else {
    huge_.fetch_sub(held, std::memory_order_relaxed);
    ::munmap(buffer, held);
  }
  in_use_.fetch_sub(held, std::memory_order_relaxed);
}

BufferPoolStats BufferPool::stats() const {
  return {.in_use = in_use_.load(std::memory_order_relaxed),
          .peak = peak_.load(std::memory_order_relaxed),
          .reserved = buddies_.reserved() + huge_.load(std::memory_order_relaxed),
          .free = buddies_.free_bytes(),
          .largest_free = buddies_.largest_free(),
          .system_calls = buddies_.system_calls() + huge_calls_.load(std::memory_order_relaxed)};
}

BufferPool& buffer_pool() {
  // Never destroyed: buffers of other static objects may outlive any order of destruction.
  static BufferPool* const pool = new BufferPool;
  return *pool;
}

}  // namespace millrace
