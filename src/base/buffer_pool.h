// BufferPool: memory for the buffers of requests and steps, an executor's workspace among them. Small ones
// come from size classes (four to an octave, so at most a fifth is lost to rounding), classes and large ones
// from a buddy allocator over regions of large pages. A buffer that is given back is there for the next one:
// in steady state the system is not asked for anything.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace millrace {

struct BufferPoolStats {
  size_t in_use = 0, peak = 0;  // bytes handed out, rounded as they are held
  size_t reserved = 0;          // bytes taken from the system
  size_t free = 0;              // bytes of regions in nobody's hands
  size_t largest_free = 0;      // the largest piece of them
  uint64_t system_calls = 0;    // how often the system was asked for memory
  // Of what is free, the part that one large buffer could not use.
  double fragmentation() const {
    return free == 0 ? 0.0 : 1.0 - static_cast<double>(largest_free) / static_cast<double>(free);
  }
};

// Runs of 4 KiB pages cut from blocks of 2^k pages; two halves that are free become whole again. What a block
// has beyond the run is free at once. Nothing is written into free memory: pages cost nothing until used.
class BuddyAllocator {
 public:
  static constexpr size_t kPage = 4096, kRegion = size_t{32} << 20;
  static constexpr int kOrders = 14;  // 4 KiB to 32 MiB

  BuddyAllocator() = default;
  ~BuddyAllocator();
  BuddyAllocator(const BuddyAllocator&) = delete;
  BuddyAllocator& operator=(const BuddyAllocator&) = delete;

  // rounded(bytes) of them, aligned to the power of two at or above that; null when the system has no more.
  void* allocate(size_t bytes);
  void release(void* run, size_t bytes);  // bytes as allocated
  static size_t rounded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  // From any thread, while another allocates: each figure is right, together they may be of two moments.
  size_t reserved() const { return reserved_.load(std::memory_order_relaxed); }
  size_t free_bytes() const { return free_.load(std::memory_order_relaxed); }
  size_t largest_free() const;
  uint64_t system_calls() const { return reserved() / kRegion; }

 private:
  static constexpr size_t kRegionPages = kRegion / kPage;
  static constexpr uint8_t kFreeBit = 0x40, kInside = 0xff;
  static constexpr uint32_t kNoPage = ~uint32_t{0};
  // A page of all: which region's, and which of its pages.
  struct Region {
    std::byte* base;
    std::array<uint8_t, kRegionPages> head;             // of a block: its order, plus kFreeBit; else kInside
    std::array<uint32_t, kRegionPages> next, previous;  // of a free block: its neighbours in the list
  };
  static int order_of(size_t bytes);
  bool add_region();
  uint32_t page_at(const void* run) const;
  uint8_t& head(uint32_t page) { return regions_[page / kRegionPages]->head[page % kRegionPages]; }
  uint32_t& next(uint32_t page) { return regions_[page / kRegionPages]->next[page % kRegionPages]; }
  uint32_t& previous(uint32_t page) { return regions_[page / kRegionPages]->previous[page % kRegionPages]; }
  void push(uint32_t page, int order);
  void remove(uint32_t page, int order);
  void trim(uint32_t page, int order, size_t pages);
  void give_block(uint32_t page, int order);

  std::vector<std::unique_ptr<Region>> regions_;
  std::array<uint32_t, kOrders> lists_ = [] {
    std::array<uint32_t, kOrders> none;
    none.fill(kNoPage);
    return none;
  }();
  std::atomic<size_t> reserved_{0}, free_{0};
  std::array<std::atomic<int32_t>, kOrders> free_blocks_{};
};

class BufferPool {
 public:
  BufferPool() = default;
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Aligned to 16 bytes, from 256 bytes on to 64. Throws std::bad_alloc. Any thread.
  void* allocate(size_t bytes);
  void* allocate_zeroed(size_t bytes);
  void release(void* buffer, size_t bytes) noexcept;  // bytes as allocated
  BufferPoolStats stats() const;                      // takes no lock

 private:
  static constexpr size_t kSmallest = 64, kLargestClass = size_t{16} << 10, kSlab = size_t{64} << 10;
  static constexpr int kClasses = 33;  // 64, 80, 96, 112, 128, 160, ... 16384
  struct Slab;
  static int class_of(size_t bytes);
  static size_t class_bytes(int index);
  void* take_small(int index);
  void give_small(void* buffer);

  void count(size_t held);

  std::mutex mutex_;
  BuddyAllocator buddies_;
  std::array<Slab*, kClasses> partial_{};  // slabs with free places
  // Written under the lock, read by anybody.
  std::atomic<size_t> in_use_{0}, peak_{0}, huge_{0};
  std::atomic<uint64_t> huge_calls_{0};
};

// The one that every engine of this process draws from.
BufferPool& buffer_pool();

template <class T>
struct PooledAllocator {
  using value_type = T;
  PooledAllocator() = default;
  template <class U>
  PooledAllocator(const PooledAllocator<U>&) {}  // NOLINT(google-explicit-constructor): allocators convert
  T* allocate(size_t n) { return static_cast<T*>(buffer_pool().allocate(n * sizeof(T))); }
  void deallocate(T* buffer, size_t n) noexcept { buffer_pool().release(buffer, n * sizeof(T)); }
  template <class U>
  bool operator==(const PooledAllocator<U>&) const {
    return true;
  }
};

template <class T>
using Buffer = std::vector<T, PooledAllocator<T>>;

}  // namespace millrace
