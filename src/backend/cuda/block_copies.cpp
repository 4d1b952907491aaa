#include "backend/cuda/block_copies.h"

#include <cstring>
#include <utility>

#include "base/check.h"

namespace millrace::cuda {

BlockCopies::BlockCopies(const Stream& steps, size_t largest_block)
    : steps_(steps),
      largest_(largest_block),
      places_(places(largest_block)),
      aside_(device_bytes(largest_block), "the workspace"),
      reads_(places_),
      writes_(places_) {}

BlockCopies::~BlockCopies() { cudaStreamSynchronize(copies_.get()); }  // nothing may still use the buffers

std::byte* BlockCopies::pinned(PinnedBuffer& buffer, size_t place) {
  if (buffer.bytes() == 0) buffer = PinnedBuffer(places_ * largest_, "blocks on their way");
  return buffer.as<std::byte>() + place * largest_;
}

void BlockCopies::read(const void* block, std::span<std::byte> to) {
  MILLRACE_CHECK(!to.empty() && to.size() <= largest_);
  const size_t at = next_read_;
  if (!reads_[at].to.empty()) hand_over(at);
  std::byte *aside = aside_.as<std::byte>() + at * largest_, *here = pinned(leaving_, at);
  MILLRACE_CUDA_TRY(cudaMemcpyAsync(aside, block, to.size(), cudaMemcpyDeviceToDevice, steps_.get()));
  reads_[at].aside.record(steps_);
  copies_.wait_for(reads_[at].aside);
  MILLRACE_CUDA_TRY(cudaMemcpyAsync(here, aside, to.size(), cudaMemcpyDeviceToHost, copies_.get()));
  reads_[at].here.record(copies_);
  reads_[at].to = to;
  next_read_ = (at + 1) % places_;
  ++pending_;
}

void BlockCopies::hand_over(size_t place) {
  Place& read = reads_[place];
  const std::span<std::byte> to = std::exchange(read.to, {});
  --pending_;
  read.here.wait();
  std::memcpy(to.data(), pinned(leaving_, place), to.size());
}

void BlockCopies::finish() {
  try {
    // The first to have left is behind the last: pending ones lie before next_read_, in order.
    while (pending_ > 0) hand_over((next_read_ + places_ - pending_) % places_);
  } catch (...) {
    for (Place& read : reads_) read.to = {};
    pending_ = 0;
    throw;
  }
}

void BlockCopies::write(void* block, std::span<const std::byte> from) {
  MILLRACE_CHECK(!from.empty() && from.size() <= largest_);
  const size_t at = next_write_;
  writes_[at].wait();  // what was here before has gone to the pool
  std::byte* staged = pinned(come_, at);
  std::memcpy(staged, from.data(), from.size());
  MILLRACE_CUDA_TRY(cudaMemcpyAsync(block, staged, from.size(), cudaMemcpyHostToDevice, steps_.get()));
  writes_[at].record(steps_);
  next_write_ = (at + 1) % places_;
}

}  // namespace millrace::cuda
