// BlockStore: where the bytes of the main pool are. The cache decides with ids; whoever owns the memory (an
// executor on a CPU or a GPU) moves the bytes. The one way by which src/kv touches a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace millrace::kv {

// A block of group g is the same number of bytes everywhere: GroupOptions::block_bytes.
//
// Order: every call sees what the steps before it wrote, and every later step sees what the call wrote. A
// device may run all three asynchronously as long as that holds. write has consumed `from` on return. read
// gives what the block holds now, whatever is written to it later, but has filled `to` only when finish()
// returns: until then `to` must stay where it is. Called on the engine's thread only, never during a step.
// Errors (a device that fails) are thrown as millrace::Error{kDevice}.
class BlockStore {
 public:
  virtual ~BlockStore() = default;
  virtual void read(int group, int32_t block, std::span<std::byte> to) = 0;
  virtual void write(int group, int32_t block, std::span<const std::byte> from) = 0;
  virtual void copy(int group, int32_t from, int32_t to) = 0;
  // Of all reads so far. One that throws has forgotten them: nothing is written afterwards.
  virtual void finish() {}
};

}  // namespace millrace::kv
