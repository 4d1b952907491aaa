// The connections between a front process and the ranks it started: TCP, since ranks may be on other hosts,
// and opened by the rank. A connection begins with a line of JSON, the hello, which has the key that the
// front made for this group; the front answers with a line. Behind it come beats (every rank) or the step's
// messages (rank 0, a second connection). What ranks say to one another is MPI's (communicator.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dist/communicator.h"
#include "dist/shares.h"

namespace millrace::dist {

// A connected or listening socket, closed when it goes.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;

  explicit operator bool() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  int release();
  void close();
  void shut_down() const;  // the other side reads an end; whoever waits here is woken

  // Waits for something to read, or the end: false when none came.
  bool readable(int timeout_ms) const;
  // All of it, however long it takes. False: the connection has ended.
  bool send(std::span<const std::byte> bytes) const;
  bool recv(std::span<std::byte> bytes) const;
  bool send_line(std::string_view line) const;
  // Without the newline; nothing: it ended, or was longer than a hello may be.
  std::optional<std::string> recv_line() const;
  // What is there now, at most `most` bytes; nothing: the connection has ended. May be empty.
  std::optional<std::vector<std::byte>> take(size_t most) const;

 private:
  int fd_ = -1;
};

inline constexpr size_t kMaxHello = size_t{64} << 10;

// Of an address or a name of this machine, which others connect to; `port` becomes the one that was free.
// Throws Error.
Socket listen_on(const std::string& host, uint16_t& port);
// Throws Error{kIo} naming the address. The connection ends when what is sent over it does not arrive for
// seconds.
Socket connect_to(const std::string& host, uint16_t port);
Socket accept_from(const Socket& listener);  // empty when nobody is there any more

// 256 random bits in hexadecimal.
std::string make_key();
// In a time that does not depend on how much of them is equal.
bool same_key(std::string_view a, std::string_view b);

struct Hello {
  std::string key, host;
  int rank = 0, ranks = 1;
  int64_t pid = 0;
  bool data = false;               // rank 0's second connection
  std::vector<Claim> claims = {};  // what it has, which must be what the front has
};
std::string to_line(const Hello& hello);
std::optional<Hello> hello_of(std::string_view line);  // nothing: it is none

// What a rank says of itself, twice a second. Between processes of the same program: its bytes go as they
// are.
struct Beat {
  double waiting_s = 0;  // in the exchange of now
  uint64_t calls = 0;
  uint64_t loaded = 0, to_load = 0;  // bytes of its part of the model
  std::array<uint64_t, kMaxTensorRanks> sent{}, received{};
  std::array<double, kMaxTensorRanks> latency_s{}, bytes_per_s{};  // of the links, measured; 0: not yet
};

inline constexpr double kBeatSeconds = 0.5;

}  // namespace millrace::dist
