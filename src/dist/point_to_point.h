// Collectives made of messages between two ranks, for communicators that have nothing better.
#pragma once

#include "dist/communicator.h"

namespace millrace::dist {

class PointToPoint : public Communicator {
 public:
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                  std::span<const size_t> bytes_of_rank) override;
  void all_to_all(std::span<const std::byte> out, std::span<const size_t> out_bytes, std::span<std::byte> in,
                  std::span<const size_t> in_bytes) override;
  void broadcast(int root, std::span<std::byte> bytes) override;
  void barrier() override;
};

}  // namespace millrace::dist
