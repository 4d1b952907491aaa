// KV blocks on their way between the pools and the machine's memory (the cache's tiers), without anybody
// waiting. A block that leaves is copied aside on the device, in order with the steps; from there a stream of
// its own brings it to pinned memory while the next step runs, and finish() hands it over. A block that comes
// is copied to pinned memory at once and goes to the pool in order with the steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

class BlockCopies {
 public:
  // Blocks that may be on their way at once, each way, and the device memory that those leaving need; counted
  // in the workspace. What fills kAside, but two at least: one is handed over while another comes.
  static constexpr size_t kAside = size_t{16} << 20, kMaxPlaces = 64;
  static size_t places(size_t largest_block) {
    return largest_block == 0 ? 0 : std::clamp(kAside / largest_block, size_t{2}, kMaxPlaces);
  }
  static size_t device_bytes(size_t largest_block) { return places(largest_block) * largest_block; }

  // `steps`: the stream that steps run on. Pinned memory is made when the first block leaves or comes.
  BlockCopies(const Stream& steps, size_t largest_block);
  ~BlockCopies();
  BlockCopies(const BlockCopies&) = delete;
  BlockCopies& operator=(const BlockCopies&) = delete;

  // `to` is filled when finish() returns. Waits only when all places are taken, for the first of them.
  void read(const void* block, std::span<std::byte> to);
  // `from` may go on return.
  void write(void* block, std::span<const std::byte> from);
  // Of all reads so far. When it throws they are forgotten.
  void finish();

 private:
  struct Place {
    std::span<std::byte> to;  // empty: free
    Event aside, here;
  };
  void hand_over(size_t place);
  std::byte* pinned(PinnedBuffer& buffer, size_t place);

  const Stream& steps_;
  const size_t largest_, places_;
  DeviceBuffer aside_;           // [places][largest]
  PinnedBuffer leaving_, come_;  // [places][largest]
  Stream copies_;
  std::vector<Place> reads_;
  std::vector<Event> writes_;  // of each place: its copy to the pool is done
  size_t next_read_ = 0, next_write_ = 0, pending_ = 0;
};

}  // namespace millrace::cuda
