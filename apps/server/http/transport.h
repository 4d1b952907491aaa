// Transport: a connected socket, plain or TLS, with callbacks. They come on the executor the socket was made
// with, and never from inside the call that started them.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <functional>
#include <memory>
#include <string>

namespace millrace::server {

class Transport {
 public:
  using Done = std::function<void(bool ok, size_t bytes)>;
  virtual ~Transport() = default;
  virtual void handshake(Done done) = 0;
  virtual void read_some(char* data, size_t size, Done done) = 0;
  virtual void write_some(const char* data, size_t size, Done done) = 0;
  virtual void shutdown_send() = 0;  // no more from us; the client may still send
  virtual void close() = 0;          // what is under way ends with ok == false
};

std::unique_ptr<Transport> make_transport(boost::asio::ip::tcp::socket socket,
                                          boost::asio::ssl::context* tls);
// Throws Error when the files cannot be read or do not belong together.
std::unique_ptr<boost::asio::ssl::context> make_tls(const std::string& cert_path,
                                                    const std::string& key_path);

}  // namespace millrace::server
