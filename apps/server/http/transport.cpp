#include "http/transport.h"

#include <boost/asio/post.hpp>
#include <boost/asio/ssl/stream.hpp>

#include "base/error.h"

namespace millrace::server {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

void close_socket(tcp::socket& socket) {
  error_code ignored;
  socket.shutdown(tcp::socket::shutdown_both, ignored);
  socket.close(ignored);
}

class PlainTransport final : public Transport {
 public:
  explicit PlainTransport(tcp::socket socket) : socket_(std::move(socket)) {}
  void handshake(Done done) override {
    asio::post(socket_.get_executor(), [done = std::move(done)] { done(true, 0); });
  }
  void read_some(char* data, size_t size, Done done) override {
    socket_.async_read_some(asio::buffer(data, size),
                            [done = std::move(done)](error_code error, size_t n) { done(!error, n); });
  }
  void write_some(const char* data, size_t size, Done done) override {
    socket_.async_write_some(asio::buffer(data, size),
                             [done = std::move(done)](error_code error, size_t n) { done(!error, n); });
  }
  void shutdown_send() override {
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
  }
  void close() override { close_socket(socket_); }

 private:
  tcp::socket socket_;
};

class TlsTransport final : public Transport {
 public:
  TlsTransport(tcp::socket socket, asio::ssl::context& tls) : stream_(std::move(socket), tls) {}
  void handshake(Done done) override {
    stream_.async_handshake(asio::ssl::stream_base::server,
                            [done = std::move(done)](error_code error) { done(!error, 0); });
  }
  void read_some(char* data, size_t size, Done done) override {
    stream_.async_read_some(asio::buffer(data, size),
                            [done = std::move(done)](error_code error, size_t n) { done(!error, n); });
  }
  void write_some(const char* data, size_t size, Done done) override {
    stream_.async_write_some(asio::buffer(data, size),
                             [done = std::move(done)](error_code error, size_t n) { done(!error, n); });
  }
  void shutdown_send() override {
    error_code ignored;
    stream_.next_layer().shutdown(tcp::socket::shutdown_send, ignored);
  }
  void close() override { close_socket(stream_.next_layer()); }

 private:
  asio::ssl::stream<tcp::socket> stream_;
};

}  // namespace

std::unique_ptr<Transport> make_transport(tcp::socket socket, asio::ssl::context* tls) {
  error_code ignored;
  socket.set_option(tcp::no_delay(true), ignored);
  // Left alone, the system keeps megabytes for a client that does not read, and we learn of it minutes later.
  constexpr int kSendBuffer = 256 << 10;
  socket.set_option(asio::socket_base::send_buffer_size(kSendBuffer), ignored);
  if (tls != nullptr) return std::make_unique<TlsTransport>(std::move(socket), *tls);
  return std::make_unique<PlainTransport>(std::move(socket));
}

std::unique_ptr<asio::ssl::context> make_tls(const std::string& cert_path, const std::string& key_path) {
  auto tls = std::make_unique<asio::ssl::context>(asio::ssl::context::tls_server);
  tls->set_options(asio::ssl::context::default_workarounds | asio::ssl::context::no_sslv2 |
                   asio::ssl::context::no_sslv3 | asio::ssl::context::no_tlsv1 |
                   asio::ssl::context::no_tlsv1_1);
  error_code error;
  tls->use_certificate_chain_file(cert_path, error);
  if (error) {
    throw_error(ErrorCode::kBadInput, "--tls-cert: {}: {}, expected a PEM certificate chain", cert_path,
                error.message());
  }
  tls->use_private_key_file(key_path, asio::ssl::context::pem, error);
  if (error) {
    throw_error(ErrorCode::kBadInput, "--tls-key: {}: {}, expected the certificate's private key in PEM",
                key_path, error.message());
  }
  return tls;
}

}  // namespace millrace::server
