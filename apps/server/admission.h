// Admission: who may ask, from where, and how much. Everything that can be said of a request before its body
// is read, except what the Api itself knows (api.cpp).
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "client_limits.h"
#include "http.h"
#include "keys.h"
#include "options.h"
#include "site_rules.h"

namespace millrace::server {

class Admission {
 public:
  // Reads the keys; throws Error when that fails.
  explicit Admission(const ServerOptions& options);

  // The client's own address, as a trusted proxy tells it.
  void see_through_proxy(const HttpRequest& head, Client& client) const;
  // Each says what the client is told, or nothing when the request may go on.
  std::optional<HttpResponse> refuse_site(const HttpRequest& head) const;
  std::optional<HttpResponse> refuse_key(const HttpRequest& head, Client& client);  // fills in key_name
  std::optional<HttpResponse> refuse_amount(Client& client);                        // fills in use, headers

  size_t reload_keys();  // how many there are; throws, and the old ones stay, when the file is bad

 private:
  std::shared_ptr<const Keys> keys() const;

  const ServerOptions& options_;
  const SiteRules sites_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Keys> keys_;
  ClientTable clients_;
  RateLimiter wrong_keys_;  // by address
};

}  // namespace millrace::server
