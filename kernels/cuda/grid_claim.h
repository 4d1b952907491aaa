// The right to launch kernels whose CTAs wait for one another (moe/decode_persistent.cu, GEMMs that cut
// tiles between CTAs). All of such a kernel's CTAs must be resident at the same time; two such kernels side
// by side on one GPU could each have some of their CTAs resident and wait for the rest for ever. So one
// executor of a process has the right on a GPU; the others launch kernels that give the same bits without
// waiting.
//
// The claim must hold between executors that know nothing of each other, of different Devices of one GPU too,
// and no variable of the process may decide it (a library may be loaded twice, and hides its own variables).
// So the kernel decides: the claim is a socket bound to a name made of the process and the GPU. Two sockets
// cannot have one name; closing it, or the process's end, gives it back. Nothing is ever sent. Processes need
// no such claim against each other: their kernels take turns on a GPU. (Under MPS they do not; a server that
// shares a GPU by MPS must give one process the whole of it.)
#pragma once

#include <array>

namespace millrace::cuda {

using GpuUuid = std::array<unsigned char, 16>;

class GridClaim {
 public:
  // Throws Error{kDevice} when the system refuses a socket.
  explicit GridClaim(const GpuUuid& gpu);
  ~GridClaim();
  GridClaim(const GridClaim&) = delete;
  GridClaim& operator=(const GridClaim&) = delete;
  bool held() const { return socket_ >= 0; }

 private:
  int socket_ = -1;
};

}  // namespace millrace::cuda
