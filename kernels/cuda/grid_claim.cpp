#include "kernels/cuda/grid_claim.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>

#include "base/error.h"

namespace millrace::cuda {
namespace {

// "millrace-grid-PID-UUID", in the namespace of names that are no files: it begins with a zero.
socklen_t claim_name(const GpuUuid& gpu, sockaddr_un& address) {
  std::string name = fmt::format("millrace-grid-{}-", getpid());
  for (const unsigned char byte : gpu) name += fmt::format("{:02x}", byte);
  address = {};
  address.sun_family = AF_UNIX;
  static_assert(sizeof(address.sun_path) > 64 + 2 * sizeof(GpuUuid));
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

GridClaim::GridClaim(const GpuUuid& gpu) : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  sockaddr_un address;
  const socklen_t size = claim_name(gpu, address);
  if (socket_ >= 0 && bind(socket_, reinterpret_cast<const sockaddr*>(&address), size) == 0) return;
  const int error = errno;
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
  if (error == EADDRINUSE) return;
  throw_error(ErrorCode::kDevice,
              "device cuda: a socket, by which executors agree on who may use the whole GPU, was refused: {}",
              std::strerror(error));
}

GridClaim::~GridClaim() {
  if (socket_ >= 0) close(socket_);
}

}  // namespace millrace::cuda
