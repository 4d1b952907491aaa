#include "dist/rank_link.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_tree.h"

namespace millrace::dist {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses addresses_of(const std::string& host, uint16_t port, bool listens) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = listens ? AI_PASSIVE : 0;
  addrinfo* list = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (status != 0) throw_error(ErrorCode::kIo, "{}: {}", host, gai_strerror(status));
  return Addresses(list);
}

bool is_any(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) {
    const in6_addr& own = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    return std::memcmp(&own, &in6addr_any, sizeof(own)) == 0;
  }
  return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr == htonl(INADDR_ANY);
}

void set_no_delay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// Longer than the front waits for a beat. TCP itself gives up on a link that is cut after a quarter of an
// hour.
constexpr unsigned kUnheardMs = 4000;

void set_give_up(int fd) { setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnheardMs, sizeof(kUnheardMs)); }

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

int Socket::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Socket::shut_down() const {
  if (fd_ >= 0) ::shutdown(fd_, SHUT_RDWR);
}

bool Socket::readable(int timeout_ms) const {
  pollfd waits{.fd = fd_, .events = POLLIN, .revents = 0};
  return ::poll(&waits, 1, timeout_ms) > 0;
}

bool Socket::send(std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t count = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return true;
}

bool Socket::recv(std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t count = ::recv(fd_, bytes.data(), bytes.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return true;
}

bool Socket::send_line(std::string_view line) const {
  std::string text(line);
  text += '\n';
  return send(std::as_bytes(std::span(text)));
}

std::optional<std::string> Socket::recv_line() const {
  std::string line;
  for (std::byte next{}; line.size() < kMaxHello;) {
    if (!recv({&next, 1})) return std::nullopt;
    if (static_cast<char>(next) == '\n') return line;
    line += static_cast<char>(next);
  }
  return std::nullopt;
}

std::optional<std::vector<std::byte>> Socket::take(size_t most) const {
  std::vector<std::byte> bytes(most);
  ssize_t count = 0;
  do {
    count = ::recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::vector<std::byte>();
  if (count <= 0) return std::nullopt;
  bytes.resize(static_cast<size_t>(count));
  return bytes;
}

Socket listen_on(const std::string& host, uint16_t& port) {
  const Addresses list = addresses_of(host, port, true);
  int error = 0;
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    Socket socket(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol));
    if (!socket || ::bind(socket.fd(), at->ai_addr, at->ai_addrlen) != 0 || ::listen(socket.fd(), 64) != 0) {
      error = errno;
      continue;
    }
    sockaddr_storage bound{};
    socklen_t length = sizeof(bound);
    getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&bound), &length);
    if (is_any(bound)) {
      throw_error(ErrorCode::kBadInput, "found {}, which is every address of this machine, expected one",
                  host);
    }
    port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
    return socket;
  }
  throw_error(ErrorCode::kIo, "cannot listen on {}: {}", host, std::strerror(error));
}

Socket connect_to(const std::string& host, uint16_t port) {
  const Addresses list = addresses_of(host, port, false);
  int error = 0;
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    Socket socket(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol));
    if (socket) set_give_up(socket.fd());  // connecting is given up as well
    if (!socket || ::connect(socket.fd(), at->ai_addr, at->ai_addrlen) != 0) {
      error = errno;
      continue;
    }
    set_no_delay(socket.fd());
    return socket;
  }
  throw_error(ErrorCode::kIo, "cannot connect to {} port {}: {}", host, port, std::strerror(error));
}

Socket accept_from(const Socket& listener) {
  Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket) set_no_delay(socket.fd());
  return socket;
}

std::string make_key() {
  std::array<unsigned char, 32> bits{};
  if (getrandom(bits.data(), bits.size(), 0) != static_cast<ssize_t>(bits.size())) {
    throw_error(ErrorCode::kIo, "the system gave no random numbers: {}", std::strerror(errno));
  }
  std::string key;
  for (const unsigned char byte : bits) key += fmt::format("{:02x}", byte);
  return key;
}

bool same_key(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned differing = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    differing |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return differing == 0;
}

std::string to_line(const Hello& hello) {
  nlohmann::ordered_json claims = nlohmann::ordered_json::array();
  for (const Claim& claim : hello.claims) claims.push_back({claim.name, claim.value});
  const nlohmann::ordered_json line = {{"key", hello.key},     {"host", hello.host}, {"rank", hello.rank},
                                       {"ranks", hello.ranks}, {"pid", hello.pid},   {"data", hello.data},
                                       {"claims", claims}};
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::optional<Hello> hello_of(std::string_view line) {
  try {
    const nlohmann::ordered_json json = parse_json_tree(line);
    Hello hello{.key = json.at("key").get<std::string>(),
                .host = json.at("host").get<std::string>(),
                .rank = json.at("rank").get<int>(),
                .ranks = json.at("ranks").get<int>(),
                .pid = json.at("pid").get<int64_t>(),
                .data = json.at("data").get<bool>()};
    for (const auto& claim : json.at("claims")) {
      hello.claims.push_back({claim.at(0).get<std::string>(), claim.at(1).get<std::string>()});
    }
    return hello;
  } catch (const JsonTextError&) {
    return std::nullopt;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace millrace::dist
